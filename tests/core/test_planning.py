"""Plans: what is chosen, what is refused and why, and that every remedy really fits."""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve.api import API_VERSION, KIND, ModelServe, ModelServeSpec, NodeSelectorRequirement, NodeSelectorTerm
from modelserve.hardware import CATALOGUE, accelerator_from_labels
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning import AcceleratorOffer, engine_args_for, plan, plan_hash
from modelserve.planning.evaluation import Fit, Refusal, evaluate
from modelserve.planning.learned import Learned
from modelserve.planning.planner import consider
from modelserve.planning.remedies import remedies
from modelserve.planning.wishes import Wishes, wishes
from modelserve.published import published_model, published_uris
from modelserve.quality.cache_quality import CacheQuality
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

GPUS = [product for product, record in CATALOGUE.items() if not record.is_cpu]


def _spec(uri: str = "hf://google/gemma-4-31B-it", **spec: Any) -> ModelServeSpec:
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "gemma"}}
    return ModelServe.parse({**document, "spec": {"model": {"uri": uri}, **spec}}).spec


def _architecture(uri: str = "hf://google/gemma-4-31B-it") -> ModelArchitecture:
    facts = published_model(uri)
    assert facts is not None
    return facts.architecture


def _offer(product: str, count: int = 1) -> AcceleratorOffer:
    return AcceleratorOffer(CATALOGUE[product], count)


ALL = [_offer(product, 8) for product in GPUS]


def test_31b_on_one_h200() -> None:
    result = plan(_spec(context={"maxModelLen": 131_072}), _architecture(), [_offer("NVIDIA-H200")])
    assert (result.accelerator, result.gpus_per_replica, result.max_model_len) == ("NVIDIA-H200", 1, 131_072)
    assert result.kv_cache is not None
    assert (result.kv_cache.dtype, result.kv_cache.layout) == (KVCacheDtype.BFLOAT16, KVCacheLayout.V_ONLY)
    assert result.engine is not None
    assert result.engine.max_num_batched_tokens == 8192
    assert result.concurrency is not None
    assert Decimal("11.0") < Decimal(result.concurrency.at_max) < Decimal("11.3")
    assert result.per_request is not None
    assert result.per_request.at128k_bytes == result.per_request.at_max_bytes
    assert [c.verdict for c in result.candidates] == ["Chosen"]
    assert result.candidates[0].speed is not None
    assert result.target_concurrency == result.candidates[0].speed.concurrency > 1


def test_lengths_above_the_limit_are_left_out() -> None:
    result = plan(_spec(context={"maxModelLen": 16_384}), _architecture(), [_offer("NVIDIA-H200")]).to_json()
    assert set(result["perRequest"]) == {"at8kBytes", "atMaxBytes"}
    assert set(result["concurrency"]) == {"at8k", "atMax"}
    assert set(result["candidates"][0]["concurrency"]) == {"at8k", "atMax"}


def test_31b_on_one_l4_is_refused_with_the_missing_bytes_and_a_remedy() -> None:
    result = plan(_spec(), _architecture(), [_offer("NVIDIA-L4")])
    assert not result.fits
    assert result.hash is None
    (candidate,) = result.candidates
    assert (candidate.verdict, candidate.limited_by) == ("Refused", "Memory")
    assert candidate.shortfall_bytes is not None
    assert 40 < candidate.shortfall_bytes / 2**30 < 42
    assert candidate.remedy == "fits on 4 x NVIDIA-L4 of one node, or on 1 x NVIDIA-H100-80GB-HBM3"
    assert "40.11 GiB missing" in (result.message or "")  # with four places: what is missing is what would do
    on_four = plan(_spec(), _architecture(), [_offer("NVIDIA-L4", 4)])
    assert (on_four.accelerator, on_four.tensor_parallel) == ("NVIDIA-L4", 4)


