"""Where a drafter's rows lie in the cache, and what that costs, against figures made by hand."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from architecture_of import architecture_of
from hypothesis import given
from hypothesis import strategies as st
from rank_of import rank_of

from modelserve.errors import InvalidInput
from modelserve.published import published_assistant
from modelserve.sizing.draft_pages import DraftCache, DraftPages
from modelserve.sizing.kernel_buffers import kernel_buffers
from modelserve.sizing.memory import memory_plan
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.prefixes import window_bytes
from modelserve.sizing.speculation import MOST_DRAFTS, Speculation

GIB = 1 << 30
ZLAB = published_assistant("hf://z-lab/gemma-4-31B-it-DFlash").assistant
DFLASH = DraftCache(full_layers=1, window_layers=4, window=2048, kv_heads=8, head_dim=128)
ALL_FULL = DraftCache(full_layers=5, window_layers=0, window=0, kv_heads=8, head_dim=128)
ALL_WINDOW = DraftCache(full_layers=0, window_layers=5, window=2048, kv_heads=8, head_dim=128)
DSPARK_12B = DraftCache(full_layers=5, window_layers=0, window=0, kv_heads=1, head_dim=512, v_only=True)


def _geometry(
    variant: str = "31B",
    draft: DraftCache | None = DFLASH,
    *,
    tp: int = 1,
    dtype: KVCacheDtype = KVCacheDtype.BFLOAT16,
) -> CacheGeometry:
    architecture = architecture_of(variant)
    layout = KVCacheLayout.least(architecture)
    return cache_geometry(architecture, dtype=dtype, layout=layout, tensor_parallel_size=tp, draft=draft)


def test_a_drafter_of_31b_has_a_ring_of_13_pages() -> None:
    """A full layer adds 64 x 8 x 128 x 2 x 2 bytes to a global page; 176 tokens of four window layers fill it whole."""
    geometry = _geometry()
    draft = geometry.draft
    assert draft is not None
    assert geometry.global_page.page_bytes == 2_621_440 + 262_144 == 176 * 16_384
    assert (draft.full_offset_bytes, draft.layer_bytes, draft.row_bytes) == (2_621_440, 262_144, 4_096)
    assert (draft.page_tokens, draft.ring_layer_bytes, draft.ring_entries) == (176, 176 * 4_096, 13)
    assert draft.first_ring_entry == 262_144 // 64
    assert 13 * geometry.global_page.page_bytes == 37_486_592
    pages = [geometry.draft_ring_pages(length) for length in (1, 176, 177, 12 * 176, 12 * 176 + 1, 131_072)]
    assert pages == [1, 1, 2, 12, 13, 13]
    without = _geometry(draft=None)
    added = geometry.held_bytes(131_072) - without.held_bytes(131_072)
    assert added == 2048 * 262_144 + 37_486_592  # 4,096 bytes a token, and the ring


def test_requests_of_131072_tokens_beside_a_drafter_of_3_07_gb() -> None:
    """With all five layers full there would be 7.4."""
    architecture = architecture_of("31B")
    plan = memory_plan(architecture, rank_of(architecture), total_bytes=int(139.8 * GIB), utilization=Decimal("0.9"))
    left = plan.kv_pool_bytes - 3_070_000_000
    assert _geometry().concurrency(left, 131_072) >= Decimal("9.7")
    all_full = _geometry(draft=replace(DFLASH, full_layers=5, window_layers=0, window=0))
    assert all_full.concurrency(left, 131_072) < Decimal("7.6")


@pytest.mark.parametrize(
    ("variant", "draft", "tp", "page_bytes", "tokens", "entries"),
    [
        ("31B", DFLASH, 2, 1_441_792, 176, 13),
        ("31B", DFLASH, 4, 720_896, 176, 13),
        ("31B", DFLASH, 8, 688_128, 336, 7),  # a global page of the model has one head on four ranks and on eight
        ("31B", ALL_FULL, 1, 2_621_440 + 5 * 262_144, 0, 0),
        ("31B", ALL_WINDOW, 1, 2_621_440, 128, 18),
        ("26B-A4B", replace(DFLASH, kv_heads=4), 1, 655_360 + 131_072, 96, 24),
        ("12B", DSPARK_12B, 1, 524_288 + 5 * 65_536, 0, 0),
    ],
)
def test_pages_by_drafter_and_ranks(
    variant: str, draft: DraftCache, tp: int, page_bytes: int, tokens: int, entries: int
) -> None:
    geometry = _geometry(variant, draft, tp=tp)
    assert geometry.draft is not None
    assert geometry.global_page.page_bytes == page_bytes
    assert (geometry.draft.page_tokens, geometry.draft.ring_entries) == (tokens, entries)


def test_ranks_beyond_the_heads_share_them() -> None:
    draft = _geometry(draft=replace(DFLASH, kv_heads=2), tp=8).draft
    assert draft is not None
    assert draft.kv_heads == 1


def test_rows_of_drafts_are_not_stored_in_eight_bits() -> None:
    eight, sixteen = _geometry(dtype=KVCacheDtype.FP8_E4M3).draft, _geometry().draft
    assert eight is not None
    assert sixteen is not None
    assert eight.layer_bytes == sixteen.layer_bytes
    assert eight.page_tokens == 96  # 1,310,720 + 262,144 bytes are 96 tokens of four layers
    assert eight.full_offset_bytes == _geometry(draft=None, dtype=KVCacheDtype.FP8_E4M3).global_page.page_bytes


def test_without_a_drafter_nothing_is_larger() -> None:
    geometry = _geometry(draft=None)
    assert (geometry.draft, geometry.global_page.draft_bytes, geometry.draft_ring_pages(131_072)) == (None, 0, 0)


_DRAFTS = st.builds(
    DraftCache,
    full_layers=st.integers(0, 5),
    window_layers=st.integers(1, 5),
    window=st.integers(1, 4096),
    kv_heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([16, 128, 512]),
    v_only=st.booleans(),
    element_bytes=st.sampled_from([2, 4]),
)
_GEOMETRIES = st.builds(
    lambda variant, draft, tp, dtype: _geometry(variant, draft, tp=tp, dtype=dtype),
    variant=st.sampled_from(["E2B", "E4B", "12B", "26B-A4B", "31B"]),
    draft=_DRAFTS,
    tp=st.sampled_from([1, 2, 8]),
    dtype=st.sampled_from([KVCacheDtype.BFLOAT16, KVCacheDtype.INT8]),
)


@given(geometry=_GEOMETRIES)
def test_layers_of_drafts_lie_side_by_side_and_aligned(geometry: CacheGeometry) -> None:
    draft = geometry.draft
    assert isinstance(draft, DraftPages)
    size = geometry.global_page.page_bytes
    assert draft.full_offset_bytes == geometry.global_page.layer_bytes * len(geometry.global_page.layers)
    assert draft.full_offset_bytes + draft.full_layers * draft.layer_bytes <= size
    assert draft.window_layers * draft.ring_layer_bytes <= size
    assert draft.page_tokens >= 16
    assert draft.page_tokens % 16 == 0
    planes = draft.ring_layer_bytes // len(draft.planes), draft.layer_bytes // len(draft.planes)
    assert not any(each % 128 for each in (size, draft.full_offset_bytes, *planes))
    another = (draft.page_tokens + 16) * draft.row_bytes * draft.window_layers
    assert another > size, "a page has as many tokens as fit"


@given(geometry=_GEOMETRIES)
def test_a_ring_has_the_window_of_every_place_to_resume_at(geometry: CacheGeometry) -> None:
    """A prefix that ends at E keeps sliding pages from the one of E - W - 63 on, so it serves positions from
    E - 95 on; who ended there may have two steps in flight, whose drafts are all wrong, and 31 tokens to the next page.
    """
    draft = geometry.draft
    assert draft is not None
    end = 1 << 20
    oldest = end - 63 - 32 - max(draft.window, geometry.window)
    newest = end + 2 * (MOST_DRAFTS + 1) + 31
    assert end - draft.kept_tokens <= oldest
    assert newest - draft.ring_tokens < oldest, "nothing that is written behind the end takes the place of a kept row"
    assert newest - (draft.ring_tokens - draft.page_tokens) >= end - draft.kept_tokens, "no entry is for nothing"


@given(geometry=_GEOMETRIES, pool=st.integers(0, 200 * GIB), length=st.integers(1, 400_000))
def test_requests_with_rings_are_counted(geometry: CacheGeometry, pool: int, length: int) -> None:
    longest = geometry.longest_request(pool)
    assert longest == 0 or geometry.held_bytes(longest) <= pool
    assert geometry.held_bytes(longest + 1) > pool
    assert geometry.requests(pool, length) * geometry.held_bytes(length) <= pool
    assert geometry.held_bytes(length) <= geometry.held_bytes(length + 1)


def test_tables_of_a_rank_have_the_ring() -> None:
    architecture = architecture_of("31B")
    without = rank_of(architecture, speculation=Speculation(15))
    speculation = Speculation().with_drafter(ZLAB, as_many_as_pay=True)
    assert (speculation.num_tokens, speculation.draft_cache) == (15, DFLASH)
    drafted = rank_of(architecture, speculation=speculation)
    more = kernel_buffers(architecture, drafted)["block_tables"] - kernel_buffers(architecture, without)["block_tables"]
    assert more == 64 * 16 * 4  # 13 entries, padded


def test_a_cached_window_has_the_ring() -> None:
    more = window_bytes(_geometry()) - window_bytes(_geometry(draft=None))
    assert more == 13 * _geometry().global_page.page_bytes
    few = window_bytes(_geometry(), own_tokens=100) - window_bytes(_geometry(draft=None), own_tokens=100)
    assert few == 2 * _geometry().global_page.page_bytes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"full_layers": 0, "window_layers": 0, "window": 0}, "0 full and 0 window layers"),
        ({"window": 0}, "window is 0 tokens for 4 layers"),
        ({"window_layers": 0}, "window is 2048 tokens for 0 layers"),
        ({"head_dim": 3}, "multiple of 8 bytes"),
    ],
)
def test_sizes_that_nothing_is_laid_out_by(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _geometry(draft=replace(DFLASH, **wrong))
