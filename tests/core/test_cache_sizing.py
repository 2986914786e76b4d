"""Pages, held bytes and memory terms against independent figures."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from architecture_of import architecture_of
from hypothesis import given
from hypothesis import strategies as st
from rank_of import rank_of

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.published import published_model, published_uris
from modelserve.sizing.activation import activation_bytes, activation_terms
from modelserve.sizing.memory import memory_plan, overhead_terms
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry

GIB = 1 << 30
FIGURES: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("kv_by_tp.json").read_text())
CASES = [(variant, int(tp)) for variant, by_tp in FIGURES.items() for tp in by_tp]


def _geometry(
    variant: str, *, tp: int = 1, dtype: KVCacheDtype = KVCacheDtype.BFLOAT16, layout: KVCacheLayout = KVCacheLayout.KV
) -> CacheGeometry:
    return cache_geometry(architecture_of(variant), dtype=dtype, layout=layout, tensor_parallel_size=tp)


@pytest.mark.parametrize(("variant", "tp"), CASES)
def test_bytes_per_token_by_tensor_parallel_size(variant: str, tp: int) -> None:
    figures, geometry = FIGURES[variant][str(tp)], _geometry(variant, tp=tp)
    assert geometry.global_page.page_bytes == 64 * figures["full_growth_bytes_per_token"]
    window = architecture_of(variant).sliding_window
    assert geometry.sliding_page.page_bytes * window == 32 * figures["sliding_bytes_per_seq_at_window"]
    if figures["full_growth_v_only"] is not None:
        v_only = _geometry(variant, tp=tp, layout=KVCacheLayout.V_ONLY)
        assert v_only.global_page.page_bytes == 64 * figures["full_growth_v_only"]


@pytest.mark.parametrize(
    ("dtype", "layout", "pool_gib", "requests"),
    [
        (KVCacheDtype.BFLOAT16, KVCacheLayout.V_ONLY, "64.3", "11.07"),
        (KVCacheDtype.BFLOAT16, KVCacheLayout.V_ONLY, "102.2", "17.60"),
        (KVCacheDtype.INT8, KVCacheLayout.V_ONLY, "64.3", "22.05"),
        (KVCacheDtype.BFLOAT16, KVCacheLayout.KV, "64.58", "5.97"),
    ],
)
def test_requests_of_131072_tokens_on_one_h200(
    dtype: KVCacheDtype, layout: KVCacheLayout, pool_gib: str, requests: str
) -> None:
    geometry = _geometry("31B", dtype=dtype, layout=layout)
    assert geometry.concurrency(int(Decimal(pool_gib) * GIB), 131_072) == Decimal(requests)


def test_int8_counts_its_scales() -> None:
    """4 heads of 512 bytes and one float16 scale each, 10 global layers, 64 tokens a page."""
    page = _geometry("31B", dtype=KVCacheDtype.INT8, layout=KVCacheLayout.V_ONLY).global_page
    assert page.page_bytes == 10 * 64 * 4 * (512 + 2)


def test_v_only_needs_a_model_that_derives_k() -> None:
    with pytest.raises(InvalidInput, match="attention_k_eq_v"):
        _geometry("E4B", layout=KVCacheLayout.V_ONLY)


_GEOMETRIES = st.builds(
    lambda uri, tp, dtype: cache_geometry(
        published_model(uri).architecture,  # type: ignore[union-attr]
        dtype=dtype,
        layout=KVCacheLayout.KV,
        tensor_parallel_size=tp,
    ),
    uri=st.sampled_from(published_uris()),
    tp=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from(KVCacheDtype),
)


@given(geometry=_GEOMETRIES, length=st.integers(1, 400_000))
def test_held_bytes_grow_with_length_and_stop_at_the_window(geometry: CacheGeometry, length: int) -> None:
    assert geometry.held_bytes(length) <= geometry.held_bytes(length + 1)
    beyond = max(length, geometry.window + 64)
    grown = geometry.held_bytes(beyond + 64) - geometry.held_bytes(beyond)
    assert grown == geometry.global_page.page_bytes


@given(geometry=_GEOMETRIES, pool=st.integers(0, 200 * GIB))
def test_the_longest_request_is_the_longest(geometry: CacheGeometry, pool: int) -> None:
    longest = geometry.longest_request(pool)
    assert longest == 0 or geometry.held_bytes(longest) <= pool
    assert geometry.held_bytes(longest + 1) > pool


@given(geometry=_GEOMETRIES, pool=st.integers(GIB, 200 * GIB), length=st.integers(1, 131_072))
def test_concurrency_is_requests_with_a_fraction(geometry: CacheGeometry, pool: int, length: int) -> None:
    assert int(geometry.concurrency(pool, length)) == geometry.requests(pool, length)
    assert geometry.requests(pool, length) * geometry.held_bytes(length) <= pool


def test_a_sliding_window_at_any_alignment_fits_its_pages() -> None:
    geometry = _geometry("31B")
    window, tokens = geometry.window, geometry.sliding_page.page_tokens
    touched = max((end - 1) // tokens - (end - window) // tokens + 1 for end in range(window, window + 2 * tokens))
    assert geometry.sliding_pages(100_000) == touched


def test_a_h200_divides_as_measured_elsewhere() -> None:
    """Another engine left 64.3 to 64.6 GiB of pool for 31B at 0.9 of 139.8 GiB, with more than 4 beside the weights."""
    architecture = architecture_of("31B")
    plan = memory_plan(architecture, rank_of(architecture), total_bytes=int(139.8 * GIB), utilization=Decimal("0.9"))
    parts = plan.weights_bytes + plan.activation_bytes + plan.overhead_bytes + plan.kv_pool_bytes
    assert 0 <= plan.budget_bytes - parts < 128
    assert 64.6 < plan.kv_pool_bytes / GIB < 65.2


def test_a_plan_that_does_not_fit_has_no_pool() -> None:
    architecture = architecture_of("31B")
    settings = rank_of(architecture, max_num_batched_tokens=2048)
    plan = memory_plan(architecture, settings, total_bytes=24 * GIB, utilization=Decimal("0.9"))
    assert (plan.kv_pool_bytes, plan.available_bytes < -30 * GIB) == (0, True)


def test_overhead_names_its_terms() -> None:
    alone = overhead_terms(tensor_parallel_size=1, total_bytes=80 * GIB, on_cpu=False)
    grouped = overhead_terms(tensor_parallel_size=2, total_bytes=80 * GIB, on_cpu=False)
    assert set(grouped) - set(alone) == {"nccl", "peers"}
    on_cpu = overhead_terms(tensor_parallel_size=1, total_bytes=10 * GIB, on_cpu=True)
    assert on_cpu["headroom"] == GIB // 2


@pytest.mark.parametrize("uri", published_uris()[1::2])
def test_the_workspace_is_the_largest_phase_and_scales(uri: str) -> None:
    facts = published_model(uri)
    assert facts is not None
    architecture = facts.architecture
    always, phases = activation_terms(architecture, rank_of(architecture))
    whole = activation_bytes(architecture, rank_of(architecture))
    blocks = max(phases["attention"] + phases["mlp"], phases["embedding"])
    assert "sampling" in always, "steps are captured, sampling is not"
    assert whole == sum(always.values()) + blocks
    for smaller in ({"max_num_batched_tokens": 2048}, {"max_num_seqs": 8}):
        assert activation_bytes(architecture, rank_of(architecture, **smaller)) < whole
    _, halves = activation_terms(architecture, rank_of(architecture, tensor_parallel_size=2))
    assert halves["mlp"] < phases["mlp"]
    assert halves["attention"] < phases["attention"]


def test_a_layer_kind_owns_its_layers() -> None:
    geometry, architecture = _geometry("E2B"), architecture_of("E2B")
    owners = geometry.global_page.layers + geometry.sliding_page.layers
    assert sorted(owners) == list(range(architecture.first_shared_layer))
    assert all(architecture.kind(layer) is LayerKind.GLOBAL for layer in geometry.global_page.layers)