def test_int8_is_chosen_only_where_it_is_what_makes_the_asked_length_fit() -> None:
    architecture = _architecture("hf://google/gemma-4-12B-it")
    tight = replace(CATALOGUE["NVIDIA-GeForce-RTX-5090"], visible_bytes=28 << 30)
    places = Wishes(max_num_seqs=64)
    longest = evaluate(places, architecture, tight, gpus=1)
    assert isinstance(longest, Fit)
    assert longest.max_model_len < 262_144  # nobody asked for more, so the cache stays as exact as the weights
    assert not longest.downgraded
    asked = evaluate(replace(places, max_model_len=longest.max_model_len), architecture, tight, gpus=1)
    assert isinstance(asked, Fit)
    assert asked.geometry.dtype is KVCacheDtype.BFLOAT16
    more = longest.max_model_len + 64
    known = CacheQuality(
        dtype=KVCacheDtype.INT8,
        layout=KVCacheLayout.V_ONLY,
        kl=0.001,
        same=0.99,
        needles=1,
        found=1,
        tokens=1,
        context=1,
    )
    measured = Learned(cache_quality=((tight.product, known),))
    longer = evaluate(replace(places, max_model_len=more, learned=measured), architecture, tight, gpus=1)
    assert isinstance(longer, Fit)
    assert (longer.downgraded, longer.geometry.dtype) == (True, KVCacheDtype.INT8)
    fewer = evaluate(Wishes(max_model_len=more), architecture, tight, gpus=1)  # places give way before exactness does
    assert isinstance(fewer, Fit)
    assert (fewer.downgraded, fewer.max_model_len, 4 <= fewer.sequences < 64) == (False, more, True)


def test_a_pool_too_small_is_served_down_to_the_least_length() -> None:
    device = CATALOGUE["NVIDIA-H100-80GB-HBM3"]
    open_length = Wishes(kv_dtype=KVCacheDtype.BFLOAT16, max_num_seqs=64)
    longest = evaluate(open_length, _architecture(), device, gpus=1)
    assert isinstance(longest, Fit)
    asked = replace(open_length, max_model_len=262_144, min_model_len=longest.max_model_len)
    shortened = evaluate(asked, _architecture(), device, gpus=1)
    assert isinstance(shortened, Fit)
    assert (shortened.shortened, shortened.max_model_len) == (True, longest.max_model_len)
    refused = evaluate(replace(asked, min_model_len=longest.max_model_len + 64), _architecture(), device, gpus=1)
    assert isinstance(refused, Refusal)
    assert refused.limited_by == "Memory"


@pytest.mark.parametrize(
    ("spec", "uri", "offer", "limited_by", "says"),
    [
        ({"kvCache": {"layout": "v_only"}}, "E4B", ("NVIDIA-H200", 1), "Layout", "stores both"),
        ({"kvCache": {"dtype": "fp8_e4m3"}}, "E4B", ("NVIDIA-A30", 1), "ComputeCapability", "8.9"),
        ({"context": {"maxModelLen": 262_145}}, "31B", ("NVIDIA-H200", 1), "ContextLength", "262,144"),
        ({"parallelism": {"tensor": 3}}, "31B", ("NVIDIA-H200", 8), "TensorParallel", "num_attention_heads 32"),
        ({"parallelism": {"tensor": 8}}, "31B", ("NVIDIA-H200", 4), "GPUsPerNode", "nodes have 4"),
    ],
)
def test_reasons_other_than_memory(
    spec: dict[str, Any], uri: str, offer: tuple[str, int], limited_by: str, says: str
) -> None:
    address = f"hf://google/gemma-4-{uri}-it"
    result = plan(_spec(address, **spec), _architecture(address), [_offer(*offer)])
    (candidate,) = result.candidates
    assert (candidate.verdict, candidate.limited_by) == ("Refused", limited_by)
    assert says in (candidate.message or "")
    assert candidate.remedy


def test_fp8_on_an_accelerator_of_unknown_capability_says_which_labels_are_missing() -> None:
    device = accelerator_from_labels("Odd-1", memory_mib=90_000)
    assert device is not None
    (refused,) = plan(_spec(kvCache={"dtype": "fp8_e4m3"}), _architecture(), [AcceleratorOffer(device, 1)]).candidates
    assert refused.limited_by == "ComputeCapability"
    assert "nvidia.com/gpu.compute.major" in (refused.message or "")


