"""Expected speed: its terms by hand, what status shows of them, and what must hold for any load."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from architecture_of import architecture_of
from hypothesis import given
from hypothesis import strategies as st

from modelserve.api import ModelServeSpec
from modelserve.hardware import CATALOGUE
from modelserve.model.weight_format import StoredType, WeightFormat, int4
from modelserve.planning import AcceleratorOffer, evaluation, plan
from modelserve.planning.speed import expected_speed
from modelserve.planning.speed.engine_rates import GENERATIONS, HOPPER, engine_rates
from modelserve.planning.speed.expected_speed import Load, load_speed
from modelserve.planning.speed.mixed_steps import crowd_tokens, min_mixed_tokens
from modelserve.planning.speed.step_time import PromptRows, RankSpeed
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.weights.text import weight_terms

H200 = CATALOGUE["NVIDIA-H200"]


def _rank(
    variant: str = "31B",
    *,
    tensor_parallel: int = 1,
    product: str = "NVIDIA-H200",
    dtype: str = "bfloat16",
    weight_format: WeightFormat | None = None,
    exact: bool = False,
) -> RankSpeed:
    architecture = architecture_of(variant)
    layout = KVCacheLayout.least(architecture)
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype(dtype), layout=layout, tensor_parallel_size=tensor_parallel
    )
    device = CATALOGUE[product]
    return RankSpeed(
        architecture, device, geometry, tensor_parallel=tensor_parallel, weight_format=weight_format, exact=exact
    )


def _plan(*products: str, gpus: int = 1, **spec: Any) -> Any:
    document = {"model": {"uri": "hf://google/gemma-4-31B-it"}, **spec}
    offers = [AcceleratorOffer(CATALOGUE[product], gpus) for product in products]
    return plan(ModelServeSpec.model_validate(document), architecture_of("31B"), offers)


def test_the_context_at_which_a_row_of_31b_takes_twice_by_hand() -> None:
    """59 layers of 32 heads: 2 FLOP a parameter of 28.7e9, 4 x 32 x 512 a key of each of 9 global layers, and the
    projections of the last."""
    layers = 5376 * 3 * 21504 * 59  # MLP
    layers += 50 * 256 * 5376 * (32 + 2 * 16 + 32) + 9 * 512 * 5376 * (32 + 4 + 32)  # V is of K on global layers
    layers += 512 * 5376 * (32 + 4)
    by_hand = (2 * layers / 0.71) / (4 * 32 * 512 * 9 / 0.6)
    assert _rank().doubling_context == pytest.approx(by_hand, rel=1e-3)
    assert _rank(product="NVIDIA-L4").doubling_context == pytest.approx(by_hand * 0.28 / 0.6, rel=1e-3)
    assert math.isinf(_rank(product="CPU").doubling_context)


def test_prompts_that_fit_a_step_are_expected_as_before_and_long_ones_to_take_more_steps() -> None:
    rank = _rank()
    at = {"max_num_batched_tokens": 8192, "max_num_mixed_tokens": 512}
    fits = load_speed(rank, Load(1, 8192, 150), **at).first_token
    assert fits.weights == pytest.approx(rank.step(prompts=PromptRows(1, 0, 0, 1)).weights), "one step reads them once"
    long = load_speed(rank, Load(1, 126_000, 64), **at).first_token
    steps = pytest.approx(76)
    assert long.weights / fits.weights == steps, "of 2,048 rows up to 41,339 tokens, of fewer behind them"


def test_a_decode_step_of_31b_by_hand() -> None:
    """docs/sizing.md has the same arithmetic: 60 layers, 50 sliding with 16 KV heads, 10 global with 4 that store V."""
    time, rates = _rank().step(decodes=8, context=8192), engine_rates(HOPPER)
    weights = sum(weight_terms(architecture_of("31B"), tensor_parallel_size=1).values())
    assert time.weights == pytest.approx(weights / (4.8e12 * rates.weight_read))
    global_bytes, sliding_bytes = 8192 * 10 * 4 * 512 * 2, 1024 * 50 * 16 * 256 * 2 * 2
    read = 8 * (global_bytes / rates.v_only_read + sliding_bytes / rates.streamed_read)
    assert time.cache == pytest.approx(read / 4.8e12)
    a_kernel = rates.launch_seconds + rates.filled_launch_seconds * 8 / 32
    assert time.launches == pytest.approx((60 * 12 + 30) * a_kernel)
    products = 8 * weights  # two operations for each of two bytes, eight times; the norms are too small to see
    assert time.linears == pytest.approx(rates.exposed * products / (989e12 * rates.linear), rel=0.01)
    assert (time.attention, time.all_reduces, time.prompts) == (0, 0, 0)
    assert time.seconds == pytest.approx(sum(time))


def test_a_cache_is_read_at_the_rate_of_the_kernel_that_reads_it() -> None:
    rates = engine_rates(HOPPER)

    def share(rank: RankSpeed, context: int, held: int, *, drafted: bool = False) -> float:
        return held / (4.8e12 * rank.cache_seconds(1, context=context, drafted=drafted))

    sliding, token = 512 * 35 * 2 * 256 * 2 * 2, 7 * 2 * 512 * 2 * 2  # of E4B, which stores K and V
    rank = _rank("E4B")
    assert share(rank, 512, sliding + 512 * token) == pytest.approx(rates.streamed_read)
    assert share(rank, 512, sliding + 512 * token, drafted=True) == pytest.approx(rates.cache_read), "of several rows"
    exact = _rank("E4B", exact=True)
    assert share(exact, 512, sliding + 512 * token) == pytest.approx(rates.cache_read)
    growth = _rank().cache_seconds(1, context=9000) - _rank().cache_seconds(1, context=8000)
    assert growth == pytest.approx(1000 * 10 * 4 * 512 * 2 / (4.8e12 * rates.v_only_read)), "of 31B's global layers"
    eight = _rank(dtype="fp8_e4m3")
    growth = eight.cache_seconds(1, context=9000) - eight.cache_seconds(1, context=8000)
    assert growth == pytest.approx(1000 * 10 * 4 * 512 / (4.8e12 * rates.turned_8_bit_read))
    elsewhere = _rank("E4B", product="NVIDIA-L4").cache_seconds(1, context=512)
    assert elsewhere == pytest.approx((sliding + 512 * token) / (300e9 * engine_rates((8, 9)).cache_read))


def test_rows_of_a_prompt_by_hand() -> None:
    time, rates = _rank().step(prompts=PromptRows.chunk(6144, 2048, window=1024, ends=False)), engine_rates(HOPPER)
    global_flop = 9 * 4 * 32 * 512 * 2048 * (6144 + 1024)  # each row its own half on average
    sliding_flop = 50 * 4 * 32 * 256 * 2048 * 1024
    expected = global_flop / (989e12 * rates.attention_v_only) + sliding_flop / (989e12 * rates.attention_sliding)
    assert time.attention == pytest.approx(expected)
    assert time.linears > time.weights, "2,048 rows are bound by their products"
    beside = _rank().step(decodes=1, context=100, prompts=PromptRows.chunk(0, 64, window=1024, ends=True))
    assert beside.launches - time.launches == pytest.approx(60 * rates.mixed_layer_seconds)


def test_layers_that_share_a_cache_cost_a_prompt_nothing() -> None:
    rank, rows = _rank("E4B"), PromptRows.chunk(0, 8192, window=512, ends=True)
    time, rates = rank.step(prompts=rows), engine_rates(HOPPER)
    architecture = architecture_of("E4B")
    layers = architecture.first_shared_layer
    assert layers < architecture.num_hidden_layers
    owning = [layer for layer in architecture.full_attention_layers if layer < layers]
    most = 4 * 8 * 512 * len(owning) * 8192 * 8192 / 2 / (989e12 * rates.attention_kv)
    assert most <= time.attention <= 2 * most


def test_several_gpus_share_the_work_and_pay_for_their_sums_and_launches() -> None:
    one, two = (_rank(tensor_parallel=tp).step(decodes=64, context=8192) for tp in (1, 2))
    assert two.weights == pytest.approx(one.weights / 2, rel=0.01)
    assert two.cache == pytest.approx(one.cache / 2)
    assert (one.all_reduces, 120 * 2e-6 < two.all_reduces < 120 * 17e-6) == (0, True)
    assert one.launches == two.launches, "both replay captured steps"
    one, two = (_rank("26B-A4B", tensor_parallel=tp).step(decodes=1).launches for tp in (1, 2))
    rates = engine_rates(HOPPER)
    library = 30 * rates.library_seconds  # half of the dense MLP's inputs are no whole boxes for our kernels
    kernels = (two - one - library) / (rates.launch_seconds + rates.filled_launch_seconds / 32)
    assert kernels == pytest.approx(2 * 30), "of several ranks the router's norm and the sum of experts are launches"
    slow = _rank(tensor_parallel=2, product="NVIDIA-A100-80GB-PCIe").step(decodes=64, context=100)
    assert (
        slow.all_reduces
        > _rank(tensor_parallel=2, product="NVIDIA-A100-SXM4-80GB").step(decodes=64, context=100).all_reduces
    ), "PCIe is slower than NVLink"


def test_products_that_the_library_multiplies_begin_and_end_by_themselves() -> None:
    """Four a layer of 31B from 129 rows on; of fewer some, by their shapes, and all in FP8. INT4 has kernels for any
    rows, and experts' kernels have the dense MLP's products, too."""
    rates, fp8 = engine_rates(HOPPER), WeightFormat(stored=StoredType.FP8, scales="channel", fp8_activations=True)

    def added(few: int, many: int, variant: str = "31B", **rank: Any) -> float:
        """Seconds of launches that so many more decodes take."""
        one, other = (_rank(variant, **rank).step(decodes=n, context=100).launches for n in (few, many))
        return other - one

    library, wide = rates.library_seconds, rates.wide_seconds
    assert added(63, 64) == pytest.approx(0)
    assert added(64, 65) == pytest.approx(50 * library + 190 * wide), "queries, keys and values of sliding layers"
    assert added(64, 129) == pytest.approx(60 * 4 * library)
    assert added(64, 128, "26B-A4B") == pytest.approx(60 * wide)
    assert added(128, 129, "26B-A4B") == pytest.approx(60 * (library - wide))
    assert added(32, 33, weight_format=fp8) == pytest.approx(60 * 4 * library)
    assert added(33, 129, weight_format=fp8) == pytest.approx(0)
    assert added(64, 129, weight_format=int4(32)) == pytest.approx(0)
    assert added(64, 129, product="NVIDIA-L4") == pytest.approx(0), "all kernels there count as beginning by themselves"


def test_experts_that_no_row_chose_are_not_read() -> None:
    rank = _rank("26B-A4B")
    one, many = (rank.step(decodes=n, context=100).weights for n in (1, 64))
    assert 4 * one < many < 12 * one


def test_experts_of_26b_a4b_by_hand() -> None:
    """128 experts of 704 x 2,816 in three matrices, 8 of them a row, in 30 layers. Reading them hides their own
    products and no others: 512 rows of a prompt read all and multiply what is dense behind its own reading."""
    architecture = architecture_of("26B-A4B")
    rank, rates, rows = _rank("26B-A4B"), engine_rates(HOPPER), 512
    expert = 30 * 3 * 704 * 2816
    everything = sum(weight_terms(architecture, tensor_parallel_size=1).values())
    time = rank.step(prompts=PromptRows(rows, 0, 0, 0))
    experts_read = 128 * expert * 2 / (4.8e12 * rates.expert_read)
    dense_read = (everything - 128 * expert * 2) / (4.8e12 * rates.weight_read)
    assert time.weights == pytest.approx(experts_read + dense_read, rel=1e-6)
    experts = rows * 2 * 8 * expert / (989e12 * rates.expert_linear)
    assert experts < experts_read
    dense = time.linears - rates.expert_exposed * experts
    assert dense > 2 * rates.exposed * dense_read, "it does not hide behind reading experts"
    one = rank.step(decodes=1, context=100)
    assert one.weights == pytest.approx(dense_read + experts_read * 8 / 128, rel=1e-6)


def test_quantised_matrices_are_read_at_the_rate_of_their_format() -> None:
    rates = engine_rates(HOPPER)
    read = {"int4": rates.int4_read, "fp8": rates.fp8_read, "int8": rates.fp8_read}
    eight_bits = (WeightFormat(stored=stored, scales="channel") for stored in (StoredType.FP8, StoredType.INT8))
    for form in (int4(32), *eight_bits):
        terms = weight_terms(architecture_of("31B"), tensor_parallel_size=1, weight_format=form)
        by_hand = terms["linear"] / read[form.stored] + (sum(terms.values()) - terms["linear"]) / rates.weight_read
        found = _rank(weight_format=form).step(decodes=1, context=100).weights
        assert found == pytest.approx(by_hand / 4.8e12, rel=1e-3)


def test_products_of_int8_are_multiplied_at_their_own_rate() -> None:
    """Between dense ones, which move nothing beside, and FP8's in e4m3."""
    prompt = PromptRows.chunk(0, 8192, window=1024, ends=True)
    dense, int8 = (
        _rank(weight_format=form).step(prompts=prompt) for form in (None, WeightFormat(stored="int8", scales="channel"))
    )
    assert int8.linears + int8.weights == pytest.approx((dense.linears + dense.weights) * 0.71 / 0.66, rel=0.02)


