"""Measured speed from a worker's report to the status, the metric, the ConfigMap and the next plan, and to no other."""

from __future__ import annotations

from typing import Any

import pytest
from plans_made import Planned

from modelserve.hardware import CATALOGUE
from modelserve.measured_speed import MeasuredSteps
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_operator.cluster.kinds import CONFIG_MAP, MODEL_SERVE, POD
from modelserve_operator.inventory.measurements import Measurements
from modelserve_operator.learning.shared_config import CALIBRATION_NAME
from modelserve_operator.learning.worker_reports import REFRESH
from modelserve_operator.process.metrics import REGISTRY
from modelserve_operator.process.work_queue import Key

E4B = {"model": {"uri": "hf://google/gemma-4-E4B-it"}}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 1}
H100 = {"product": "NVIDIA-H100-80GB-HBM3", "memory_mib": 81_559, "gpus": 1}


def _rank(dtype: str = "bfloat16") -> RankSpeed:
    facts = published_model("hf://google/gemma-4-E4B-it")
    assert facts is not None
    geometry = cache_geometry(
        facts.architecture, dtype=KVCacheDtype(dtype), layout=KVCacheLayout.KV, tensor_parallel_size=1
    )
    return RankSpeed(
        facts.architecture, CATALOGUE["NVIDIA-H200"], geometry, tensor_parallel=1, weight_format=facts.format
    )


def _decode_ms() -> float:
    return _rank().step(decodes=8, context=4000).seconds * 1e3


def _decodes(milliseconds: float, *, steps: int = 200) -> dict[str, Any]:
    return MeasuredSteps(
        kind="Decode",
        steps=steps,
        milliseconds=milliseconds,
        requests=8,
        context_tokens=4000,
        prompt_tokens=0,
        prompt_context=0,
    ).to_json()


def _resync(world) -> None:
    """What the operator does every MODELSERVE_RESYNC_SECONDS."""
    world.now += REFRESH
    world.pending = world.gatherer.known_keys()
    world.settle()


def _tell(world, name: str, *speed: Any) -> None:
    """The workers of a ModelServe measure this from now on, and are asked."""
    for pod in world.cluster.of(POD):
        if pod["metadata"]["name"].startswith(f"{name}-"):
            world.cluster.worker_plans[pod["metadata"]["name"]]["speed"] = list(speed)
    _resync(world)


def _serve(world, name: str, spec: dict[str, Any] = E4B) -> None:
    world.create(spec, name=name)
    world.cluster.make_ready(world.deployment_of(name))
    world.settle()


def _shown(world, name: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in world.status(name)["calibration"].get("speed", ())}


def _gauge(name: str, kind: str = "Decode") -> float | None:
    found = {"namespace": "ml", "name": name, "accelerator": "NVIDIA-H200", "kind": kind}
    return REGISTRY.get_sample_value("modelserve_speed_error_ratio", found)


def _remembered(world) -> list[dict[str, float]]:
    body = world.cluster.objects[CONFIG_MAP, "modelserve-system", CALIBRATION_NAME]
    return [entry.speed for entry in Measurements.from_data(body["data"]).entries.values()]


@pytest.fixture
def measured(world):
    """`first` runs on an H200, whose decodes take twice what is expected; `other` runs another model there."""
    world.add_node("a", **H200)
    _serve(world, "first")
    _serve(world, "other", {"model": {"uri": "hf://google/gemma-4-E2B-it"}})
    world.rest()
    _tell(world, "first", _decodes(2 * _decode_ms()))
    return world


def test_the_status_shows_what_was_measured_beside_what_is_expected_of_such_steps(world) -> None:
    world.add_node("a", **H200)
    _serve(world, "first")
    _serve(world, "other")
    before, other = world.status("first"), world.status("other")
    assert _shown(world, "first") == {}
    assert _gauge("first") is None
    prefill = MeasuredSteps(
        kind="Prefill", steps=30, milliseconds=50, requests=0, context_tokens=0, prompt_tokens=8192, prompt_context=4096
    ).to_json()
    _tell(world, "first", prefill, _decodes(1.25 * _decode_ms()))
    assert _shown(world, "first")["Decode"] == {
        "kind": "Decode", "steps": 200, "requests": "8.0", "contextTokens": 4000, "errorPercent": "25.0",
        "predictedMs": f"{_decode_ms():.3f}", "measuredMs": f"{round(1.25 * _decode_ms(), 6):.3f}",
    }  # fmt: skip
    shown = _shown(world, "first")["Prefill"]
    assert (shown["promptTokens"], "requests" in shown, "contextTokens" in shown) == (8192, False, False)
    assert float(shown["predictedMs"]) == pytest.approx(64, rel=0.05)
    assert _gauge("first") == pytest.approx(0.25, abs=0.001)
    after = world.status("first")
    assert after["conditions"] == before["conditions"]
    assert {key: value for key, value in after["calibration"].items() if key != "speed"} == before["calibration"]
    assert after["plan"] == before["plan"]
    assert world.status("other") == other, "what is measured of one says nothing in the status of another"
    world.cluster.remove(MODEL_SERVE, "ml", "first")
    world.settle()
    assert _gauge("first") is None


