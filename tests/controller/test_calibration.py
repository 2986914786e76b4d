"""Measured memory from a worker's report to the status, the metric, the ConfigMap and the next plan."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rank_of import rank_of

from modelserve.model.architecture import ModelArchitecture
from modelserve.planning import ENGINE_VERSION
from modelserve.published import published_model
from modelserve.sizing.cuda_graphs import graphs_bytes
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator.cluster.kinds import CONFIG_MAP, MODEL_SERVE, POD
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.inventory.measurements import MAX_ENTRIES, MAX_OF_NAMESPACE, Entry, Measurements
from modelserve_operator.learning.shared_config import CALIBRATION_NAME, SharedConfig
from modelserve_operator.process.metrics import REGISTRY

MIB = 1 << 20
MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 1}
SPEC: dict[str, Any] = {"model": MODEL, "engine": {"maxNumSeqs": 64}}


def _learned(world) -> dict[str, Any] | None:
    body = world.cluster.objects.get((CONFIG_MAP, "modelserve-system", CALIBRATION_NAME))
    return body["data"] if body else None


def _measure(world, name: str, **surplus: int) -> None:
    world.cluster.make_ready(world.deployment_of(name), surplus=surplus)
    world.settle()


def _entries(world) -> list[Entry]:
    return list(Measurements.from_data(_learned(world) or {}).entries.values())


def _as_known(world, name: str, **more: int) -> dict[str, int]:
    """Surplus over what pods report by themselves that makes them report what is known, and `more` of it."""
    (entry,) = _entries(world)
    planned = world.status(name)["plan"]["perGpu"]
    (activation,) = entry.activation.values()
    known = {
        "weights": entry.terms["weights"] - planned["weightsBytes"],
        "activation": activation - planned["activationBytes"] // 2,
        "context": entry.terms["context"] - planned["overheadBytes"] // 2,
    }
    return {term: size + more.get(term, 0) for term, size in known.items()}


def _architecture() -> ModelArchitecture:
    facts = published_model(MODEL["uri"])
    assert facts is not None
    return facts.architecture


def _gauge(name: str, term: str) -> float | None:
    found = {"namespace": "ml", "name": name, "accelerator": "NVIDIA-H200", "term": term}
    return REGISTRY.get_sample_value("modelserve_sizing_error_ratio", found)


def test_the_second_of_the_same_shape_is_planned_with_what_the_first_measured(world) -> None:
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    assert _learned(world) is None, "created when there is something to say"
    _measure(world, "first", weights=700 * MIB, activation=4000 * MIB)
    first = world.status("first")
    measured = {term["name"]: term["measuredBytes"] for term in first["calibration"]["terms"]}
    assert measured["weights"] == first["plan"]["perGpu"]["weightsBytes"] + 700 * MIB

    world.create(SPEC, name="second")
    second = world.status("second")["plan"]
    assert second["perGpu"]["weightsBytes"] == measured["weights"]
    assert second["perGpu"]["activationBytes"] == measured["activation"]
    graphs = graphs_bytes(_architecture(), rank_of(_architecture()))
    assert second["perGpu"]["overheadBytes"] == measured["context"] + graphs, "graphs are always predicted"
    assert second["perGpu"]["kvPoolBytes"] != first["plan"]["perGpu"]["kvPoolBytes"]

    world.create({**SPEC, "engine": {"maxNumBatchedTokens": 2048}}, name="chunk")
    chunk = world.status("chunk")["plan"]["perGpu"]
    assert chunk["activationBytes"] != measured["activation"], "the workspace of another step is not the same"
    assert chunk["weightsBytes"] == measured["weights"]
    world.create({"model": {"uri": "hf://google/gemma-4-E4B-it"}}, name="other")
    assert world.status("other")["plan"]["perGpu"]["weightsBytes"] != measured["weights"]


def test_an_activation_is_of_one_cache_format(world) -> None:
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    _measure(world, "first")
    predicted = world.status("first")["plan"]["perGpu"]
    world.create(SPEC, name="second")
    second = world.status("second")["plan"]["perGpu"]
    assert second["activationBytes"] == predicted["activationBytes"] // 2
    assert second["overheadBytes"] < predicted["overheadBytes"], "other terms are taken as measured"
    world.create({**SPEC, "kvCache": {"dtype": "int8"}}, name="eight")
    eight = world.status("eight")["plan"]["perGpu"]
    assert eight["activationBytes"] > predicted["activationBytes"], "chunks expand what int8 stores"
    assert eight["overheadBytes"] == second["overheadBytes"]


def test_a_running_plan_is_never_changed_only_proposed(world) -> None:
    world.add_node("a", product="NVIDIA-H100-80GB-HBM3", memory_mib=81_559, gpus=1)
    world.create({**SPEC, "kvCache": {"dtype": "bfloat16", "layout": "kv"}}, name="first")
    candidates, before = world.status("first")["plan"]["candidates"], world.shown_plan("first")
    assert candidates[0]["limitedBy"] == "Memory", "so that what is learned changes the length"
    pods = {pod["metadata"]["uid"] for pod in world.cluster.of(POD)}
    _measure(world, "first", weights=2000 * MIB, activation=8000 * MIB)
    after = world.status("first")
    assert world.shown_plan("first") == before
    assert after["proposedPlan"]["maxModelLen"] < before["maxModelLen"]
    assert {pod["metadata"]["uid"] for pod in world.cluster.of(POD)} == pods
    assert world.condition("Ready", "first") == ("True", "RolledOut")


def test_others_hear_of_what_one_learned(world) -> None:
    world.add_node("a", **H200)
    spec = {**SPEC, "kvCache": {"layout": "kv"}, "plan": {"mode": "PreviewOnly"}}
    world.create(spec, name="preview")
    before = world.status("preview")["plan"]["perGpu"]["kvPoolBytes"]
    world.create(SPEC, name="first")
    _measure(world, "first", weights=500 * MIB)
    assert world.status("preview")["plan"]["perGpu"]["kvPoolBytes"] != before


def test_nothing_is_written_at_rest_nor_for_less_than_a_mebibyte(world) -> None:
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    _measure(world, "first")
    stored = _learned(world)
    world.rest()
    for restart in (False, True):
        if restart:
            world.restart_operator()
        world.pending = world.gatherer.known_keys()
        world.settle()
    assert world.rest() == []
    world.create(SPEC, name="second")
    _measure(world, "second", **_as_known(world, "second", weights=MIB))
    assert _learned(world) == stored, "1 MiB more is not worth a write"
    _measure(world, "second", **_as_known(world, "second", weights=-63 * MIB))
    assert _learned(world) == stored, "and a little less is no news"
    world.rest()
    world.cluster.worker_plans.clear()
    for pod in world.cluster.of(POD):
        world.cluster.remove(POD, "ml", pod["metadata"]["name"])
    world.settle()
    _measure(world, "second", **_as_known(world, "second", weights=2 * MIB))
    assert _learned(world) != stored


def test_a_newer_worker_that_needs_clearly_less_lowers_what_is_known_and_an_older_one_does_not_raise_it(world) -> None:
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    _measure(world, "first", context=3000 * MIB)  # as where another process held a part of the GPU
    high = world.status("first")["plan"]["perGpu"]["overheadBytes"] // 2 + 3000 * MIB
    assert _entries(world)[0].terms["context"] == high
    world.create(SPEC, name="second")
    _measure(world, "second", **_as_known(world, "second", context=-2900 * MIB))
    assert _entries(world)[0].terms["context"] == high - 2900 * MIB
    world.pending = world.gatherer.known_keys()
    world.settle()
    assert _entries(world)[0].terms["context"] == high - 2900 * MIB, "the first still says the same, and is older"


def test_what_was_learned_survives_a_restart_and_its_deletion_measures_anew(world) -> None:
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    _measure(world, "first", weights=700 * MIB)
    stored = _learned(world)
    world.restart_operator()
    assert world.gatherer._shared.learned.to_data() == stored
    world.cluster.remove(CONFIG_MAP, "modelserve-system", CALIBRATION_NAME)
    world.settle()
    assert _learned(world) is not None
    (entry,) = Measurements.from_data(_learned(world) or {}).entries.values()
    (before,) = Measurements.from_data(stored or {}).entries.values()
    assert entry.terms == before.terms


@pytest.mark.parametrize("status", [403, 404])
def test_a_namespace_that_cannot_be_written_stops_nothing(world, caplog, status: int) -> None:
    def refuse(request) -> None:
        if (request.verb, request.name) == ("apply", CALIBRATION_NAME):
            raise KubeError(status, "no")

    world.cluster.asked = refuse
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    _measure(world, "first", weights=700 * MIB)
    assert world.condition("Ready", "first") == ("True", "RolledOut")
    assert "kept in memory only" in caplog.text
    world.create(SPEC, name="second")
    first, second = (world.status(name)["plan"]["perGpu"] for name in ("first", "second"))
    assert second["weightsBytes"] == first["weightsBytes"] + 700 * MIB


def test_a_foreign_config_map_of_that_name_is_left_alone(world, caplog) -> None:
    foreign = {"metadata": {"name": CALIBRATION_NAME, "namespace": "modelserve-system"}, "data": {"x": "theirs"}}
    world.cluster.put(CONFIG_MAP, foreign)
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    _measure(world, "first")
    assert _learned(world) == {"x": "theirs"}
    assert "exists and is not ours" in caplog.text


def test_the_metric_follows_the_status_and_goes_with_the_object(world) -> None:
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    assert _gauge("first", "weights") is None
    _measure(world, "first", weights=700 * MIB)
    weights = world.status("first")["plan"]["perGpu"]["weightsBytes"]
    assert _gauge("first", "weights") == pytest.approx(700 * MIB / weights, abs=1e-4)
    assert _gauge("first", "activation") == pytest.approx(-0.5, abs=1e-4)
    world.cluster.remove(MODEL_SERVE, "ml", "first")
    world.settle()
    assert _gauge("first", "weights") is None


def test_the_cpu_measures_nothing_and_teaches_nothing(ready_world) -> None:
    assert _learned(ready_world) is None


def _entry(number: int, *, namespace: str = "", **terms: int) -> Entry:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
    return Entry(
        namespace=namespace, product=f"GPU-{number}", engine_version="1", model="m", model_uri="hf://a/b",
        dtype="bfloat16", tensor_parallel=1, terms=terms, activation={}, measured_at=at.isoformat(),
    )  # fmt: skip


def test_the_config_map_stays_bounded_and_drops_the_oldest() -> None:
    learned = Measurements().including(_entry(n, weights=5) for n in range(MAX_ENTRIES))
    grown = learned.including([_entry(MAX_ENTRIES, weights=5)])
    assert len(grown.entries) == MAX_ENTRIES
    assert {entry.product for entry in learned.entries.values()} - {e.product for e in grown.entries.values()} == {
        "GPU-0"
    }
    assert sum(map(len, grown.to_data().values())) < 1 << 20


def test_what_a_namespace_measured_drives_nothing_of_others_out_of_the_config_map() -> None:
    shared = Measurements().including(_entry(n, weights=5) for n in range(8))
    crowded = shared.including(_entry(n, namespace="tenant", weights=5) for n in range(8, 8 + 2 * MAX_ENTRIES))
    assert len(crowded.entries) == 8 + MAX_OF_NAMESPACE
    assert shared.entries.items() <= crowded.entries.items()


def test_many_namespaces_of_one_tenant_do_not_drive_out_what_others_learned() -> None:
    everywhere = Measurements().including(_entry(n, weights=5) for n in range(20))
    others = everywhere.including(_entry(n, namespace="other", weights=5) for n in range(20, 40))
    hostile = [_entry(100 + n, namespace=f"mine-{n % 12}", weights=5) for n in range(12 * MAX_OF_NAMESPACE)]
    crowded = others.including(hostile)
    assert len(crowded.entries) == MAX_ENTRIES
    assert others.entries.items() <= crowded.entries.items()
    assert crowded.including(hostile[:3]) is crowded, "what has no room is not written again and again"


def _serve_in(world, namespace: str, name: str) -> None:
    """Another ModelServe of the same shape, in a namespace of its own."""
    body = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": name, "namespace": namespace},
        "spec": SPEC,
    }
    world.cluster.put(MODEL_SERVE, body)
    world.settle()


def _planned_weights(world, namespace: str, name: str) -> int:
    plan = world.cluster.objects[MODEL_SERVE, namespace, name]["status"]["plan"]
    weights: int = plan["perGpu"]["weightsBytes"]
    return weights


def test_what_a_tenants_worker_says_counts_in_its_namespace_alone(world) -> None:
    """The image, and what it answers, are the tenant's own."""
    world.add_node("a", **H200)
    _serve_in(world, "neighbour", "before")
    honest = _planned_weights(world, "neighbour", "before")
    world.create(SPEC, name="first")
    _measure(world, "first", weights=60_000 * MIB)
    _serve_in(world, "neighbour", "after")
    assert _planned_weights(world, "neighbour", "after") == honest
    world.create(SPEC, name="second")
    assert world.status("second")["plan"]["perGpu"]["weightsBytes"] == honest + 60_000 * MIB
    world.restart_operator()
    world.settle()
    _serve_in(world, "neighbour", "later")
    assert _planned_weights(world, "neighbour", "later") == honest