def test_eight_bit_rows_of_v_only_layers_cost_their_decoding() -> None:
    bfloat16, int8 = (_rank(dtype=dtype).step(decodes=1, context=131_072).cache for dtype in ("bfloat16", "int8"))
    assert int8 > bfloat16
    kv, small = (_rank("E4B", dtype=dtype).step(decodes=1, context=131_072).cache for dtype in ("bfloat16", "int8"))
    assert small < kv


def test_what_other_plans_left_behind_changes_no_plan() -> None:
    """What is kept of sizes and speeds is found by all that they depend on."""
    asked: list[dict[str, Any]] = [
        {}, {"objective": "Latency"}, {"engine": {"profile": "exact"}}, {"workload": {"concurrency": 3}},
        {"drafter": {"published": True}}, {"drafter": {"published": True, "numSpeculativeTokens": 2}},
        {"kvCache": {"dtype": "int8"}}, {"kvCache": {"gpuMemoryUtilization": "0.8"}},
    ]  # fmt: skip
    products = ("NVIDIA-H200", "NVIDIA-A100-80GB-PCIe", "NVIDIA-L40S")
    kept = [getattr(module, name) for module in (evaluation, expected_speed) for name in vars(module)]
    kept = [each for each in kept if hasattr(each, "cache_clear")]
    assert load_speed in kept
    alone = []
    for spec in asked:
        for each in kept:
            each.cache_clear()
        alone.append(_plan(*products, gpus=4, **spec))
    assert [_plan(*products, gpus=4, **spec) for spec in reversed(asked)] == alone[::-1]
    assert len({found.model_dump_json() for found in alone}) == len(asked)


