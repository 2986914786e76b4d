"""spec.gateway: a route and a pool of the Gateway API lead where the Service does, and nothing else waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import DEPLOYMENT, HTTP_ROUTE, INFERENCE_POOL, POD, SERVICE, ResourceKind
from modelserve_operator.cluster.kube import KubeError

PARENT = {"name": "inference-gateway", "namespace": "gateways", "sectionName": "https"}
PICKER = {"name": "gemma-epp", "port": 9002}
PLAIN: dict[str, Any] = {"parentRefs": [PARENT], "hostnames": ["gemma.example.com"]}
PICKED: dict[str, Any] = {**PLAIN, "endpointPicker": PICKER}


@pytest.fixture
def routed(ready_world):
    """A cluster with both kinds, in which one worker is Ready."""
    ready_world.serve(HTTP_ROUTE, INFERENCE_POOL)
    return ready_world


def _says(world, kind: ResourceKind, *states: tuple[str, str, str], generation: int | None = None) -> None:
    """A gateway writes the object's status: (type, status, reason)."""
    (body,) = world.cluster.of(kind)
    seen = body["metadata"].get("generation") if generation is None else generation
    told = [
        {"type": each, "status": text, "reason": reason, "message": "words", "observedGeneration": seen}
        for each, text, reason in states
    ]
    parents = [{"parentRef": PARENT, "controllerName": "example.com/gateway", "conditions": told}]
    world.cluster.change(kind, body["metadata"]["name"], lambda each: each.update(status={"parents": parents}))
    world.settle()


def test_there_is_no_route_unless_the_spec_asks(routed) -> None:
    assert routed.cluster.of(HTTP_ROUTE) == routed.cluster.of(INFERENCE_POOL) == []
    assert routed.condition("Routed") is None


def test_without_a_picker_the_route_leads_to_the_service(routed) -> None:
    routed.edit("tiny", gateway=PLAIN)
    (route,), (service,) = routed.cluster.of(HTTP_ROUTE), routed.cluster.of(SERVICE)
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("Service", service["metadata"]["name"])
    assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}
    (parent,) = route["spec"]["parentRefs"]
    assert PARENT.items() <= parent.items()
    assert route["spec"]["hostnames"] == PLAIN["hostnames"]
    assert routed.cluster.of(INFERENCE_POOL) == []
    assert route["metadata"]["ownerReferences"][0]["kind"] == "ModelServe"


