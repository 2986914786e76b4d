"""vLLM's own figures, published or read from running servers, from a model's config and the pool's size alone."""

from __future__ import annotations

from decimal import Decimal

import pytest
from architecture_of import architecture_of

from modelserve.errors import InvalidInput
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.vllm import VllmCache, parse_version, resident_bytes, vllm_cache

GIB = 1 << 30
BF16, FP8, INT8 = KVCacheDtype.BFLOAT16, KVCacheDtype.FP8_E4M3, KVCacheDtype.INT8


def _cache(
    variant: str, version: str, *, tp: int = 1, length: int = 131_072, chunk: int = 8192, dtype: KVCacheDtype = BF16
) -> VllmCache:
    return vllm_cache(
        architecture_of(variant),
        version=parse_version(version),
        dtype=dtype,
        tensor_parallel_size=tp,
        max_model_len=length,
        max_num_batched_tokens=chunk,
    )


@pytest.mark.parametrize(
    ("cache", "pool_gib", "tokens", "concurrency"),
    [
        (_cache("31B", "0.19", tp=2, chunk=2048), "11.54", 25_200, "1.87"),
        (_cache("31B", "0.21", tp=2, chunk=2048), "11.54", 244_817, "1.87"),
        (_cache("31B", "0.33", tp=2, chunk=2048), "11.54", 217_334, "1.66"),
        (_cache("31B", "0.20", chunk=2048), "50", 54_608, "4.05"),
        (_cache("31B", "0.21", chunk=2048), "50", 530_400, "4.05"),
        (_cache("31B", "0.21", chunk=2496), "50.85", 524_892, "4.00"),
        (_cache("31B", "0.21.0"), "64.58", 496_669, "3.79"),
        (_cache("E4B", "0.21.0", length=32_768), "105.33", 4_142_295, "126.41"),
        (_cache("31B", "0.33.0"), "64.27", 361_632, "2.76"),
        (_cache("31B", "0.33.0", dtype=FP8), "59.85", 672_477, "5.13"),
        (_cache("31B", "0.33.0", dtype=INT8), "63.21", 490_013, "3.74"),
        (_cache("31B", "0.33.0"), "102.17", 574_911, "4.39"),
        (_cache("E4B", "0.33.0", length=32_768), "104.57", 2_990_671, "91.27"),
        # configiq issue 112, observed on one H200; the version has one batch in flight, which it had up to 0.25.
        (_cache("31B", "0.21", length=262_144), "64.68", 626_949, "2.39"),
        (_cache("31B", "0.21", length=262_144), "103.92", 1_007_303, "3.84"),
        (_cache("26B-A4B", "0.20", length=262_144, chunk=16_384, dtype=FP8), "8.96", 78_256, "2.15"),
    ],
)
def test_figures_of_its_log(cache: VllmCache, pool_gib: str, tokens: int, concurrency: str) -> None:
    """The pool is printed to two decimals of a GiB, so the logged figure lies between those of its two ends."""
    low, high = (int((Decimal(pool_gib) + shift) * GIB) for shift in (Decimal("-0.005"), Decimal("0.005")))
    assert cache.logged_tokens(low) <= tokens <= cache.logged_tokens(high)
    assert cache.concurrency(low) <= Decimal(concurrency) <= cache.concurrency(high)
    assert cache.logged_tokens(high) - cache.logged_tokens(low) < tokens / 500, "the band is no excuse"


@pytest.mark.parametrize(
    ("version", "chunk", "pool_gib", "tokens"),
    [("0.19", 2048, "11.54", 25_200), ("0.21", 2048, "11.54", 244_817), ("0.33", 2048, "11.54", 217_334)],
)
def test_two_small_gpus_to_the_token(version: str, chunk: int, pool_gib: str, tokens: int) -> None:
    cache, pool = _cache("31B", version, tp=2, chunk=chunk), int(Decimal(pool_gib) * GIB)
    assert (cache.blocks(pool), cache.logged_tokens(pool)) == (9453, tokens)