def test_every_product_has_constants_and_only_hopper_has_measured_ones() -> None:
    for record in CATALOGUE.values():
        assert record.compute_capability in GENERATIONS, record.product
    assert {rates.generation for rates in GENERATIONS.values() if rates.measured} == {"Hopper"}
    assert engine_rates((10, 3)) is GENERATIONS[10, 0]
    assert engine_rates((99, 0)) is GENERATIONS[12, 0]


def test_the_chosen_candidate_shows_its_terms_and_they_add_up() -> None:
    result = _plan("NVIDIA-H200", "NVIDIA-H100-NVL", gpus=8, workload={"inputTokens": 8192, "concurrency": 8})
    chosen, *others = result.candidates
    assert all(each.speed.first_token is None and each.speed.output_token is None for each in others)
    for terms, total, off in (
        (chosen.speed.first_token, chosen.speed.time_to_first_token_ms, 0.5),
        (chosen.speed.output_token, chosen.speed.time_per_output_token_ms, 0.05),
    ):
        shown = {name: float(text) for name, text in terms.model_dump(exclude_none=True).items()}
        assert sum(shown.values()) == pytest.approx(float(total), abs=off)
        assert min(shown.values()) > 0
    assert "prompts" in chosen.speed.output_token.to_json()
    small = {key: chosen.speed.to_json()[key] for key in ("firstToken", "outputToken")}
    assert len(json.dumps(small, separators=(",", ":"))) < 350, "there may be thousands of statuses"


