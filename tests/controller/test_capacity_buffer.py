"""spec.capacityBuffer: an autoscaler is asked for room of the planned shape, and what it says stands in the status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CAPACITY_BUFFER,
    CAPACITY_BUFFER_ALPHA,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    MODEL_SERVE,
    POD,
    POD_TEMPLATE,
    SERVICE,
    ResourceKind,
)
from modelserve_operator.cluster.kube import KubeError

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
ASKED = {"replicas": 1}


@pytest.fixture
def served(world):
    """A cluster with CapacityBuffers, in which one worker on an H200 is Ready."""
    world.serve(POD_TEMPLATE, CAPACITY_BUFFER)
    return _serving(world)


def _serving(world):
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": MODEL, "pod": {"labels": {"team": "chat", "kueue.x-k8s.io/queue-name": "gpus"}}}, name="big")
    world.make_ready()
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    return world


def _says(world, *states: tuple[str, str, str], **status: Any) -> None:
    """The autoscaler writes the buffer's status: (type, status, message)."""
    told = [{"type": kind, "status": text, "reason": "Because", "message": words} for kind, text, words in states]
    (body,) = world.cluster.of(CAPACITY_BUFFER)
    name = body["metadata"]["name"]
    world.cluster.change(CAPACITY_BUFFER, name, lambda each: each.update(status={"conditions": told, **status}))
    world.settle()


def test_there_is_none_unless_the_spec_asks(served) -> None:
    assert served.cluster.of(CAPACITY_BUFFER) == served.cluster.of(POD_TEMPLATE) == []
    assert served.condition("CapacityBuffered", "big") is None


def test_the_template_has_the_shape_of_a_worker_and_is_taken_for_none(served) -> None:
    served.edit("big", capacityBuffer=ASKED)
    (buffer,), (template,) = served.cluster.of(CAPACITY_BUFFER), served.cluster.of(POD_TEMPLATE)
    assert buffer["spec"] == {
        "provisioningStrategy": "buffer.x-k8s.io/active-capacity",
        "podTemplateRef": {"name": template["metadata"]["name"]},
        "replicas": 1,
    }
    worker = served.cluster.of(DEPLOYMENT)[0]["spec"]["template"]["spec"]
    placeholder = template["template"]["spec"]
    for field in ("affinity", "tolerations", "securityContext"):
        assert placeholder[field] == worker[field]
    (mine,), (its,) = placeholder["containers"], worker["containers"]
    assert mine["resources"]["limits"] == its["resources"]["limits"]
    assert mine["resources"]["requests"]["nvidia.com/gpu"] == "1", "of a PodTemplate no server makes requests of limits"
    assert template["template"]["metadata"]["labels"] == {"team": "chat"}, "no queue, and none of our labels"
    selectors = [
        served.cluster.of(SERVICE)[0]["spec"]["selector"],
        served.cluster.of(DISRUPTION_BUDGET)[0]["spec"]["selector"]["matchLabels"],
    ]
    assert all(not each.items() <= {"team": "chat"}.items() for each in selectors)
    assert all(
        reference["kind"] == "ModelServe"
        for each in (buffer, template)
        for reference in each["metadata"]["ownerReferences"]
    )


def test_limits_alone_are_a_size(served) -> None:
    suspended = "buffer.gke.io/standby-capacity"
    served.edit("big", capacityBuffer={"limits": {"nvidia.com/gpu": "4"}, "provisioningStrategy": suspended})
    (buffer,) = served.cluster.of(CAPACITY_BUFFER)
    assert buffer["spec"]["limits"] == {"nvidia.com/gpu": "4"}
    assert buffer["spec"]["replicas"] == 100, "whatever fits, but not more than the installation allows one"
    assert buffer["spec"]["provisioningStrategy"] == suspended