def test_blocks_of_a_request() -> None:
    small = _cache("31B", "0.19", tp=2, chunk=2048)
    assert (small.full_blocks, small.sliding_groups, small.sliding_blocks, small.blocks_per_request) == (
        4096, 5, 193, 5061,
    )  # fmt: skip
    measured = _cache("31B", "0.21")
    assert (measured.blocks(int(Decimal("64.5815") * GIB)), measured.blocks_per_request) == (26_452, 6981)
    assert (measured.sliding_blocks, _cache("31B", "0.33").sliding_blocks) == (577, 1089)
    # A request of 16,001 tokens used to be charged ceil(16,001 / 16) = 1,001 blocks in each sliding group.
    assert -(-16_001 // measured.sliding_page_tokens) == 1001
    assert 5 * (measured.sliding_blocks - 1) == 2880


def test_the_pool_it_needs_to_start_grew_with_two_chunks_in_flight() -> None:
    needs = [_cache("31B", v, length=262_144, chunk=32_768).request_bytes / GIB for v in ("0.25.1", "0.26")]
    assert [round(need, 2) for need in needs] == [45.79, 70.79]


@pytest.mark.parametrize("chunk", [2048, 8192])
def test_the_tenfold_jump_of_0_21_is_the_log_line(chunk: int) -> None:
    """Blocks and concurrency are the same; the ratio of the lines is 12 / (1 + 32 S / L)."""
    before, after, pool = _cache("31B", "0.20", chunk=chunk), _cache("31B", "0.21", chunk=chunk), 60 * GIB
    assert before.concurrency(pool) == after.concurrency(pool)
    sliding = 5 * (-(-(1023 + chunk) // 16) + 1)
    ratio = after.logged_tokens(pool) / before.logged_tokens(pool)
    assert ratio == pytest.approx(12 / (1 + 32 * sliding / 131_072), rel=1e-3)


def test_pages_that_do_not_divide_are_refused_and_later_padded() -> None:
    """int8 with scales: 16 tokens of 16 heads x 520 bytes against 4 heads x 1,032; global pages stay half empty."""
    with pytest.raises(InvalidInput, match=r"0\.21 refuses to start"):
        _cache("31B", "0.21", dtype=INT8)
    padded = _cache("31B", "0.33", dtype=INT8)
    assert (padded.page_bytes, padded.full_page_tokens) == (133_120, 16)
    assert 0.5 < padded.padded_bytes * 2 / padded.page_bytes < 1.01
    assert _cache("31B", "0.33").padded_bytes == 0


@pytest.mark.parametrize(
    ("tp", "pool_gib", "expected"),
    [
        (2, "11.54", ("2.14", "3.99", "7.98")),
        (1, "50", ("4.64", "8.65", "17.3")),
        (1, "64.58", ("5.99", "11.2", "22.3")),
    ],
)
def test_what_the_memory_holds_when_only_rows_are_charged(tp: int, pool_gib: str, expected: tuple[str, ...]) -> None:
    forms = ((BF16, KVCacheLayout.KV), (BF16, KVCacheLayout.V_ONLY), (FP8, KVCacheLayout.V_ONLY))
    for (dtype, layout), figure in zip(forms, expected, strict=True):
        geometry = cache_geometry(architecture_of("31B"), dtype=dtype, layout=layout, tensor_parallel_size=tp)
        held = Decimal(pool_gib) * GIB / resident_bytes(geometry, 131_072)
        assert abs(held - Decimal(figure)) <= Decimal(1).scaleb(Decimal(figure).as_tuple().exponent)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0.18", "0.34", "1", "x.y", "0.-1", "", "0.20.0.1", "9" * 99])
def test_versions_that_are_not_known(text: str) -> None:
    with pytest.raises(InvalidInput, match="known are"):
        parse_version(text)
