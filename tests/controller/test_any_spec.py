"""Whatever a spec says, it is settled or refused with a field and a reason: no traceback, no write that repeats.

MODELSERVE_SPECS=2000 asks for more of them.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest
from random_specs import RandomSpecs

from modelserve.model.model_facts import ModelFacts
from modelserve_operator.cluster.kinds import JOB, MODEL_SERVE

COUNT = int(os.environ.get("MODELSERVE_SPECS", "200"))
SETTLED = {"Accepted", "Planned", "Available"}


def _create(world, spec: Any, *, name: str = "any") -> None:
    """As the API server stores it where an older schema let it through: as it is, and never without a generation."""
    world.cluster.put(
        MODEL_SERVE,
        {
            "apiVersion": "serving.modelserve.dev/v1alpha1",
            "kind": "ModelServe",
            "metadata": {"name": name, "namespace": "ml"},
            "spec": spec,
        },
    )


def _few_pods(spec: Any) -> Any:
    """The cluster of these tests makes every pod that is asked for."""
    replicas = spec.get("replicas") if isinstance(spec, dict) else None
    many = isinstance(replicas, int) and 3 < replicas <= 1 << 20
    return {**spec, "replicas": 3} if many else spec


def _answer_inspection(world, facts: ModelFacts) -> None:
    if any(not world.cluster.pods_of(job) or _running(world, job) for job in world.cluster.of(JOB)):
        world.cluster.end_job(message=facts.model_dump_json(by_alias=True))
        world.settle()


def _running(world, job: dict[str, Any]) -> bool:
    return not (job.get("status") or {}).get("conditions")


def _refusal(world) -> tuple[str, str] | None:
    """Reason and message of Accepted, where it is False."""
    found = next(each for each in world.status("any")["conditions"] if each["type"] == "Accepted")
    return (found["reason"], found["message"]) if found["status"] == "False" else None


@pytest.mark.parametrize("first", range(0, COUNT, 50))
def test_any_spec_is_settled_or_refused_by_field(
    first: int, world, tiny_facts: ModelFacts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    world.add_node("h200", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.add_node("l4", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    world.create({"model": {"uri": "hf://google/gemma-4-E2B-it"}}, name="bystander")
    bystander = json.dumps(world.status("bystander"))
    specs = RandomSpecs(first)
    for number in range(first, first + 50):
        spec = _few_pods(specs.any())
        shown = f"spec {number}: {json.dumps(spec)[:2000]}"
        try:
            _create(world, spec)
            world.settle()
            _answer_inspection(world, tiny_facts)
        except Exception as error:
            raise AssertionError(shown) from error
        status = world.status("any")
        conditions = {each["type"]: each for each in status["conditions"]}
        assert conditions.keys() >= SETTLED, shown
        assert status["observedGeneration"] == 1, shown
        assert all(each["reason"] and each["message"] for each in conditions.values()), shown
        refused = _refusal(world)
        if refused is not None:
            assert conditions["Stalled"]["status"] == "True", shown
            assert _names_a_field(refused[1]), f"{shown}: {refused}"
        world.rest()
        world.pending = {key for key in world.gatherer.known_keys() if key.name == "any"}
        world.settle()
        assert world.rest() == [], f"{shown}: at rest nothing is written"
        assert json.dumps(world.status("bystander")) == bystander, shown
        world.cluster.remove(MODEL_SERVE, "ml", "any")
        world.settle()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


def _names_a_field(message: str) -> bool:
    """The field that is wrong, or the claim or the weights that the spec is at odds with."""
    return message.startswith(("spec.", "spec: ", "drafter.uri ", "claim ", "the weights are stored as "))


def _with_memory(limit: str) -> dict[str, Any]:
    resources = {"limits": {"memory": limit}}
    uri = "hf://google/gemma-4-E2B-it"
    return {"model": {"uri": uri}, "accelerators": {"products": ["CPU"]}, "pod": {"resources": resources}}


@pytest.mark.parametrize("limit", ["512Ki", "0", "0.0001"])
def test_too_little_memory_does_not_fit(limit: str, world) -> None:
    _create(world, _with_memory(limit))
    world.settle()
    assert world.condition("Planned", "any") == ("False", "DoesNotFit")


@pytest.mark.parametrize("limit", ["9999999999999999E", "99999999999999999999"])
def test_more_memory_than_there_is_is_refused_by_field(limit: str, world) -> None:
    _create(world, _with_memory(limit))
    world.settle()
    assert world.condition("Accepted", "any") == ("False", "InvalidSpec")
    assert world.message("Accepted", "any").startswith(f"spec.pod.resources.limits.memory: {limit} is above 8Pi")


@pytest.mark.parametrize(("price", "reason"), [("9999999999", "PlanPreviewed"), ("99999999999", "Blocked")])
def test_the_highest_price_is_one_whose_cost_can_be_told(price: str, reason: str, world) -> None:
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    accelerators = {"products": ["NVIDIA-H200"], "costPerHour": {"NVIDIA-H200": price}}
    model, parallelism = {"uri": "hf://google/gemma-4-E2B-it"}, {"tensor": 8}
    _create(
        world,
        {"model": model, "accelerators": accelerators, "parallelism": parallelism, "plan": {"mode": "PreviewOnly"}},
    )
    world.settle()
    planned = world.condition("Planned", "any")
    assert planned is not None
    assert planned[1] == reason
    assert reason != "Blocked" or world.message("Accepted", "any").startswith("spec.accelerators.costPerHour.")


@pytest.mark.parametrize(
    "spec",
    [
        {"model": "hf://google/gemma-4-E2B-it"},
        {"model": {"uri": ["pvc://weights"]}, "storage": "weights"},
        {"model": {"uri": "pvc://../../secrets"}},
        {"model": {"uri": "hf://own/model"}, "accelerators": {"products": [{}, 5]}},
        "a spec",
        None,
    ],
)
async def test_what_is_read_before_validation_may_be_anything(spec: Any, world) -> None:
    _create(world, spec)
    observed = await world.gatherer.observe(next(iter(world.gatherer.known_keys())))
    assert observed is not None
    assert observed.claim_modes == {}