@pytest.mark.parametrize("named", ["ml", "*"])
def test_a_namespace_that_is_trusted_with_it_teaches_all(world, named: str) -> None:
    world.settings = world.settings.model_copy(update={"learn_for_all": (named,)})
    world.restart_operator()
    world.add_node("a", **H200)
    world.create(SPEC, name="first")
    _measure(world, "first", weights=700 * MIB)
    _serve_in(world, "neighbour", "after")
    assert _planned_weights(world, "neighbour", "after") == _planned_weights(world, "ml", "first") + 700 * MIB


def test_what_an_earlier_release_learned_from_anybody_is_measured_anew() -> None:
    document = json.loads(next(iter(Measurements().including([_entry(1, weights=5)]).to_data().values())))
    del document["namespace"]
    assert Measurements.from_data({"key": json.dumps(document)}).entries == {}


def test_an_event_that_our_own_write_overtook_takes_nothing_back() -> None:
    shared = SharedConfig("home")

    def body(version: int, learned: Measurements) -> dict[str, Any]:
        made = shared.calibration_config_map(learned)
        return {**made, "metadata": {**made["metadata"], "resourceVersion": str(version)}}

    one = Measurements().including([_entry(1, weights=5)])
    both = one.including([_entry(2, weights=5)])
    shared.learned = both
    shared.wrote(body(11, both))
    assert not shared.note(CALIBRATION_NAME, body(10, one))
    assert shared.learned == both
    assert shared.note(CALIBRATION_NAME, body(11, both)), "others are told once the cluster has it"
    assert not shared.note(CALIBRATION_NAME, body(11, both))
    assert shared.note(CALIBRATION_NAME, None)
    assert shared.learned == Measurements()