@pytest.mark.parametrize("field", ["maxNumSeqs", "maxNumMixedTokens"])
def test_a_setting_that_a_step_cannot_hold_is_said_to_be_lowered(field: str) -> None:
    spec = _spec("hf://google/gemma-4-E2B-it", engine={field: 4096})
    result = plan(spec, _architecture("hf://google/gemma-4-E2B-it"), [_offer("NVIDIA-L40S")])
    assert f"{field} is 2,048 instead of 4,096" in (result.message or "")
    args = engine_args_for(result, spec, model_directory="/")
    assert {"maxNumSeqs": args.max_num_seqs, "maxNumMixedTokens": args.max_num_mixed_tokens}[field] == 2048


def test_fp8_fits_where_the_hardware_has_it() -> None:
    result = plan(_spec(kvCache={"dtype": "fp8_e4m3"}), _architecture(), [_offer("NVIDIA-L40S", 8)])
    assert result.fits
    assert plan(_spec(kvCache={"dtype": "fp8_e5m2"}), _architecture(), [_offer("NVIDIA-A100-SXM4-80GB", 2)]).fits


@pytest.mark.parametrize(
    ("variant", "product", "gpus", "tokens"),
    [("31B", "NVIDIA-H200", 1, 512), ("E4B", "NVIDIA-H200", 1, 2048), ("31B", "NVIDIA-L40S", 4, 512)],
)
def test_steps_with_decodes_are_as_large_as_their_time_allows(
    variant: str, product: str, gpus: int, tokens: int
) -> None:
    uri = f"hf://google/gemma-4-{variant}-it"
    result = plan(_spec(uri, parallelism={"tensor": gpus}), _architecture(uri), [_offer(product, gpus)])
    assert result.engine is not None
    assert result.engine.max_num_mixed_tokens == tokens
    asked = _spec(uri, parallelism={"tensor": gpus}, engine={"maxNumMixedTokens": 300, "maxNumBatchedTokens": 2048})
    result = plan(asked, _architecture(uri), [_offer(product, gpus)])
    assert engine_args_for(result, asked, model_directory="/").max_num_mixed_tokens == 300
    small = _spec(uri, parallelism={"tensor": gpus}, engine={"maxNumMixedTokens": 9000, "maxNumBatchedTokens": 128})
    result = plan(small, _architecture(uri), [_offer(product, gpus)])
    assert engine_args_for(result, small, model_directory="/").max_num_mixed_tokens == 128


def test_the_cpu_is_used_only_where_it_is_named() -> None:
    uri = "hf://google/gemma-4-E2B-it"
    cpu = AcceleratorOffer(CATALOGUE["CPU"], 0)
    assert not plan(_spec(uri), _architecture(uri), [cpu]).fits
    named = {"accelerators": {"products": ["CPU"]}, "pod": {"resources": {"limits": {"memory": "16Gi"}}}}
    result = plan(_spec(uri, **named), _architecture(uri), [])
    assert (result.accelerator, result.gpus_per_replica, result.resource_name) == ("CPU", 0, None)
    assert result.container_memory_bytes == 16 << 30
    assert result.engine is not None
    assert (result.engine.max_num_batched_tokens, result.engine.max_num_seqs) == (512, 64)
    small = _spec(uri, accelerators={"products": ["CPU"]})
    (refused,) = plan(small, _architecture(uri), []).candidates
    assert refused.remedy == "fits with pod.resources.limits.memory 11Gi"
    asked = {"accelerators": {"products": ["CPU"]}, "pod": {"resources": {"requests": {"memory": "16Gi"}}}}
    assert plan(_spec(uri, **asked), _architecture(uri), []).container_memory_bytes == 16 << 30, "no limit is below it"


@pytest.mark.parametrize("uri", ["hf://google/gemma-4-E2B-it", "hf://google/gemma-4-12B-it-qat-w4a16-ct"])
def test_a_gpu_that_cannot_compute_the_models_dtype_is_refused_as_the_worker_would(uri: str) -> None:
    facts = published_model(uri)
    assert facts is not None
    result = plan(_spec(uri), facts.architecture, [_offer("Tesla-T4", 8)], weight_format=facts.format)
    assert not result.fits
    (candidate,) = result.candidates
    assert candidate.limited_by == "ComputeCapability"
    assert candidate.message == "bfloat16, the model's dtype, needs compute capability 8.0; this has 7.5"
    assert (candidate.remedy or "").startswith("fits on 1 x ")
    single = facts.architecture.model_copy(update={"dtype": "float32"})
    assert plan(_spec(uri), single, [_offer("Tesla-T4", 8)]).fits, "plain PyTorch computes float32 there"