def test_it_starts_no_pod_and_makes_no_revision(served) -> None:
    before, pods = served.status("big")["revision"], {each["metadata"]["uid"] for each in served.cluster.of(POD)}
    served.edit("big", capacityBuffer=ASKED)
    assert served.status("big")["revision"] == before
    assert {each["metadata"]["uid"] for each in served.cluster.of(POD)} == pods
    assert served.condition("Ready", "big") == ("True", "RolledOut")
    served.rest()
    served.restart_operator()
    served.settle()
    assert served.rest() == [], "nothing is written at rest"


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        ((), ("Unknown", "BufferNotTakenUp")),
        ((("ReadyForProvisioning", "True", ""),), ("Unknown", "BufferProvisioning")),
        ((("ReadyForProvisioning", "False", "no template"),), ("False", "BufferNotReady")),
        (
            (("ReadyForProvisioning", "True", ""), ("Provisioning", "False", "1/1 need a node")),
            ("False", "BufferProvisioning"),
        ),
        (
            (("ReadyForProvisioning", "True", ""), ("Provisioning", "True", "all fit")),
            ("True", "BufferProvisioned"),
        ),
        (
            (
                ("ReadyForProvisioning", "True", ""),
                ("Provisioning", "True", ""),
                ("LimitedByQuotas", "True", "from 3 to 1 due to quotas: gpus"),
            ),
            ("False", "LimitedByQuotas"),
        ),
        (
            (("ReadyForProvisioning", "True", ""), ("Provisioning", "True", ""), ("LimitedByQuotas", "False", "")),
            ("True", "BufferProvisioned"),
        ),
    ],
)
def test_what_the_autoscaler_says_is_shown(
    served, states: tuple[tuple[str, str, str], ...], shown: tuple[str, str]
) -> None:
    served.edit("big", capacityBuffer=ASKED)
    _says(served, *states, replicas=1)
    assert served.condition("CapacityBuffered", "big") == shown
    assert all(words in served.message("CapacityBuffered", "big") for _, _, words in states[-1:])
    assert served.condition("Ready", "big") == ("True", "RolledOut"), "what serves does not depend on it"
    assert served.condition("Reconciling", "big") is None


def test_where_only_the_older_version_is_served_that_is_written(world) -> None:
    world.serve(POD_TEMPLATE, CAPACITY_BUFFER_ALPHA)
    _serving(world).edit("big", capacityBuffer=ASKED)
    (buffer,) = world.cluster.of(CAPACITY_BUFFER_ALPHA)
    assert buffer["spec"]["replicas"] == 1
    assert world.cluster.of(CAPACITY_BUFFER) == []


def test_where_both_are_served_the_older_one_is_left_alone(world) -> None:
    world.serve(POD_TEMPLATE, CAPACITY_BUFFER, CAPACITY_BUFFER_ALPHA)
    assert CAPACITY_BUFFER_ALPHA in world.gatherer.absent, "else it would be watched"
    _serving(world).edit("big", capacityBuffer=ASKED)
    assert len(world.cluster.of(CAPACITY_BUFFER)) == 1
    assert world.cluster.of(CAPACITY_BUFFER_ALPHA) == []


@pytest.mark.parametrize("kinds", [(), (CAPACITY_BUFFER,), (POD_TEMPLATE,)])
def test_a_cluster_without_the_api_is_said_and_hurts_nothing(world, kinds: tuple[ResourceKind, ...]) -> None:
    world.serve(*kinds)
    _serving(world).edit("big", capacityBuffer=ASKED)
    assert world.condition("CapacityBuffered", "big") == ("False", "BufferNotServed")
    assert world.condition("Ready", "big") == ("True", "RolledOut")


def test_it_goes_with_the_field(served) -> None:
    served.edit("big", capacityBuffer=ASKED)
    assert served.cluster.of(CAPACITY_BUFFER)
    served.edit("big", capacityBuffer=None)
    assert served.cluster.of(CAPACITY_BUFFER) == served.cluster.of(POD_TEMPLATE) == []
    assert served.condition("CapacityBuffered", "big") is None
    assert served.condition("Ready", "big") == ("True", "RolledOut")


def test_it_stays_while_replicas_are_zero(served) -> None:
    served.edit("big", capacityBuffer=ASKED, replicas=0)
    assert len(served.cluster.of(CAPACITY_BUFFER)) == 1, "the node that the first worker will need stays warm"


def test_there_is_none_before_a_worker_of_the_plan_was_ready(world) -> None:
    """Else the first attempt of what fails for ever bought room for more of it."""
    world.serve(POD_TEMPLATE, CAPACITY_BUFFER)
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": MODEL, "capacityBuffer": ASKED}, name="big")
    assert world.cluster.of(CAPACITY_BUFFER) == []
    assert world.condition("CapacityBuffered", "big") == ("False", "BufferWithheld")
    world.make_ready()
    assert len(world.cluster.of(CAPACITY_BUFFER)) == 1