def test_sizes_and_workers_are_taken_together_by_their_steps(world) -> None:
    world.add_node("a", **{**H200, "gpus": 2})
    _serve(world, "first", {**E4B, "replicas": 2})
    one, two = (name for name in world.cluster.worker_plans if name.startswith("first-"))
    alone = _rank().step(decodes=1, context=1000).seconds * 1e3
    small = {**_decodes(2 * alone, steps=100), "requests": 1, "contextTokens": 1000}
    world.cluster.worker_plans[one]["speed"] = [_decodes(_decode_ms(), steps=200)]
    world.cluster.worker_plans[two]["speed"] = [small, _decodes(_decode_ms(), steps=100)]
    _resync(world)
    shown = _shown(world, "first")["Decode"]
    assert (shown["steps"], shown["requests"], shown["contextTokens"]) == (400, "6.2", 24_250 / 6.25)
    assert float(shown["predictedMs"]) == pytest.approx((3 * _decode_ms() + alone) / 4, abs=0.002)
    assert float(shown["measuredMs"]) == pytest.approx((3 * _decode_ms() + 2 * alone) / 4, abs=0.002)


def test_a_speed_alone_has_nobody_reconciled_and_no_plan_made_anew(world) -> None:
    """Traffic moves speeds all day, and there may be thousands of ModelServes."""
    world.add_node("a", **H200)
    _serve(world, "first")
    _serve(world, "other")
    made = Planned(world)
    made.clear()
    world.after_each = made.look
    world.reconciled.clear()
    _tell(world, "first", _decodes(2 * _decode_ms()))
    assert _remembered(world)[0] == {"bfloat16/kv Decode": 2.0}
    assert world.reconciled.count(Key("ml", "other")) == 1, "by the resync"
    assert len(made) == 0
    _resync(world)
    assert len(made) == 0, "plans are kept by the speeds that they were made with"
    world.create(E4B, name="third")
    assert len(made) == 1
    assert world.status("third")["plan"]["speedFactors"]


def test_nothing_is_written_until_a_figure_has_moved_by_a_tenth(measured) -> None:
    assert {kind for _, kind, _ in measured.rest()} == {"ModelServe", "ConfigMap"}
    _resync(measured)
    for milliseconds in (1.95, 2.1, 1.9):
        _tell(measured, "first", _decodes(milliseconds * _decode_ms(), steps=180))
    assert measured.rest() == []
    assert _shown(measured, "first")["Decode"]["steps"] == 200
    _tell(measured, "first", _decodes(2.5 * _decode_ms()))
    assert sorted(kind for _, kind, _ in measured.rest()) == ["ConfigMap", "ModelServe"]
    assert _shown(measured, "first")["Decode"]["errorPercent"] == "150.0"


def test_it_stays_through_restarts_of_the_operator_and_of_workers(measured) -> None:
    shown = _shown(measured, "first")
    measured.rest()
    measured.restart_operator()
    measured.settle()
    assert measured.rest() == []
    _tell(measured, "first")  # too few steps to say anything
    assert (_shown(measured, "first"), measured.rest()) == (shown, [])
    measured.edit("first", engine={"maxNumSeqs": 32})
    assert _shown(measured, "first") == {}, "another revision has measured nothing yet"


def test_a_worker_that_does_not_answer_again_is_as_it_was(measured, caplog) -> None:
    """Neither its figures nor its readiness go, and it is not asked at every reconcile."""
    shown, asked = measured.status("first"), []
    read = measured.cluster.read_worker

    async def silent(pod, path):
        asked.append(pod["metadata"]["name"])
        return await read(pod, path)

    measured.cluster.read_worker = silent
    for name in [name for name in measured.cluster.worker_plans if name.startswith("first-")]:
        del measured.cluster.worker_plans[name]
    _resync(measured)
    assert measured.status("first") == shown
    assert sorted(name.partition("-")[0] for name in asked) == ["first", "other"]
    measured.pending = measured.gatherer.known_keys()
    measured.settle()
    assert len(asked) == 2
    _resync(measured)
    assert len(asked) == 4


@pytest.mark.parametrize("speed", [[{"kind": "Decode"}], "x", {"a": 1}, [{**_decodes(1.0), "milliseconds": -1}], 7])
def test_a_report_of_another_shape_costs_its_speed_alone(world, caplog, speed: Any) -> None:
    world.add_node("a", **H200)
    _serve(world, "first")
    _serve(world, "other")
    for name, plan in world.cluster.worker_plans.items():
        plan["speed"] = speed if name.startswith("first-") else [_decodes(2 * _decode_ms())]
    _resync(world)
    assert _shown(world, "first") == {}
    assert world.status("first")["calibration"]["terms"]
    assert world.condition("Ready", "first") == ("True", "RolledOut")
    assert "ignored" in caplog.text
    assert set(_shown(world, "other")) == {"Decode"}


