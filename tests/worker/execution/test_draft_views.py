"""A drafter's rows in the cache: where its planes and its ring's entries lie, and what goes with a page."""

from __future__ import annotations

import pytest
import torch

from modelserve.model.architecture import LayerKind
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype
from modelserve_worker.batch import HostCopy, PageCheck, PageMove, draft_stored_from
from modelserve_worker.cache.host_memory import HostMemory
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.cache.kv_stamps import FULL_DRAFT_LAYERS, WINDOW_DRAFT_LAYERS
from modelserve_worker.step.block_tables import BlockTables, context_entries, table_entries

CPU = torch.device("cpu")
DRAFT = DraftCache(full_layers=2, window_layers=3, window=100, kv_heads=2, head_dim=16)


@pytest.fixture
def geometry(small_architecture, geometry_of) -> CacheGeometry:
    return geometry_of(small_architecture("31b", sliding_window=40), KVCacheDtype.BFLOAT16, draft=DRAFT)


@pytest.mark.parametrize("v_only", [False, True])
@pytest.mark.parametrize(("element_bytes", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_planes_of_drafts_are_in_their_pages_and_nowhere_else(
    small_architecture, geometry_of, v_only: bool, element_bytes: int, dtype: torch.dtype
) -> None:
    draft = DraftCache(2, 3, 100, 2, 16, v_only=v_only, element_bytes=element_bytes)
    architecture = small_architecture("31b", sliding_window=40)
    geometry = geometry_of(architecture, KVCacheDtype.INT8, draft=draft)
    pages = geometry.draft
    cache = KVCache(geometry, 1 << 20, device=CPU)
    size, count = geometry.global_page.page_bytes, cache.num_pages[LayerKind.GLOBAL]
    planes = ("v",) if v_only else ("k", "v")
    full = [cache.full_draft_planes(i)[name] for i in range(2) for name in planes]
    window = [cache.window_draft_planes(i)[name] for i in range(3) for name in planes]
    assert [view.shape for view in full] == [(count, 2, 64, 16)] * len(full)
    assert [view.shape for view in window] == [(count, 2, pages.page_tokens, 16)] * len(window)
    assert {view.dtype for view in (*full, *window)} == {dtype}
    row = int(cache.page_rows(LayerKind.GLOBAL, [3])[0])
    start = (1 << 20) - 4 * size  # of page 3
    for views, first in ((full, pages.full_offset_bytes), (window, 0)):
        written = torch.zeros(1 << 20, dtype=torch.int32)
        for view in views:
            cache.arena.zero_()
            view[row] = 1.25
            elements = cache.arena.view(-1, element_bytes).any(-1)
            written += elements.repeat_interleave(element_bytes)
        assert written.max() == 1, "two planes meet"
        bytes_of_all = sum(view[row].numel() for view in views) * element_bytes
        assert written[start + first : start + first + bytes_of_all].all()
        assert int(written.sum()) == bytes_of_all
    model = {layer: cache.planes(layer) for layer in geometry.global_page.layers}
    assert set(model.values()) == {("v",)}, "the model's planes are as they were"


def test_a_move_takes_the_rows_of_drafts_along(geometry: CacheGeometry) -> None:
    cache = KVCache(geometry, 1 << 20, device=CPU)
    cache.arena.zero_()
    source, destination = cache.page_rows(LayerKind.GLOBAL, [1, 4]).tolist()
    cache.full_draft_planes(1)["k"][source] = 2.0
    before = cache.pages(LayerKind.GLOBAL)[source].clone()
    cache.move([PageMove(LayerKind.GLOBAL, 1, 4)])
    assert (cache.full_draft_planes(1)["k"][destination] == 2.0).all()
    assert (cache.pages(LayerKind.GLOBAL)[destination] == before).all()


def test_a_ring_is_behind_the_pages_of_the_longest_context(geometry: CacheGeometry) -> None:
    """Whatever length is served: the scheduler knows that one, the tables are made before it is known."""
    draft = geometry.draft
    assert draft is not None
    for served in (100, 600, 64 * draft.first_ring_entry):
        entries = table_entries(geometry, LayerKind.GLOBAL, max_model_len=served)
        assert draft.first_ring_entry + draft.ring_entries <= entries
        assert entries % 16 == 0
        assert context_entries(geometry, LayerKind.GLOBAL, max_model_len=served) <= draft.first_ring_entry
    tables = BlockTables(geometry, max_num_seqs=2, max_model_len=600, device=CPU)
    assert tables.host[LayerKind.GLOBAL].shape[1] == entries
    assert tables.context_entries[LayerKind.GLOBAL] == 16


def test_attention_of_the_model_reads_tables_as_wide_as_without_a_drafter(small_architecture, geometry_of) -> None:
    architecture = small_architecture("31b", sliding_window=40)
    for length in (1, 1000, 5000):
        with_draft, without = (
            BlockTables(geometry_of(architecture, draft=each), max_num_seqs=1, max_model_len=length, device=CPU)
            for each in (DRAFT, None)
        )
        assert with_draft.context_entries == without.context_entries
        assert without.context_entries == {kind: table.shape[1] for kind, table in without.host.items()}


def test_a_chunk_stores_no_row_over_another(geometry: CacheGeometry) -> None:
    draft = geometry.draft
    assert draft is not None
    for end in (1, draft.kept_tokens, draft.kept_tokens + 1, 10_000):
        first = draft_stored_from(draft, end)
        assert first == max(0, end - draft.kept_tokens)
        assert end - first <= draft.ring_tokens


def test_rows_of_drafts_that_are_no_numbers_are_found(geometry: CacheGeometry) -> None:
    """Of full layers with the model's rows of the page; of a ring among rows of two rounds, those named alone."""
    draft = geometry.draft
    assert draft is not None
    cache = KVCache(geometry, 1 << 20, device=CPU)
    cache.arena.zero_()
    rows = cache.page_rows(LayerKind.GLOBAL, range(6)).tolist()
    cache.full_draft_planes(1)["k"][rows[1], 1, 20, 3] = torch.nan
    size = draft.page_tokens
    cache.window_draft_planes(2)["v"][rows[3], 0, size - 1, 0] = torch.inf
    cache.window_draft_planes(0)["k"][rows[4], 1, 5, 0] = torch.nan
    kind, newest = LayerKind.GLOBAL, 4  # rows from size - 4 on, and the first `newest`
    checks = [
        PageCheck(kind, 0, 64), PageCheck(kind, 1, 20), PageCheck(kind, 1, 21),
        PageCheck(kind, 3, 4 + newest, size - 4), PageCheck(kind, 3, size - 2, 1), PageCheck(kind, 3, size - 1, 0),
        PageCheck(kind, 4, 4 + newest, size - 4), PageCheck(kind, 4, 4 + newest + 2, size - 4),
    ]  # fmt: skip
    assert cache.unsound(checks).tolist() == [False, False, True, True, False, False, False, True]


def test_stamps_of_drafts_go_with_their_page_and_end_with_its_use(geometry: CacheGeometry) -> None:
    draft = geometry.draft
    assert draft is not None
    cache = KVCache(geometry, 1 << 20, device=CPU, debug_stamps=True)
    stamps, (model, *_) = cache.stamps, geometry.global_page.layers
    assert stamps is not None
    source, destination = cache.page_rows(LayerKind.GLOBAL, [1, 4]).tolist()
    window, full, tokens = WINDOW_DRAFT_LAYERS + 2, FULL_DRAFT_LAYERS + 1, draft.page_tokens

    def slot(row: int, token: int, of: int) -> torch.Tensor:
        return torch.tensor([row * of + token])

    stamps.write(window, slot(source, tokens - 1, tokens), torch.tensor([77]))
    cache.move([PageMove(LayerKind.GLOBAL, 1, 4)])
    assert stamps.read_slots(window, slot(destination, tokens - 1, tokens)).tolist() == [77]
    stamps.write(full, slot(destination, 3, 64), torch.tensor([5]))
    stamps.write(model, slot(destination, 3, 64), torch.tensor([6]))
    assert stamps.read_slots(window, slot(destination, tokens - 1, tokens)).tolist() == [-1], "it is of no ring now"
    assert stamps.read_slots(full, slot(destination, 3, 64)).tolist() == [5]
    stamps.write(window, slot(destination, 0, tokens), torch.tensor([8]))
    assert stamps.read_slots(full, slot(destination, 3, 64)).tolist() == [-1]
    assert stamps.read_slots(model, slot(destination, 3, 64)).tolist() == [-1]


def test_rows_of_drafts_come_back_from_host_memory_bit_for_bit(geometry: CacheGeometry) -> None:
    cache = KVCache(geometry, 1 << 20, device=CPU, debug_stamps=True)
    cache.arena.random_(0, 256)
    memory = HostMemory(cache, 1 << 20)
    memory._pin_all()
    row, tokens = int(cache.page_rows(LayerKind.GLOBAL, [2])[0]), cache.window_draft_planes(0)["k"].shape[2]
    before = [cache.window_draft_planes(i)["k"][row].clone() for i in range(3)]
    assert cache.stamps is not None
    cache.stamps.write(WINDOW_DRAFT_LAYERS, torch.tensor([row * tokens]), torch.tensor([3]))
    memory._copy([HostCopy(LayerKind.GLOBAL, 2, 5)], to_host=True)
    cache.arena.zero_()
    cache.stamps.write(WINDOW_DRAFT_LAYERS, torch.tensor([row * tokens]), torch.tensor([4]))
    memory._copy([HostCopy(LayerKind.GLOBAL, 2, 5)], to_host=False)
    after = [cache.window_draft_planes(i)["k"][row] for i in range(3)]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert cache.stamps.read_slots(WINDOW_DRAFT_LAYERS, torch.tensor([row * tokens])).tolist() == [3]
