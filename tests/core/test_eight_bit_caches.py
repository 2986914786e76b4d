"""No plan chooses an 8-bit cache for its speed: only where a length was asked that no other cache holds.

Decoding rows of 8 bits reads V-only layers at a third of the bandwidth: such steps are slower (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from itertools import product

import pytest

from modelserve.api import ModelServeSpec
from modelserve.hardware import CATALOGUE
from modelserve.model.weight_format import BFLOAT16, int4
from modelserve.planning import AcceleratorOffer, plan
from modelserve.planning.evaluation import Fit, evaluate
from modelserve.planning.wishes import Wishes
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype

GPUS = [record for record in CATALOGUE.values() if not record.is_cpu]
MODELS = ("E2B", "E4B", "12B", "26B-A4B", "31B")
LENGTHS = (None, 8192, 32_768, 131_072, 262_144)


def _architecture(variant: str):
    facts = published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    return facts.architecture


@pytest.mark.parametrize("variant", MODELS)
def test_an_8_bit_cache_is_only_what_makes_an_asked_length_fit(variant: str) -> None:
    architecture, chosen = _architecture(variant), 0
    cases = product(GPUS, (1, 2, 4), (BFLOAT16, int4(32)), LENGTHS, (Decimal("0.9"), Decimal("0.6"), Decimal("0.3")))
    for device, gpus, form, length, share in cases:
        wished = Wishes(max_model_len=length, weight_format=form, utilization=share)
        fit = evaluate(wished, architecture, device, gpus=gpus)
        if not isinstance(fit, Fit) or fit.geometry.dtype is KVCacheDtype.BFLOAT16:
            continue
        chosen += 1
        assert length is not None, f"{device.product}: nobody asked for a length"
        assert (fit.downgraded, fit.max_model_len) == (True, min(length, architecture.max_position_embeddings))
        own = evaluate(replace(wished, kv_dtype=KVCacheDtype.BFLOAT16), architecture, device, gpus=gpus)
        assert not isinstance(own, Fit) or own.max_model_len < fit.max_model_len, device.product
    assert chosen or variant in ("E2B", "E4B"), "there are such GPUs"


@pytest.mark.parametrize("objective", ["Throughput", "Latency", "Cost"])
@pytest.mark.parametrize("variant", MODELS)
def test_no_objective_takes_a_gpu_with_an_8_bit_cache_before_one_without(variant: str, objective: str) -> None:
    """Both hold what was asked: the requests at once, too."""
    length = min(131_072, _architecture(variant).max_position_embeddings)
    spec = ModelServeSpec.model_validate(
        {
            "model": {"uri": f"hf://google/gemma-4-{variant}-it"},
            "objective": objective,
            "context": {"maxModelLen": length},
            "workload": {"inputTokens": 2048, "outputTokens": 256, "concurrency": 1},
        }
    )
    found = plan(spec, _architecture(variant), [AcceleratorOffer(record, 8) for record in GPUS], weight_format=BFLOAT16)
    fitting = [each for each in found.candidates if each.verdict != "Refused" and each.max_model_len == length]
    eight_bit = [each.kv_cache.dtype is not KVCacheDtype.BFLOAT16 for each in fitting]
    assert fitting
    assert eight_bit == sorted(eight_bit), "those without come first, whatever the objective makes of their speed"
