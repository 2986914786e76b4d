"""Measured terms take the place of predicted ones, for the rank they were measured on and no other."""

from __future__ import annotations

from collections.abc import Mapping

from modelserve.api import ModelServeSpec
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, plan
from modelserve.planning.learned import Learned
from modelserve.published import published_model

MIB = 1 << 20
URI = "hf://google/gemma-4-31B-it"


def test_a_plan_takes_learned_terms_for_the_rank_that_they_are_of() -> None:
    facts = published_model(URI)
    assert facts is not None
    spec = ModelServeSpec.model_validate({"model": {"uri": URI}, "parallelism": {"tensor": 2}})
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