def test_with_a_picker_it_leads_to_a_pool_of_the_workers_that_the_service_selects(routed) -> None:
    routed.edit("tiny", gateway=PICKED)
    (route,), (pool,), (service,) = (routed.cluster.of(kind) for kind in (HTTP_ROUTE, INFERENCE_POOL, SERVICE))
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"]) == (
        INFERENCE_POOL.group,
        "InferencePool",
        pool["metadata"]["name"],
    )
    assert pool["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (worker,) = [pod for pod in routed.cluster.of(POD) if pod["metadata"]["labels"].get(labels.PLAN_HASH)]
    assert pool["spec"]["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
    assert worker["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm", "whose names our metrics have"
    ports = routed.cluster.of(DEPLOYMENT)[0]["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": ports[0]["containerPort"]}]
    reference = pool["spec"]["endpointPickerRef"]
    assert (reference["name"], reference["port"]["number"], reference["failureMode"]) == (
        "gemma-epp",
        9002,
        "FailClose",
    )


def test_a_pool_follows_the_service_to_the_next_revision(routed) -> None:
    routed.edit("tiny", gateway=PICKED)
    before = routed.cluster.of(INFERENCE_POOL)[0]["spec"]["selector"]["matchLabels"]
    routed.edit("tiny", context={"maxModelLen": 1024})
    routed.make_ready()
    routed.make_ready()
    (pool,), (service,) = routed.cluster.of(INFERENCE_POOL), routed.cluster.of(SERVICE)
    assert pool["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] != before


def test_asking_and_no_longer_asking_starts_no_pod_and_leaves_no_object(routed) -> None:
    revision, pods = routed.status()["revision"], {each["metadata"]["uid"] for each in routed.cluster.of(POD)}
    routed.edit("tiny", gateway=PICKED)
    routed.rest()
    routed.restart_operator()
    routed.settle()
    assert routed.rest() == [], "nothing is written at rest"
    routed.edit("tiny", gateway=PLAIN)
    assert routed.cluster.of(INFERENCE_POOL) == []
    assert len(routed.cluster.of(HTTP_ROUTE)) == 1
    routed.edit("tiny", gateway=None)
    assert routed.cluster.of(HTTP_ROUTE) == []
    assert routed.condition("Routed") is None
    assert routed.status()["revision"] == revision
    assert {each["metadata"]["uid"] for each in routed.cluster.of(POD)} == pods


def test_what_gateways_say_of_it_is_told(routed) -> None:
    routed.edit("tiny", gateway=PICKED)
    assert routed.condition("Routed") == ("Unknown", "RouteNotTakenUp")
    _says(routed, HTTP_ROUTE, ("Accepted", "True", "Accepted"), ("ResolvedRefs", "True", "ResolvedRefs"))
    assert routed.condition("Routed") == ("True", "RouteAccepted")
    _says(routed, INFERENCE_POOL, ("ResolvedRefs", "False", "InvalidExtensionRef"))
    assert routed.condition("Routed") == ("False", "RouteNotAccepted")
    assert routed.condition("Ready") == ("True", "RolledOut")
    _says(routed, INFERENCE_POOL, ("ResolvedRefs", "True", "ResolvedRefs"))
    _says(routed, HTTP_ROUTE, ("Accepted", "False", "NoMatchingListenerHostname"))
    assert routed.condition("Routed") == ("False", "RouteNotAccepted")


def test_what_was_said_of_an_earlier_route_does_not_count(routed) -> None:
    routed.edit("tiny", gateway=PLAIN)
    _says(routed, HTTP_ROUTE, ("Accepted", "True", "Accepted"), generation=-1)
    assert routed.condition("Routed") == ("Unknown", "RouteNotTakenUp")


@pytest.mark.parametrize("served", [(), (HTTP_ROUTE,)])
def test_a_cluster_without_the_kinds_says_so_and_serves(ready_world, served: tuple[ResourceKind, ...]) -> None:
    if served:
        ready_world.serve(*served)
    ready_world.edit("tiny", gateway=PICKED)
    assert ready_world.condition("Routed") == ("False", "GatewayNotServed")
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert ready_world.served_hash()


def test_a_route_is_not_led_to_a_pool_that_cannot_be(ready_world) -> None:
    ready_world.serve(HTTP_ROUTE)
    ready_world.edit("tiny", gateway=PLAIN)
    ready_world.edit("tiny", gateway=PICKED)
    assert ready_world.condition("Routed") == ("False", "GatewayNotServed")
    (route,) = ready_world.cluster.of(HTTP_ROUTE)
    assert route["spec"]["rules"][0]["backendRefs"][0]["kind"] == "Service", "where requests are answered"


def test_workers_that_a_pool_still_selects_stay(routed) -> None:
    """As those do that the Service still selects: whoever comes through the gateway has nobody else."""
    routed.edit("tiny", gateway=PICKED)
    before = routed.served_hash()

    def refuse(kind: ResourceKind, _: dict[str, Any]) -> None:
        if kind is INFERENCE_POOL:
            raise KubeError(403, "inferencepools.inference.networking.k8s.io is forbidden")

    routed.cluster.admission = refuse
    routed.edit("tiny", context={"maxModelLen": 1024})
    routed.make_ready()
    routed.make_ready()
    assert routed.served_hash() != before
    (pool,) = routed.cluster.of(INFERENCE_POOL)
    selected = pool["spec"]["selector"]["matchLabels"]
    assert [pod for pod in routed.cluster.of(POD) if selected.items() <= pod["metadata"]["labels"].items()]
    assert routed.condition("Routed") == ("False", "RouteRefused")
    routed.cluster.admission = None
    routed.pass_time(61)
    (pool,) = routed.cluster.of(INFERENCE_POOL)
    assert pool["spec"]["selector"]["matchLabels"][labels.PLAN_HASH] == routed.served_hash()
    assert [each["spec"]["replicas"] for each in routed.cluster.of(DEPLOYMENT) if each["spec"]["replicas"]] == [1]


def test_a_refused_route_is_tried_again_and_hurts_nothing(routed) -> None:
    def refuse(kind: ResourceKind, _: dict[str, Any]) -> None:
        if kind is HTTP_ROUTE:
            raise KubeError(403, "httproutes.gateway.networking.k8s.io is forbidden")

    routed.cluster.admission = refuse
    routed.edit("tiny", gateway=PLAIN, context={"maxModelLen": 1024})
    routed.make_ready()
    routed.make_ready()
    assert routed.condition("Routed") == ("False", "RouteRefused")
    assert routed.condition("Ready") == ("True", "RolledOut")
    routed.cluster.admission = None
    routed.pass_time(61)
    assert routed.condition("Routed") == ("Unknown", "RouteNotTakenUp")


def test_somebody_elses_route_of_the_name_is_left_alone(routed) -> None:
    theirs = {"metadata": {"name": "tiny", "namespace": "ml"}, "spec": {"hostnames": ["theirs.example.com"]}}
    routed.cluster.put(HTTP_ROUTE, theirs)
    routed.edit("tiny", gateway=PLAIN)
    assert routed.condition("Routed") == ("False", "RouteRefused")
    assert routed.condition("Ready") == ("True", "RolledOut")
    routed.edit("tiny", gateway=None)
    assert routed.cluster.of(HTTP_ROUTE)[0]["spec"] == theirs["spec"]
