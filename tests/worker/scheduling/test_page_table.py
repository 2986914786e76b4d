"""Page tables: exactly the pages that sizing charges, at every length and for every chunking."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stamped_device import StampedModel

from modelserve.architecture import LayerKind
from modelserve_worker.batch import SlidingTable
from modelserve_worker.scheduling.arena import OutOfPagesError, PageArena
from modelserve_worker.scheduling.page_table import PageTable

S, G = LayerKind.SLIDING, LayerKind.GLOBAL


@given(
    window=st.integers(1, 12),
    tokens=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=12),
)
@settings(max_examples=300, deadline=None)
def test_a_request_holds_what_sizing_says_and_reads_the_window(
    window: int, tokens: tuple[int, int], chunks: list[int]
) -> None:
    geometry = StampedModel((S, G)).geometry(
        window=window, global_tokens=tokens[0], sliding_tokens=tokens[1], global_row=3, sliding_row=2
    )
    arena = PageArena(geometry, geometry.held_bytes(sum(chunks)))
    table = PageTable(arena, geometry)
    start, before = 0, SlidingTable(0, ())
    for chunk in chunks:
        end = start + chunk
        assert table.bytes_to_reserve(end) == geometry.held_bytes(end) - arena.held_bytes
        table.reserve(end)
        assert arena.held_bytes == table.held_bytes == geometry.held_bytes(end)
        assert arena.held_pages(S) == geometry.sliding_pages(end)
        read, write = table.advance(end)
        assert read == before
        assert _covered(write, tokens[1]) == _pages(max(0, end - window + 1), end, tokens[1])
        assert len(set(write.pages)) == len(write.pages)
        assert len(table.global_numbers(end)) == -(-end // tokens[0])
        start, before = end, write
    table.release()
    arena.check_integrity()
    assert arena.held_bytes == 0


def _covered(table: SlidingTable, page_tokens: int) -> set[int]:
    return set(range(table.first, table.first + len(table.pages)))


def _pages(low: int, high: int, page_tokens: int) -> set[int]:
    return {position // page_tokens for position in range(low, high)}


def test_expired_pages_come_back_in_place_and_live_ones_stay() -> None:
    geometry = StampedModel((S,)).geometry(window=5, global_tokens=1, sliding_tokens=2, global_row=1, sliding_row=1)
    table = PageTable(PageArena(geometry, geometry.held_bytes(100)), geometry)
    table.reserve(100)
    _, first = table.advance(6)
    read, second = table.advance(9)
    assert read == first
    assert (first.first, len(first.pages), second.first, len(second.pages)) == (1, 2, 2, 3)
    assert second.pages[0] == first.pages[1], "logical page 2 is live in both"
    assert first.pages[0] in second.pages, "the page that the window left is used again"
    assert table.global_numbers(9) == ()


def test_numbers_follow_moves() -> None:
    geometry = StampedModel((S, G)).geometry(window=9, global_tokens=2, sliding_tokens=1, global_row=1, sliding_row=2)
    arena = PageArena(geometry, geometry.held_bytes(4) + 4)
    hole = arena.allocate(G)
    table = PageTable(arena, geometry)
    table.reserve(4)
    assert table.global_numbers(4) == (1, 2)
    arena.release(hole)
    for _ in range(2):
        arena.allocate(S)
    assert table.global_numbers(4) == (1, 0)
    assert table.global_numbers(2) == (1,)


def test_a_short_pool_says_what_is_missing() -> None:
    geometry = StampedModel((S, G)).geometry(window=4, global_tokens=2, sliding_tokens=2, global_row=1, sliding_row=1)
    arena = PageArena(geometry, geometry.held_bytes(4) - 1)
    table = PageTable(arena, geometry)
    with pytest.raises(OutOfPagesError, match="page needs 2 bytes"):
        table.reserve(4)
    table.release()
    assert arena.held_bytes == 0
