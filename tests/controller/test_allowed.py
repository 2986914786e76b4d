"""What an installation does not allow a namespace is refused whole, by field and value; what runs stays as it is."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from modelserve.api import ModelServe
from modelserve.errors import InvalidInput
from modelserve_operator.allowed import AllowRule, not_allowed
from modelserve_operator.cluster.kinds import (
    CAPACITY_BUFFER,
    CLAIM,
    DEPLOYMENT,
    HTTP_ROUTE,
    MODEL_SERVE,
    POD,
    POD_TEMPLATE,
    SERVICE,
)
from modelserve_operator.cluster.store import key_of
from modelserve_operator.settings import Settings, from_environment
from modelserve_operator.webhook.preview import preview

GATEWAY = {"parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["gemma.example.com"]}
RULES = (
    AllowRule(
        namespaces=("ml", "team-*"),
        replicas=4,
        buffer_replicas=2,
        gateways=("gateways/public", "own"),
        hostnames=("*.example.com", "gemma.test"),
        images=("registry.example/modelserve/*", "*.mirror.test/worker:*"),
        priority_classes=("serving-*",),
        service_accounts=("workers",),
    ),
)


def _told(namespace: str = "ml", rules: tuple[AllowRule, ...] = RULES, **spec: Any) -> str | None:
    body = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": "any", "namespace": namespace},
        "spec": {"model": {"uri": "hf://google/gemma-4-E4B-it"}, **spec},
    }
    return not_allowed(ModelServe.parse(body).spec, namespace, rules)


def _gateway(**fields: Any) -> dict[str, Any]:
    return {"gateway": {**GATEWAY, **fields}}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"replicas": 4, "capacityBuffer": {"replicas": 2}},
        {"capacityBuffer": {"limits": {"nvidia.com/gpu": "4"}}},
        _gateway(),
        _gateway(parentRefs=[{"name": "own"}], hostnames=["*.a.example.com", "gemma.test"]),
        {"image": "registry.example/modelserve/worker@sha256:" + "a" * 64},
        {"image": "eu.mirror.test/worker:0.2.0"},
        {"pod": {"priorityClassName": "serving-high", "serviceAccountName": "workers"}},
    ],
)
def test_what_is_allowed_is(spec: dict[str, Any]) -> None:
    assert _told(**spec) is None
    assert _told("team-a", **spec) is None


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"replicas": 5}, "spec.replicas is 5; in namespace ml this installation allows 4 at most."),
        ({"capacityBuffer": {"replicas": 3}}, "spec.capacityBuffer.replicas is 3; .* allows 2 at most."),
        (
            _gateway(parentRefs=[{"name": "public"}]),
            r"parentRefs\[0\] is ml/public; .* allows gateways/public, ml/own.",
        ),
        (_gateway(parentRefs=[{"name": "own", "namespace": "other"}]), r"parentRefs\[0\] is other/own;"),
        (
            _gateway(hostnames=["a.example.com", "bank.test"]),
            r"hostnames\[1\] is bank.test; .* \*.example.com, gemma.test",
        ),
        (_gateway(hostnames=["example.com"]), r"hostnames\[0\] is example.com;"),
        (_gateway(hostnames=["evilexample.com"]), r"hostnames\[0\] is evilexample.com;"),
        (_gateway(hostnames=["*.test"]), r"hostnames\[0\] is \*.test;"),
        (_gateway(hostnames=[]), "hostnames is left out, which means all of the listeners'"),
        ({"image": "registry.example.evil/modelserve/worker:1"}, "spec.image is registry.example.evil/modelserve"),
        ({"image": "evil.test/eu.mirror.test/worker:1"}, "spec.image is evil.test/eu.mirror.test/worker:1"),
        ({"pod": {"priorityClassName": "system-node-critical"}}, "priorityClassName is .* allows serving-\\*"),
        ({"pod": {"serviceAccountName": "builder"}}, "serviceAccountName is builder; .* allows workers"),
    ],
)
def test_what_is_not_is_told_by_field_value_limit_and_remedy(spec: dict[str, Any], says: str) -> None:
    told = _told(**spec)
    assert told is not None
    assert "the chart's value allowed" in told
    assert re.search(says, told), told


def test_a_namespace_that_no_rule_names_may_have_none_of_it() -> None:
    assert _told("elsewhere") is None
    for spec in (_gateway(), {"image": "registry.example/modelserve/worker:1"}, {"capacityBuffer": {"replicas": 1}}):
        assert _told("elsewhere", **spec) is not None
    assert _told("elsewhere", capacityBuffer={"limits": {"cpu": "1"}}) is not None


def test_without_rules_all_is_allowed_but_a_typo() -> None:
    rules = Settings().allowed
    everything = {**_gateway(hostnames=[]), "image": "a/b:c", "capacityBuffer": {"replicas": 100}, "replicas": 10_000}
    assert _told(rules=rules, pod={"priorityClassName": "system-node-critical"}, **everything) is None
    assert _told(rules=rules, capacityBuffer={"replicas": 1 << 20}) is not None
    assert _told(rules=rules, replicas=1 << 20) is not None


def test_the_setting_is_read_as_the_chart_writes_it() -> None:
    text = '[{"namespaces": ["a"], "bufferReplicas": 0, "gateways": []}, {"namespaces": ["*"]}]'
    first, rest = from_environment({"MODELSERVE_ALLOWED": text}).allowed
    assert (first.gateways, first.images, rest.gateways) == ((), ("*",), ("*",))
    for wrong in (
        "[]",
        '[{"namespaces": []}]',
        '[{"namespaces": ["a"], "hostname": ["x"]}]',
        "{",
        '[{"images": ["*"]}]',
    ):
        with pytest.raises(InvalidInput, match="MODELSERVE_ALLOWED"):
            from_environment({"MODELSERVE_ALLOWED": wrong})


def test_a_new_one_is_refused_whole(world, tiny_spec) -> None:
    world.settings = world.settings.model_copy(update={"allowed": RULES})
    world.restart_operator()
    world.create({**tiny_spec, **_gateway(hostnames=["bank.test"]), "capacityBuffer": {"replicas": 1}})
    assert world.condition("Accepted") == ("False", "NotAllowed")
    assert world.condition("Stalled") == ("True", "NotAllowed")
    made = [kind for kind, *_ in world.cluster.objects if kind not in (MODEL_SERVE, CLAIM)]
    assert made == [], "nothing is half applied"
    world.edit(**_gateway(), capacityBuffer=None)
    assert world.condition("Accepted") == ("True", "Valid")


def test_a_rule_that_comes_later_ends_nothing_that_runs(ready_world) -> None:
    world = ready_world
    for kind in (HTTP_ROUTE, CAPACITY_BUFFER, POD_TEMPLATE):
        world.cluster.refused_kinds.pop(kind)
    world.restart_operator()
    world.edit(**_gateway(hostnames=["bank.test"]), capacityBuffer={"replicas": 3}, replicas=2)
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    kept = (DEPLOYMENT, SERVICE, POD, HTTP_ROUTE, CAPACITY_BUFFER)
    before = {kind: world.cluster.of(kind) for kind in kept}
    assert all(before.values())
    world.settings = world.settings.model_copy(update={"allowed": RULES})
    world.restart_operator()
    world.settle()
    assert world.condition("Accepted") == ("False", "NotAllowed")
    assert world.condition("Available") == ("True", "Serving")
    assert {kind: world.cluster.of(kind) for kind in kept} == before
    lost = world.cluster.of(POD)[0]
    world.cluster.remove(POD, *key_of(lost))
    world.cluster.run_controllers()
    world.settle()
    world.make_ready()
    assert len(world.cluster.of(POD)) == 2, "and a worker that is lost comes back"
    world.edit(**_gateway(), capacityBuffer={"replicas": 2})
    assert world.condition("Accepted") == ("True", "Valid")
    (route,), (buffer,) = world.cluster.of(HTTP_ROUTE), world.cluster.of(CAPACITY_BUFFER)
    assert (route["spec"]["hostnames"], buffer["spec"]["replicas"]) == (["gemma.example.com"], 2)


def test_the_preview_at_apply_says_so(ready_world) -> None:
    world = ready_world
    world.edit(**_gateway(hostnames=["bank.test"]))
    (key,) = world.gatherer.known_keys()
    observed = asyncio.run(world.gatherer.observe(key))
    told = list(preview(observed, None, world.settings.model_copy(update={"allowed": RULES})))
    assert len(told) == 1
    assert told[0].startswith("Accepted, and not served: spec.gateway.hostnames[0] is bank.test;")