def test_the_cpu_runs_one_rank() -> None:
    uri = "hf://google/gemma-4-E2B-it"
    pod = {"resources": {"limits": {"memory": "16Gi"}}}
    spec = _spec(uri, parallelism={"tensor": 2}, accelerators={"products": ["CPU"]}, pod=pod)
    (candidate,) = plan(spec, _architecture(uri), []).candidates
    assert (candidate.limited_by, candidate.remedy) == ("TensorParallel", "fits with parallelism.tensor left out")


def test_a_correction_that_is_not_enough_says_what_more_it_takes() -> None:
    uri = "hf://google/gemma-4-E4B-it"
    v_only = _spec(uri, kvCache={"layout": "v_only", "gpuMemoryUtilization": "0.5"})
    (candidate,) = plan(v_only, _architecture(uri), [_offer("NVIDIA-L4")]).candidates
    assert (candidate.remedy or "").startswith(
        "fits with kvCache.layout left out and with kvCache.gpuMemoryUtilization 0.9 or left out, "
        "or with kvCache.layout left out and on 2 x NVIDIA-L4 of one node, or"
    )
    (enough,) = plan(v_only, _architecture(uri), [_offer("NVIDIA-H200")]).candidates
    assert enough.remedy == "fits with kvCache.layout left out"
    too_long = _spec(context={"maxModelLen": 300_000}, kvCache={"dtype": "bfloat16"})
    tight = replace(CATALOGUE["NVIDIA-H100-80GB-HBM3"], visible_bytes=76 << 30)
    (longest,) = plan(too_long, _architecture(), [AcceleratorOffer(tight, 1)]).candidates
    assert longest.remedy == (
        "fits at 262,144 tokens and with int8 KV cache, or at 176,000 tokens, "
        "or at 262,144 tokens and on 2 x NVIDIA-H100-80GB-HBM3 of one node"
    )


def test_a_float32_checkpoint_keeps_its_cache_in_float32() -> None:
    uri = "hf://google/gemma-4-E2B-it"
    architecture = _architecture(uri).model_copy(update={"dtype": "float32"})
    named = {"accelerators": {"products": ["CPU"]}, "pod": {"resources": {"limits": {"memory": "32Gi"}}}}
    result = plan(_spec(uri, **named), architecture, [])
    assert result.kv_cache is not None
    assert result.kv_cache.dtype is KVCacheDtype.FLOAT32


def test_no_product_named_is_offered() -> None:
    result = plan(_spec(accelerators={"products": ["NVIDIA-H200"]}), _architecture(), [_offer("NVIDIA-L4")])
    assert (result.fits, result.candidates) == (False, ())
    assert "NVIDIA-H200" in (result.message or "")


def test_candidates_are_the_best_of_each_product_and_at_most_sixteen() -> None:
    result = plan(_spec(), _architecture(), ALL)
    products = [candidate.accelerator for candidate in result.candidates]
    assert len(products) == len(set(products)) == 16
    assert result.candidates[0].verdict == "Chosen"
    assert {candidate.verdict for candidate in result.candidates[1:]} == {"Fits"}


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_does_not_depend_on_the_order_of_offers(seed: int) -> None:
    shuffled = list(ALL)
    random.Random(seed).shuffle(shuffled)
    assert plan(_spec(), _architecture(), shuffled) == plan(_spec(), _architecture(), ALL)


