"""What an 8-bit cache costs, from a worker's report to a proposal, and to no pod that runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelserve.quality.cache_quality import CacheQuality
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION, MODEL_SERVE, POD
from modelserve_operator.inventory.measurements import Measurements
from modelserve_operator.learning.shared_config import CALIBRATION_NAME
from modelserve_operator.learning.worker_reports import REFRESH

MODEL = "hf://google/gemma-4-31B-it"
SPEC: dict[str, Any] = {"model": {"uri": MODEL}, "context": {"maxModelLen": 262_144, "minModelLen": 8192}}
NAMED = {**SPEC, "kvCache": {"dtype": "bfloat16"}}
H100 = {"product": "NVIDIA-H100-80GB-HBM3", "memory_mib": 78_000, "gpus": 1}
HELD = CacheQuality(
    dtype=KVCacheDtype.INT8, layout=KVCacheLayout.V_ONLY, kl=0.0012, same=0.993, needles=4, found=4, tokens=6000,
    context=32_768,
)  # fmt: skip
LOST = HELD.model_copy(update={"kl": 0.02})


@pytest.fixture
def running(world):
    """`first` runs with less context than asked, `named` by its own choice."""
    for node in "abcdef":
        world.add_node(node, **H100)
    for name, spec in (("first", SPEC), ("named", NAMED)):
        world.create(spec, name=name)
    world.make_ready()
    return world


def _told(world, quality: Any, name: str = "first") -> None:
    """A worker says so when it is asked next."""
    (pod,) = world.cluster.pods_of(world.deployment_of(name))
    document = quality.to_json() if isinstance(quality, CacheQuality) else quality
    world.cluster.worker_plans[pod["metadata"]["name"]]["cacheQuality"] = document
    world.now += REFRESH
    for _ in range(2):
        world.pending = world.gatherer.known_keys()
        world.settle()


def _learned(world) -> list[CacheQuality]:
    found = [body for body in world.cluster.of(CONFIG_MAP) if body["metadata"]["name"] == CALIBRATION_NAME]
    entries = Measurements.from_data(found[0]["data"]).entries.values() if found else ()
    told = [quality.to_json() for entry in entries for quality in entry.cache_quality.values()]
    return [CacheQuality.model_validate(each) for each in told]


def _pods(world) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of(POD)}


def _dtype(plan: dict[str, Any]) -> str:
    return str(plan["kvCache"]["dtype"])


def _now(status: dict[str, Any]) -> str:
    """Cache of the plan as it would be made now: a proposal, if only of what memory was measured, or what runs."""
    return _dtype(status.get("proposedPlan") or status["plan"])


def test_a_quality_that_holds_is_proposed_and_moves_no_pod(running) -> None:
    pods = _pods(running)
    plan = running.status("first")["plan"]
    assert (_dtype(plan), plan["maxModelLen"] < 262_144) == ("bfloat16", True)
    assert "cacheQuality" not in running.status("first")
    _told(running, HELD)
    assert _learned(running) == [HELD]
    status = running.status("first")
    assert status["waits"] == "Plan"
    proposed = status["proposedPlan"]
    assert (_dtype(proposed), proposed["maxModelLen"]) == ("int8", 262_144)
    assert "measured on these weights: KL 0.0012 nats of at most 0.01" in proposed["message"]
    (shown,) = status["cacheQuality"]
    assert shown == {
        "accelerator": "NVIDIA-H100-80GB-HBM3", "dtype": "int8", "layout": "v_only", "holds": True,
        "divergenceNats": "0.0012", "sameTokenPercent": "99.30", "needles": 4, "needlesFound": 4, "tokens": 6000,
        "contextTokens": 32_768,
    }  # fmt: skip
    assert _dtype(status["plan"]) == "bfloat16"
    assert _now(running.status("named")) == "bfloat16", "a dtype that is named is never overruled"
    assert _pods(running) == pods
    running.create(SPEC, name="second")
    assert _dtype(running.status("second")["plan"]) == "int8", "the next plan of these weights takes it at once"
    running.create({**SPEC, "model": {"uri": MODEL, "revision": "c1" * 20}}, name="other")
    assert _dtype(running.status("other")["plan"]) == "bfloat16", "of other weights nobody knows anything"
    assert pods <= _pods(running)


def test_one_that_fails_is_kept_and_the_plan_says_what_to_do(running) -> None:
    _told(running, LOST)
    assert _learned(running) == [LOST]
    status = running.status("first")
    assert _now(status) == "bfloat16"
    (shown,) = status["cacheQuality"]
    assert (shown["holds"], shown["divergenceNats"]) == (False, "0.0200")
    running.create(SPEC, name="second")
    plan = running.status("second")["plan"]
    assert _dtype(plan) == "bfloat16"
    assert "measured there: KL 0.0200 nats of at most 0.01" in plan["message"]
    assert "kvCache.dtype int8 takes it all the same" in plan["message"]
    running.create({**SPEC, "kvCache": {"dtype": "int8"}}, name="asked")
    assert _dtype(running.status("asked")["plan"]) == "int8"


def test_a_plan_of_before_keeps_its_8_bits_until_a_measurement_fails(running) -> None:
    """A release before took them unmeasured: the plan stays, nothing is proposed beside it, and no pod moves."""
    _told(running, HELD)
    running.create(SPEC, name="before")
    running.make_ready()
    assert _dtype(running.status("before")["plan"]) == "int8"
    pods = _pods(running)
    body = next(each for each in running.cluster.of(CONFIG_MAP) if each["metadata"]["name"] == CALIBRATION_NAME)
    forgotten = {
        key: json.dumps({**json.loads(text), "cacheQuality": {}}, sort_keys=True) for key, text in body["data"].items()
    }
    (pod,) = running.cluster.pods_of(running.deployment_of("first"))
    running.cluster.worker_plans[pod["metadata"]["name"]].pop("cacheQuality", None)
    running.cluster.put(CONFIG_MAP, {**body, "data": forgotten})
    running.restart_operator()
    running.settle()
    assert _learned(running) == []
    status = running.status("before")
    assert (_dtype(status["plan"]), _now(status)) == ("int8", "int8")
    assert _pods(running) == pods
    _told(running, LOST)
    status = running.status("before")
    assert (_dtype(status["plan"]), _dtype(status["proposedPlan"])) == ("int8", "bfloat16")
    assert _pods(running) == pods


def test_only_who_would_gain_measures(running) -> None:
    running.create({**SPEC, "context": {"maxModelLen": 32_768}}, name="fits")
    running.create({**SPEC, "kvCache": {"dtype": "int8"}}, name="asked")
    names = ("first", "named", "fits", "asked")
    bodies = {labels.label_of(body, labels.NAME): body for body in running.cluster.of(CONTROLLER_REVISION)}
    measure = {name: bodies[name]["data"]["engine"]["measureCacheQuality"] for name in names}
    assert measure == {"first": True, "named": False, "fits": False, "asked": False}


@pytest.mark.parametrize("nonsense", [{}, {"dtype": "int8"}, {**HELD.to_json(), "kl": -1}, "good", [1]])
def test_what_is_no_measurement_is_ignored(running, nonsense: Any) -> None:
    _told(running, nonsense)
    assert _learned(running) == []
    assert running.condition("Ready", "first") == ("True", "RolledOut")


def test_an_older_worker_takes_nothing_back_and_a_newer_one_does(running) -> None:
    _told(running, LOST)
    writes = len(running.cluster.writes)
    _told(running, LOST)
    assert len(running.cluster.writes) == writes
    _told(running, HELD)  # the same worker, measured again: of two verdicts at one time the worse counts
    assert _learned(running) == [LOST]
    running.now += REFRESH
    running.create(SPEC, name="newer")
    running.make_ready()
    _told(running, HELD, name="newer")
    assert _learned(running) == [HELD]
    running.restart_operator()
    running.settle()
    assert running.status("first")["cacheQuality"][0]["holds"] is True
    assert running.cluster.objects[MODEL_SERVE, "ml", "named"]["status"]["readyReplicas"] == 1
