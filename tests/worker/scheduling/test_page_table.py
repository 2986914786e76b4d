"""Page tables: exactly the pages that sizing charges, at every length, in entries that never change their page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stamped_device import StampedModel

from modelserve.model.architecture import LayerKind
from modelserve_worker.scheduling.pages.arena import OutOfPagesError, PageArena
from modelserve_worker.scheduling.pages.page_table import PageTable

S, G = LayerKind.SLIDING, LayerKind.GLOBAL


@given(
    window=st.integers(1, 12),
    tokens=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    kinds=st.sampled_from([(S, G), (S,), (G,)]),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=12),
)
def test_a_request_holds_what_sizing_says_and_every_entry_once(
    window: int, tokens: tuple[int, int], kinds: tuple[LayerKind, ...], chunks: list[int]
) -> None:
    geometry = StampedModel(kinds).geometry(
        window=window, global_tokens=tokens[0], sliding_tokens=tokens[1], global_row=3, sliding_row=2
    )
    arena = PageArena(geometry, geometry.held_bytes(sum(chunks)))
    table = PageTable(arena, geometry, slot=4)
    entries: dict[LayerKind, dict[int, int]] = {S: {}, G: {}}
    end = 0
    for chunk in chunks:
        end += chunk
        need = table.bytes_to_reserve(end)
        assert need == geometry.held_bytes(end) - arena.held_bytes
        assert (need == 0) == (end <= table.covered_tokens)
        table.reserve(end)
        assert arena.held_bytes == table.held_bytes == geometry.held_bytes(end)
        assert table.covered_tokens >= end
        assert table.bytes_to_reserve(min(table.covered_tokens, 10**6)) == 0
        for kind, known in entries.items():
            updates = arena.take_updates(kind)
            assert set(updates.slots.tolist()) <= {4}
            new = dict(zip(updates.indices.tolist(), updates.pages.tolist(), strict=True))
            assert not known.keys() & new.keys(), "an entry keeps its page"
            known.update(new)
        assert sorted(entries[G]) == list(range(geometry.global_pages(end)))
        assert sorted(entries[S]) == list(range(geometry.sliding_pages(end)))
    table.resend()
    for kind, known in entries.items():
        updates = arena.take_updates(kind)
        assert dict(zip(updates.indices.tolist(), updates.pages.tolist(), strict=True)) == known
    table.release()
    arena.check_integrity()
    assert arena.held_bytes == 0


def test_a_full_window_needs_no_sliding_page_at_any_length() -> None:
    geometry = StampedModel((S,)).geometry(window=5, global_tokens=1, sliding_tokens=2, global_row=1, sliding_row=1)
    arena = PageArena(geometry, geometry.held_bytes(100))
    table = PageTable(arena, geometry, slot=0)
    table.reserve(4)
    assert (arena.held_pages(S), table.covered_tokens) == (2, 4)
    table.reserve(5)
    assert arena.held_pages(S) == geometry.sliding_table_entries == 3
    assert table.covered_tokens > 10**9
    assert len(arena.take_updates(S).pages) == 3
    table.reserve(10**6)
    assert len(arena.take_updates(S).pages) == 0


def test_a_short_pool_says_what_is_missing() -> None:
    geometry = StampedModel((S, G)).geometry(window=4, global_tokens=2, sliding_tokens=2, global_row=1, sliding_row=1)
    arena = PageArena(geometry, geometry.held_bytes(4) - 1)
    table = PageTable(arena, geometry, slot=0)
    with pytest.raises(OutOfPagesError, match="2 sliding_attention pages need 4 bytes; 3 of the pool's 7 are free"):
        table.reserve(4)
    table.release()
    assert arena.held_bytes == 0