def test_the_hash_names_what_the_engine_depends_on_and_nothing_else() -> None:
    spec, architecture = _spec(), _architecture()
    base = plan(spec, architecture, [_offer("NVIDIA-H200")])
    assert base.hash == plan(spec, architecture, [_offer("NVIDIA-H200"), _offer("NVIDIA-L4", 8)]).hash
    assert base.hash == plan(_spec(replicas=7, plan={"mode": "Manual"}), architecture, [_offer("NVIDIA-H200")]).hash
    reordered = base.model_copy(update={"candidates": tuple(reversed(base.candidates)), "node_selector_terms": None})
    assert plan_hash(reordered, spec) == base.hash
    changed = [
        plan(spec, architecture, [_offer("NVIDIA-H200")], engine_version="9.9.9"),
        plan(spec, architecture, [_offer("NVIDIA-B200")]),
        plan(_spec(context={"maxModelLen": 4096}), architecture, [_offer("NVIDIA-H200")]),
        plan(_spec(kvCache={"dtype": "int8"}), architecture, [_offer("NVIDIA-H200")]),
        plan(_spec(image="registry.example/worker:2"), architecture, [_offer("NVIDIA-H200")]),
        plan(_spec("hf://google/gemma-4-31B"), architecture, [_offer("NVIDIA-H200")]),
    ]
    assert len({base.hash, *(result.hash for result in changed)}) == 1 + len(changed)


def test_engine_args_follow_the_plan() -> None:
    spec = _spec(
        context={"maxModelLen": 32_768, "minModelLen": 8192},
        engine={"maxNumSeqs": 16},
        kvCache={"gpuMemoryUtilization": "0.85"},
        rollout={"drainSeconds": 5},
    )
    result = plan(spec, _architecture(), [_offer("NVIDIA-H200")])
    args = engine_args_for(result, spec, model_directory="/models/x")
    assert (args.model, args.served_model_name, args.device) == ("/models/x", "gemma-4-31B-it", "cuda")
    assert (args.max_model_len, args.min_model_len, args.max_num_seqs) == (32_768, 8192, 16)
    assert (args.gpu_memory_utilization, args.drain_seconds) == (0.85, 5)
    with pytest.raises(ValueError, match="no candidate that fits"):
        engine_args_for(plan(spec, _architecture(), []), spec, model_directory="/models/x")


def test_objectives_choose_differently() -> None:
    prices = {"NVIDIA-L4": "0.80", "NVIDIA-H200": "4.10"}
    uri = "hf://google/gemma-4-E4B-it"
    offers = [_offer("NVIDIA-L4", 8), _offer("NVIDIA-H200", 8)]
    chosen = {
        objective: plan(
            _spec(uri, objective=objective, accelerators={"costPerHour": prices}), _architecture(uri), offers
        )
        for objective in ("Cost", "Throughput", "Latency", "MaxContext")
    }
    picked = {name: (result.accelerator, result.gpus_per_replica) for name, result in chosen.items()}
    assert picked["Cost"] == ("NVIDIA-L4", 1)
    assert picked["Throughput"] == ("NVIDIA-H200", 1)
    assert picked["Latency"][0] == "NVIDIA-H200"
    assert picked["MaxContext"] == ("NVIDIA-H200", 8)
    assert chosen["Cost"].candidates[0].cost_per_hour == "0.80"


def test_a_workload_that_is_more_than_the_pool_holds_is_said_with_what_it_holds() -> None:
    uri = "hf://google/gemma-4-E4B-it"

    def message(**workload: int) -> str:
        return plan(_spec(uri, workload=workload), _architecture(uri), [_offer("NVIDIA-L4")]).message or ""

    assert "expected" not in message(inputTokens=30_000, outputTokens=2000, concurrency=6)
    crowded = message(inputTokens=30_000, outputTokens=2000, concurrency=300)
    assert "300 requests of 32,000 tokens are expected at once, and the pool holds 6" in crowded
    long = message(inputTokens=300_000, outputTokens=2000)
    assert "requests of 302,000 tokens are expected, above maxModelLen: times are of 131,072" in long
    assert "expected" not in (
        plan(_spec(uri, context={"maxModelLen": 1024}), _architecture(uri), [_offer("NVIDIA-L4")]).message or ""
    ), "nobody named a workload"


def test_the_expected_workload_comes_before_the_price() -> None:
    uri = "hf://google/gemma-4-E4B-it"
    workload = {"inputTokens": 30_000, "outputTokens": 2000, "concurrency": 48}
    spec = _spec(uri, objective="Cost", workload=workload, accelerators={"products": ["NVIDIA-L4"]})
    result = plan(spec, _architecture(uri), [_offer("NVIDIA-L4", 8)])
    assert result.concurrency is not None
    assert result.gpus_per_replica == 4
    assert Decimal(result.concurrency.at32k or 0) >= 40


