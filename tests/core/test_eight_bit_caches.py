"""No plan chooses an 8-bit cache for its speed: only where a length was asked that no other cache holds, and where what
it costs these weights was measured and is little.

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
from modelserve.planning.learned import NOTHING_LEARNED, Learned
from modelserve.planning.wishes import Wishes
from modelserve.published import published_model
from modelserve.quality.cache_quality import LEAST_SAME, MOST_KL, CacheQuality
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

GPUS = [record for record in CATALOGUE.values() if not record.is_cpu]
MODELS = ("E2B", "E4B", "12B", "26B-A4B", "31B")
LENGTHS = (None, 8192, 32_768, 131_072, 262_144)


def _measured(kl: float = 0.001, *, same: float = 0.995, found: int = 4) -> CacheQuality:
    return CacheQuality(
        dtype=KVCacheDtype.INT8, layout=KVCacheLayout.V_ONLY, kl=kl, same=same, needles=4, found=found, tokens=6000,
        context=32_768,
    )  # fmt: skip


def _known(found: CacheQuality) -> Learned:
    """On every product, in both layouts."""
    forms = [found.model_copy(update={"layout": layout}) for layout in KVCacheLayout]
    return Learned(cache_quality=tuple((device.product, form) for device in GPUS for form in forms))


def _architecture(variant: str):
    facts = published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    return facts.architecture


@pytest.mark.parametrize("variant", MODELS)
def test_an_8_bit_cache_is_only_what_makes_an_asked_length_fit(variant: str) -> None:
    architecture, chosen = _architecture(variant), 0
    cases = product(GPUS, (1, 2, 4), (BFLOAT16, int4(32)), LENGTHS, (Decimal("0.9"), Decimal("0.6"), Decimal("0.3")))
    for device, gpus, form, length, share in cases:
        wished = Wishes(max_model_len=length, weight_format=form, utilization=share, learned=_known(_measured()))
        fit = evaluate(wished, architecture, device, gpus=gpus)
        if not isinstance(fit, Fit) or fit.geometry.dtype is KVCacheDtype.BFLOAT16:
            continue
        chosen += 1
        assert length is not None, f"{device.product}: nobody asked for a length"
        assert (fit.downgraded, fit.max_model_len) == (True, min(length, architecture.max_position_embeddings))
        own = evaluate(replace(wished, kv_dtype=KVCacheDtype.BFLOAT16), architecture, device, gpus=gpus)
        assert not isinstance(own, Fit) or own.max_model_len < fit.max_model_len, device.product
        for unknown in (NOTHING_LEARNED, _known(_measured(kl=0.02))):
            bare = evaluate(replace(wished, learned=unknown), architecture, device, gpus=gpus)
            assert not isinstance(bare, Fit) or bare.geometry.dtype is KVCacheDtype.BFLOAT16, device.product
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
    found = plan(
        spec, _architecture(variant), [AcceleratorOffer(record, 8) for record in GPUS], weight_format=BFLOAT16,
        learned=_known(_measured()),
    )  # fmt: skip
    fitting = [each for each in found.candidates if each.verdict != "Refused" and each.max_model_len == length]
    eight_bit = [each.kv_cache.dtype is not KVCacheDtype.BFLOAT16 for each in fitting]
    assert fitting
    assert eight_bit == sorted(eight_bit), "those without come first, whatever the objective makes of their speed"


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (_measured(), True),
        (_measured(kl=MOST_KL, same=LEAST_SAME), True),
        (_measured(kl=MOST_KL + 1e-6), False),
        (_measured(same=LEAST_SAME - 1e-6), False),
        (_measured(found=3), False),
    ],
)
def test_a_quality_holds_where_all_of_it_does(found: CacheQuality, *, holds: bool) -> None:
    assert found.holds == holds
    assert CacheQuality.model_validate(found.to_json()) == found


TIGHT = {
    "model": {"uri": "hf://google/gemma-4-31B-it"}, "context": {"maxModelLen": 262_144, "minModelLen": 8192},
    "accelerators": {"products": ["NVIDIA-H100-80GB-HBM3"], "maxPerReplica": 1},
}  # fmt: skip
H100 = CATALOGUE["NVIDIA-H100-80GB-HBM3"]


def _tight(learned: Learned = NOTHING_LEARNED, **changes: object):
    spec = ModelServeSpec.model_validate({**TIGHT, **changes})
    return plan(spec, _architecture("31B"), [AcceleratorOffer(H100, 1)], weight_format=BFLOAT16, learned=learned)


def test_a_plan_says_what_8_bits_would_hold_and_what_takes_them() -> None:
    unmeasured, lost, held = _tight(), _tight(_known(_measured(kl=0.031))), _tight(_known(_measured()))
    named = _tight(kvCache={"dtype": "int8"})
    assert unmeasured.kv_cache and lost.kv_cache and held.kv_cache and named.kv_cache  # noqa: PT018 - all four fit
    assert unmeasured.kv_cache.dtype is lost.kv_cache.dtype is KVCacheDtype.BFLOAT16
    assert held.kv_cache.dtype is named.kv_cache.dtype is KVCacheDtype.INT8
    assert held.max_model_len == named.max_model_len
    assert (unmeasured.max_model_len or 0) < (held.max_model_len or 0)
    longer = f"an int8 cache would hold {held.max_model_len:,} tokens of a request"
    for short, why in ((unmeasured, "nobody has measured that yet"), (lost, "KL 0.0310 nats of at most 0.01")):
        assert longer in (short.message or "")
        assert f"{why}" in (short.message or "")
        assert "kvCache.dtype int8 takes it all the same" in (short.message or "")
    assert "int8 cache, because" in (held.message or "")
    assert "measured on these weights: KL 0.0010 nats" in (held.message or "")
    sixteen = _tight(_known(_measured()), kvCache={"dtype": "bfloat16"})
    assert sixteen.kv_cache is not None
    assert sixteen.kv_cache.dtype is KVCacheDtype.BFLOAT16, "a dtype that is named is never overruled"
    assert "would hold" not in (sixteen.message or "").replace("pool", "")


def test_a_refusal_for_want_of_a_measurement_says_so_with_the_remedy() -> None:
    refused = _tight(context={"maxModelLen": 262_144})
    assert not refused.fits
    (candidate,) = refused.candidates
    assert "is chosen unasked only where its quality holds" in (candidate.message or "")
    assert "with int8 KV cache" in (candidate.remedy or "")