def test_figures_follow_the_newest_worker_and_the_largest_of_those_given_together() -> None:
    def at(second: int, **terms: int) -> Entry:
        return _entry(1, **terms).model_copy(update={"measured_at": f"2026-01-01T00:00:0{second}Z"})

    learned = Measurements().including([at(5, weights=500 * MIB, context=9)])
    for older in (at(4, weights=900 * MIB), at(5, weights=100 * MIB), at(6, weights=437 * MIB)):
        assert learned.including([older]) is learned
    (added,) = learned.including([at(4, nccl=7)]).entries.values()
    assert (added.terms, added.measured_at) == ({"weights": 500 * MIB, "context": 9, "nccl": 7}, at(5).measured_at)
    (lowered,) = learned.including([at(6, weights=100 * MIB), at(6, weights=400 * MIB)]).entries.values()
    assert lowered.terms == {"weights": 400 * MIB, "context": 9}


def test_a_little_less_is_no_news_and_broken_values_are_dropped() -> None:
    learned = Measurements().including([_entry(1, weights=50 * MIB)])
    assert learned.including([_entry(1, weights=20 * MIB)]) is learned
    grown = learned.including([_entry(1, weights=60 * MIB, nccl=3)])
    (entry,) = grown.entries.values()
    assert entry.terms == {"weights": 60 * MIB, "nccl": 3}
    data = grown.to_data()
    broken = {"a": "{", "b": '{"product": "x"}', "c": next(iter(data.values())).replace(str(60 * MIB), "-1")}
    assert Measurements.from_data({**data, **broken}) == grown