def test_placement_has_one_term_per_pool_that_holds_the_replica() -> None:
    own = NodeSelectorRequirement(key="cloud.google.com/gke-accelerator", operator="In", values=("nvidia-l4",))
    pools = [
        AcceleratorOffer(CATALOGUE["NVIDIA-L4"], 8, (NodeSelectorTerm(match_expressions=(own,)),)),
        _offer("NVIDIA-L4", 4),
        _offer("NVIDIA-L4", 1),
    ]
    result = plan(_spec(accelerators={"nodeSelector": {"zone": "a"}}), _architecture(), pools)
    assert result.gpus_per_replica in (4, 8)
    keys = [[each.key for each in term.match_expressions] for term in result.node_selector_terms or ()]
    wanted = [["cloud.google.com/gke-accelerator", "zone"], ["nvidia.com/gpu.product", "zone"]]
    assert sorted(keys) == (wanted if result.gpus_per_replica == 4 else wanted[:1])


_WISHES = st.builds(
    Wishes,
    tensor_parallel=st.none() | st.sampled_from([2, 4]),
    max_model_len=st.none() | st.integers(1, 300_000),
    kv_dtype=st.none() | st.sampled_from([KVCacheDtype.BFLOAT16, KVCacheDtype.INT8, KVCacheDtype.FP8_E4M3]),
    kv_layout=st.none() | st.sampled_from(KVCacheLayout),
    utilization=st.sampled_from([Decimal("0.5"), Decimal("0.9"), Decimal("0.97")]),
    max_num_batched_tokens=st.none() | st.sampled_from([512, 8192, 65_536]),
    container_memory_bytes=st.integers(1 << 29, 64 << 30),
)