def test_the_next_plan_of_the_same_kind_expects_what_was_measured_and_says_so(measured) -> None:
    first = measured.status("first")["plan"]
    measured.create(E4B, name="second")
    second = measured.status("second")["plan"]
    speed, before = second["candidates"][0]["speed"], first["candidates"][0]["speed"]
    ratio = float(speed["outputToken"]["weights"]) / float(before["outputToken"]["weights"])
    assert ratio == pytest.approx(2, rel=0.01)
    assert float(speed["timePerOutputTokenMs"]) > 1.5 * float(before["timePerOutputTokenMs"])
    assert float(speed["outputTokensPerSecond"]) < 0.7 * float(before["outputTokensPerSecond"])
    assert "corrected by what workers measured of such steps: decode 2.00" in second["candidates"][0]["message"]
    assert "corrected by" in second["message"]
    assert second["speedFactors"] == [{
        "accelerator": "NVIDIA-H200", "tensorParallel": 1, "kvCache": {"dtype": "bfloat16", "layout": "kv"},
        "decode": "2.00", "mixed": "2.00", "prefill": "2.00",
    }]  # fmt: skip
    assert second["hash"] == first["hash"], "the engine is the same"
    for name, spec in (
        ("int8", {**E4B, "kvCache": {"dtype": "int8"}}),
        ("larger", {"model": {"uri": "hf://google/gemma-4-12B-it"}}),
    ):
        measured.create(spec, name=name)
        assert "corrected" not in measured.status(name)["plan"]["message"], name
    assert measured.status("other")["plan"].get("speedFactors") is None


def test_a_measured_speed_counts_in_ranking_and_never_for_a_plan_that_is_committed(world) -> None:
    """Throughput: the H200 is expected to be a little faster than the H100, until it is measured to be slower."""
    world.add_node("a", **H200)
    world.add_node("b", **H100)
    _serve(world, "first")
    assert world.status("first")["plan"]["accelerator"] == "NVIDIA-H200"
    plan, pods = world.status("first")["plan"], world.cluster.of(POD)
    world.rest()
    _tell(world, "first", _decodes(2 * _decode_ms()))
    world.create(E4B, name="second")
    assert world.status("second")["plan"]["accelerator"] == "NVIDIA-H100-80GB-HBM3"
    for _ in range(2):
        _resync(world)
        assert world.status("first")["plan"] == plan
        assert "proposedPlan" not in world.status("first")
        assert "proposedPlan" not in world.status("second")
    _tell(world, "first", _decodes(_decode_ms()))
    assert _remembered(world) == [{"bfloat16/kv Decode": 1.0}]
    assert "proposedPlan" not in world.status("second"), "what it was ranked with stays what it is compared with"
    assert world.status("second")["plan"]["accelerator"] == "NVIDIA-H100-80GB-HBM3"
    assert [pod for pod in world.cluster.of(POD) if pod in pods] == pods
    world.edit("second", context={"maxModelLen": 4096})
    assert world.status("second")["plan"]["accelerator"] == "NVIDIA-H200", (
        "a new spec is planned with what is known now"
    )


@pytest.mark.parametrize(("times", "factor"), [(50, 3.0), (0.01, 0.5), (1.04, 1.04)])
def test_factors_are_bounded_and_small_ones_correct_nothing(world, times: float, factor: float) -> None:
    world.add_node("a", **H200)
    _serve(world, "first")
    _tell(world, "first", _decodes(times * _decode_ms()))
    assert float(_shown(world, "first")["Decode"]["errorPercent"]) == pytest.approx(100 * (times - 1), abs=0.5)
    assert _remembered(world) == [{"bfloat16/kv Decode": factor}]
    world.create(E4B, name="second")
    factors = world.status("second")["plan"].get("speedFactors")
    assert (factors is None) == (times == 1.04)
    if factors is not None:
        assert factors[0]["decode"] == f"{factor:.2f}"


def test_two_that_differ_do_not_overwrite_each_other_for_ever(measured) -> None:
    _serve(measured, "second")
    measured.rest()
    _tell(measured, "second", _decodes(1.5 * _decode_ms()))
    assert _remembered(measured)[0] == {"bfloat16/kv Decode": 1.5}, "its worker is newer"
    measured.rest()
    for _ in range(3):
        _resync(measured)
    assert measured.rest() == []
    assert _shown(measured, "first")["Decode"]["errorPercent"] == "100.0"


def test_the_cpu_has_no_expectation_to_compare_with(ready_world) -> None:
    _tell(ready_world, "tiny", _decodes(5.0))
    assert "calibration" not in ready_world.status()