def test_a_worker_that_found_too_little_memory_teaches_what_it_measured(world) -> None:
    """The next plan is made with it; a healthy ModelServe of another model keeps its plan and learns nothing."""
    world.add_node("a", **H200)
    world.create(SPEC, name="big")
    world.create({"model": {"uri": "hf://google/gemma-4-E4B-it"}}, name="other")
    world.settle()
    other = world.status("other")["plan"]
    found = {"weights": 62 << 30, "activation": 5 << 30, "context": 9 << 30, "other_processes": 1 << 30}
    message = TerminationMessage(
        reason=TerminationReason.InsufficientMemory, message="too little", shortfallBytes=1, measured=found,
        engineVersion=ENGINE_VERSION,
    ).encode()  # fmt: skip
    pod = next(each for each in world.cluster.of(POD) if each["metadata"]["name"].startswith("big"))
    ended = {"terminated": {"exitCode": TERMINAL_EXIT_CODE, "message": message}}
    world.cluster.set_pod(pod, phase="Running", containerStatuses=[{"name": "worker", "lastState": ended, "state": {}}])
    world.settle()
    assert world.condition("Stalled", "big") == ("True", "InsufficientMemory")
    (entry,) = _entries(world)
    assert entry.terms == {"weights": 62 << 30, "context": 9 << 30}, "what others hold is not the worker's"
    assert list(entry.activation.values()) == [5 << 30]
    assert world.status("other")["plan"] == other