@given(
    uri=st.sampled_from(published_uris()),
    asked=_WISHES,
    product=st.sampled_from(list(CATALOGUE)),
    gpus=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_every_candidate_adds_up_and_every_remedy_fits(uri: str, asked: Wishes, product: str, gpus: int) -> None:
    architecture, device = _architecture(uri), CATALOGUE[product]
    result = evaluate(asked, architecture, device, gpus=0 if device.is_cpu else gpus)
    if isinstance(result, Fit):
        pool, geometry = result.memory.kv_pool_bytes, result.geometry
        assert result.memory.available_bytes >= pool
        assert geometry.held_bytes(result.max_model_len) <= pool
        assert result.max_model_len <= (asked.max_model_len or architecture.max_position_embeddings)
        return
    for remedy in remedies(result, architecture, asked):
        fixed = evaluate(remedy.wishes, architecture, remedy.accelerator, gpus=remedy.gpus)
        assert isinstance(fixed, Fit), remedy.text
    if result.limited_by == "Memory":
        assert result.shortfall_bytes is not None
        assert result.memory is not None
        enough = replace(device, visible_bytes=device.visible_bytes * 4 + result.shortfall_bytes * 4)
        if not device.is_cpu:
            assert isinstance(evaluate(_same_chunk(asked, device), architecture, enough, gpus=result.gpus), Fit)


def test_smaller_steps_are_a_remedy_where_their_workspace_makes_the_room() -> None:
    uri = "hf://google/gemma-4-E4B-it"
    asked: dict[str, Any] = {"context": {"maxModelLen": 65_536}, "engine": {"maxNumBatchedTokens": 32_768}}
    (candidate,) = plan(_spec(uri, **asked), _architecture(uri), [_offer("NVIDIA-L4")]).candidates
    assert (candidate.remedy or "").startswith("fits with engine.maxNumBatchedTokens 16384, or ")
    assert (candidate.remedy or "").endswith("or on 2 x NVIDIA-L4 of one node")
    followed = plan(
        _spec(uri, **asked | {"engine": {"maxNumBatchedTokens": 16_384}}), _architecture(uri), [_offer("NVIDIA-L4")]
    )
    assert (followed.fits, followed.max_model_len) == (True, 65_536)
    asked["engine"] = {"maxNumBatchedTokens": 4_096, "maxNumSeqs": 4_096}  # no spec has fewer tokens than requests
    (candidate,) = plan(_spec(uri, **asked), _architecture(uri), [_offer("NVIDIA-L4")]).candidates
    assert (candidate.remedy or "").startswith("fits on 4 x NVIDIA-L4")


def _same_chunk(asked: Wishes, device: Any) -> Wishes:
    """A larger GPU would get a larger chunk by default."""
    return replace(asked, max_num_batched_tokens=asked.chunk(device))


def test_the_shortfall_is_exact_on_a_gpu() -> None:
    """With just the missing bytes more the model fits; with 128 fewer, the unit of the pool, it does not."""
    device = CATALOGUE["NVIDIA-A100-SXM4-40GB"]
    asked = Wishes(utilization=Decimal(1), max_num_batched_tokens=2048, max_model_len=8192, kv_dtype=KVCacheDtype.INT8)
    refused = evaluate(asked, _architecture(), device, gpus=1)
    assert isinstance(refused, Refusal)
    assert refused.shortfall_bytes is not None
    exact = replace(device, visible_bytes=device.visible_bytes + refused.shortfall_bytes)
    assert isinstance(evaluate(asked, _architecture(), exact, gpus=1), Fit)
    below = replace(exact, visible_bytes=exact.visible_bytes - 128)
    assert isinstance(evaluate(asked, _architecture(), below, gpus=1), Refusal)


def test_memory_of_pools_that_differ_counts_as_the_least() -> None:
    short = replace(CATALOGUE["NVIDIA-H200"], visible_bytes=CATALOGUE["NVIDIA-H200"].visible_bytes - (8 << 30))
    mixed = [_offer("NVIDIA-H200"), AcceleratorOffer(short, 1)]
    (entry,) = consider(_spec(), _architecture(), mixed)
    assert entry.evaluation.accelerator == short


def test_wishes_read_the_whole_spec() -> None:
    read = wishes(
        _spec(
            parallelism={"tensor": 2},
            context={"maxModelLen": 4096, "minModelLen": 1024},
            workload={"inputTokens": 1, "outputTokens": 2, "concurrency": 3},
            objective="Latency",
            engine={"maxNumBatchedTokens": 512, "maxNumSeqs": 4},
            kvCache={"dtype": "int8", "layout": "kv", "gpuMemoryUtilization": "0.8"},
            accelerators={"maxPerReplica": 4},
            pod={"resources": {"limits": {"memory": "3Gi"}}},
        )
    )
    assert read == Wishes(
        tensor_parallel=2,
        max_per_replica=4,
        max_model_len=4096,
        min_model_len=1024,
        kv_dtype=KVCacheDtype.INT8,
        kv_layout=KVCacheLayout.KV,
        utilization=Decimal("0.8"),
        max_num_batched_tokens=512,
        max_num_seqs=4,
        container_memory_bytes=3 << 30,
        objective="Latency",
        input_tokens=1,
        output_tokens=2,
        concurrency=3,
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "refused"),
    [
        ((13, 0), "bfloat16", True),
        ((8, 1), "bfloat16", True),
        ((10, 3), "bfloat16", False),
        ((13, 0), "float32", False),
        ((0, 0), "bfloat16", False),
    ],
)
def test_a_gpu_that_no_kernels_have_tiles_for_is_refused(
    capability: tuple[int, int], dtype: str, refused: bool
) -> None:
    """The worker ends there, for good; a model in float32 needs no kernels, and of what no label says nobody knows."""
    architecture = _architecture("hf://google/gemma-4-E2B-it").model_copy(update={"dtype": dtype})
    gpu = replace(CATALOGUE["NVIDIA-H200"], product="NVIDIA-Next", compute_capability=capability)
    result = evaluate(Wishes(), architecture, gpu, gpus=1)
    assert isinstance(result, Refusal) is refused
    (found,) = consider(_spec("hf://google/gemma-4-E2B-it"), architecture, [AcceleratorOffer(gpu, 1)])
    assert (found.expected is None) is refused, "a speed is expected of whatever fits"
    if isinstance(result, Refusal):
        assert result.limited_by == "ComputeCapability"
        assert "no kernels for compute capability" in result.message