def test_a_new_plan_changes_the_shape_once_a_worker_of_it_is_ready(served) -> None:
    served.edit("big", capacityBuffer=ASKED)
    (before,) = served.cluster.of(POD_TEMPLATE)
    served.edit("big", parallelism={"tensor": 2})
    assert served.cluster.of(POD_TEMPLATE) == [before]
    served.make_ready()
    (after,) = served.cluster.of(POD_TEMPLATE)
    assert after["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_a_worker_that_fails_buys_no_room_for_another(served) -> None:
    served.edit("big", capacityBuffer=ASKED, replicas=2)
    told = json.dumps({"reason": "InvalidCheckpoint", "message": "layer 3 is missing."})
    failed = [{"name": "worker", "state": {}, "lastState": {"terminated": {"exitCode": 78, "message": told}}}]

    def fail() -> None:
        for pod in served.cluster.of(POD):
            if not any(each["status"] == "True" for each in pod["status"].get("conditions", ())):
                served.cluster.set_pod(pod, phase="Running", containerStatuses=failed)
        served.settle()

    fail()
    assert served.cluster.of(CAPACITY_BUFFER) == []
    assert served.condition("CapacityBuffered", "big") == ("False", "BufferWithheld")
    served.pass_time(61)
    assert len(served.cluster.of(POD)) == 2, "the attempt"
    assert served.cluster.of(CAPACITY_BUFFER) == [], "an attempt buys one node and no more"
    served.make_ready()
    assert len(served.cluster.of(CAPACITY_BUFFER)) == 1


def test_somebody_elses_buffer_of_the_name_is_left_alone(served) -> None:
    theirs = {"metadata": {"name": "big", "namespace": "ml"}, "spec": {"replicas": 7}}
    served.cluster.put(CAPACITY_BUFFER, theirs)
    served.edit("big", capacityBuffer=ASKED)
    assert served.condition("CapacityBuffered", "big") == ("False", "BufferRefused")
    assert "not ours" in served.message("CapacityBuffered", "big")
    assert served.cluster.of(CAPACITY_BUFFER)[0]["spec"] == {"replicas": 7}
    assert served.condition("Ready", "big") == ("True", "RolledOut")
    served.edit("big", capacityBuffer=None)
    assert served.cluster.of(CAPACITY_BUFFER)[0]["spec"] == {"replicas": 7}


def test_one_that_an_earlier_namesake_left_is_taken_over(served) -> None:
    served.edit("big", capacityBuffer=ASKED)
    uids = [each["metadata"]["uid"] for kind in (CAPACITY_BUFFER, POD_TEMPLATE) for each in served.cluster.of(kind)]
    spec = served.cluster.objects[MODEL_SERVE, "ml", "big"]["spec"]
    for kind, namespace, name in tuple(served.cluster.objects):
        if kind.owned:
            orphaned = served.cluster.objects[kind, namespace, name]["metadata"]
            orphaned.pop("ownerReferences", None)
    served.cluster.remove(MODEL_SERVE, "ml", "big")
    served.restart_operator()
    served.create(spec, name="big")
    now = [each["metadata"]["uid"] for kind in (CAPACITY_BUFFER, POD_TEMPLATE) for each in served.cluster.of(kind)]
    assert now == uids
    assert served.condition("CapacityBuffered", "big") == ("Unknown", "BufferNotTakenUp")


def test_a_refused_write_is_tried_again_and_hurts_nothing(served) -> None:
    def refuse(kind: ResourceKind, _: dict[str, Any]) -> None:
        if kind is CAPACITY_BUFFER:
            raise KubeError(403, "capacitybuffers.autoscaling.x-k8s.io is forbidden")

    served.cluster.admission = refuse
    served.edit("big", capacityBuffer=ASKED, replicas=2)
    assert served.condition("CapacityBuffered", "big") == ("False", "BufferRefused")
    assert served.condition("Stalled", "big") is None
    assert list(served.deployments().values()) == [2], "the rest is done"
    served.cluster.admission = None
    served.pass_time(61)
    assert served.condition("CapacityBuffered", "big") == ("Unknown", "BufferNotTakenUp")


def test_a_gated_pod_of_a_queue_waits_for_quota(served) -> None:
    """Kueue's webhook puts its gate on pods with the label; Kubernetes says SchedulingGated whatever the gate."""
    served.edit("big", replicas=2)
    (pod,) = [each for each in served.cluster.of(POD) if not each["status"].get("conditions")]
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus", "labels of the spec come through"
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    served.cluster.change(POD, pod["metadata"]["name"], lambda body: body["spec"].update(schedulingGates=gates))
    state = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}
    served.cluster.set_pod(pod, phase="Pending", conditions=[state])
    served.settle()
    assert served.condition("CapacityAvailable", "big") == ("False", "WaitingForQuota")
    assert "queue gpus" in served.message("CapacityAvailable", "big")
    assert served.condition("Stalled", "big") is None
    assert served.condition("Available", "big") == ("True", "Serving")
    gates[0]["name"] = "example.com/other"
    served.cluster.change(POD, pod["metadata"]["name"], lambda body: body["spec"].update(schedulingGates=gates))
    served.settle()
    assert served.condition("CapacityAvailable", "big") == ("False", "SchedulingGated")
    assert labels.KUEUE == "kueue.x-k8s.io/"