def test_alone_no_other_prompt_is_waited_for() -> None:
    speed = (
        _plan("NVIDIA-H200", workload={"inputTokens": 8192, "outputTokens": 150, "concurrency": 1}).candidates[0].speed
    )
    assert speed.output_token.prompts is None
    assert float(speed.time_per_output_token_ms) == pytest.approx(15.27, rel=0.02), "docs/benchmarks.md"
    assert float(speed.time_to_first_token_ms) == pytest.approx(796, rel=0.05), "docs/benchmarks.md"


@given(
    variant=st.sampled_from(["31B", "E4B", "26B-A4B"]),
    product=st.sampled_from(["NVIDIA-H200", "NVIDIA-L4", "Tesla-T4", "CPU"]),
    requests=st.integers(1, 512),
    input_tokens=st.integers(1, 200_000),
    output_tokens=st.integers(1, 20_000),
    mixed=st.sampled_from([256, 512, 2048, 8192]),
)
def test_any_load_has_a_speed(
    variant: str, product: str, requests: int, input_tokens: int, output_tokens: int, mixed: int
) -> None:
    rank, load = _rank(variant, product=product), Load(requests, input_tokens, output_tokens)
    found = load_speed(rank, load, max_num_batched_tokens=8192, max_num_mixed_tokens=mixed)
    assert min(found.first_token) >= 0
    assert min(found.output_token) >= 0
    one = load_speed(rank, replace(load, requests=1), max_num_batched_tokens=8192, max_num_mixed_tokens=mixed)
    assert found.output_token.seconds >= 0.98 * one.output_token.weights, "every token reads the weights"
    busy = (output_tokens - 1) * found.output_token.seconds * found.requests_per_s
    assert 0 < busy <= requests * 1.05 or output_tokens == 1, "no more decode at a time than are open"


def test_few_rows_beside_decodes_are_cheap_for_a_dense_model_and_short_steps_are_patient() -> None:
    ranks = {variant: _rank(variant) for variant in ("31B", "E4B", "26B-A4B")}
    assert [min_mixed_tokens(ranks["31B"], rows) for rows in (128, 256, 512, 1024)] == [128, 128, 256, 1024]
    assert [min_mixed_tokens(ranks[variant], 2048) for variant in ("E4B", "26B-A4B")] == [2048, 2048]
    long, short = (crowd_tokens(ranks["31B"], rows) for rows in (512, 256))
    assert long == pytest.approx(13_650, rel=0.02), "1.4 seconds of steps of 52.5 ms"
    assert short == pytest.approx(33_430, rel=0.02), "3.9 seconds of steps of 30 ms"
    cpu = _rank(product="CPU")
    assert (min_mixed_tokens(cpu, 512), crowd_tokens(cpu, 512)) == (512, math.inf)
