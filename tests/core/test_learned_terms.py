"""Measured terms take the place of predicted ones, for the rank they were measured on and no other."""

from __future__ import annotations

from collections.abc import Mapping

from modelserve.api import Candidate, ModelServeSpec
from modelserve.api.status import KVCachePlan, SpeedFactors
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, plan
from modelserve.planning.learned import Learned
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

MIB = 1 << 20
URI = "hf://google/gemma-4-31B-it"


def test_a_measured_speed_counts_for_the_rank_that_it_is_of_and_changes_no_bytes() -> None:
    facts = published_model(URI)
    assert facts is not None
    spec = ModelServeSpec.model_validate({"model": {"uri": URI}, "workload": {"concurrency": 1, "inputTokens": 8192}})
    offers = [AcceleratorOffer(CATALOGUE[product], 1) for product in ("NVIDIA-H200", "NVIDIA-B200")]
    factors = SpeedFactors(
        accelerator="NVIDIA-H200",
        tensor_parallel=1,
        kv_cache=KVCachePlan(dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY),
        decode="0.50",
        mixed="1.00",
        prefill="3.00",
    )

    def planned(*speed: SpeedFactors) -> dict[str, Candidate]:
        result = plan(spec, facts.architecture, offers, learned=Learned(speed=speed))
        assert result.speed_factors == (speed or None)
        return {each.accelerator: each.model_copy(update={"verdict": "Fits"}) for each in result.candidates}

    before, after = planned(), planned(factors)
    assert after["NVIDIA-B200"] == before["NVIDIA-B200"]
    one, other = before["NVIDIA-H200"], after["NVIDIA-H200"]
    assert (other.per_gpu, other.concurrency) == (one.per_gpu, one.concurrency)
    assert one.speed is not None
    assert other.speed is not None
    for name, factor in (("time_per_output_token_ms", 0.5), ("time_to_first_token_ms", 3)):
        assert abs(float(getattr(other.speed, name)) / float(getattr(one.speed, name)) - factor) < 0.01
    for wrong in (
        {"tensor_parallel": 2},
        {"accelerator": "NVIDIA-L4"},
        {"kv_cache": {"dtype": "int8", "layout": "kv"}},
    ):
        elsewhere = SpeedFactors.model_validate({**factors.model_dump(), **wrong})
        assert planned(elsewhere) == before


def test_a_plan_takes_learned_terms_for_the_rank_that_they_are_of() -> None:
    facts = published_model(URI)
    assert facts is not None
    spec = ModelServeSpec.model_validate(
        {"model": {"uri": URI}, "parallelism": {"tensor": 2}, "engine": {"maxNumSeqs": 64}}
    )
    offers = [AcceleratorOffer(CATALOGUE[product], 8) for product in ("NVIDIA-H200", "NVIDIA-H100-NVL")]
    asked: set[tuple[str, int]] = set()

    def learned(
        product: str,
        *,
        tensor_parallel_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        cache_format: str,
    ) -> Mapping[str, int]:
        asked.add((product, tensor_parallel_size))
        assert (max_num_batched_tokens, max_num_seqs, cache_format) == (8192, 64, "bfloat16/v_only")
        terms = {"weights": 30_000 * MIB, "activation": 2000 * MIB, "context": 1 * MIB, "nccl": 3 * MIB}
        return terms if product == "NVIDIA-H200" else {}

    before, after = (
        plan(spec, facts.architecture, offers),
        plan(spec, facts.architecture, offers, learned=Learned(terms=learned)),
    )
    memory = {c.accelerator: c.per_gpu for c in after.candidates}
    untouched = {c.accelerator: c.per_gpu for c in before.candidates}
    assert asked == {("NVIDIA-H200", 2), ("NVIDIA-H100-NVL", 2)}
    assert memory["NVIDIA-H100-NVL"] == untouched["NVIDIA-H100-NVL"]
    there, predicted = memory["NVIDIA-H200"], untouched["NVIDIA-H200"]
    assert there is not None
    assert predicted is not None
    assert (there.weights_bytes, there.activation_bytes) == (30_000 * MIB, 2000 * MIB)
    assert there.overhead_bytes < predicted.overhead_bytes
    fixed = ("weights_bytes", "activation_bytes", "overhead_bytes")
    freed = sum(getattr(predicted, term) - getattr(there, term) for term in fixed)
    assert abs(there.kv_pool_bytes - predicted.kv_pool_bytes - freed) < 128, "the pool takes what the terms leave"
