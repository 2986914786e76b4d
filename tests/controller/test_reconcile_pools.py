"""What nodes do to plans: placement, proposals, waiting and the impossible."""

from __future__ import annotations

from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, DEPLOYMENT, MODEL_SERVE, NODE, POD, SERVICE

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 8}
L4 = {"product": "NVIDIA-L4", "memory_mib": 23_034, "gpus": 1}


def _terms(world) -> list[Any]:
    (deployment,) = world.cluster.of(DEPLOYMENT)
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms: list[Any] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return terms


def test_a_published_model_needs_no_inspection_and_lands_on_its_pool(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    plan = world.status("big")["plan"]
    assert plan["accelerator"] == "NVIDIA-H200"
    (deployment,) = world.cluster.of(DEPLOYMENT)
    worker = deployment["spec"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(plan["gpusPerReplica"])
    assert _terms(world) == [
        {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200"]}]}
    ]
    world.make_ready()
    assert world.condition("Ready", "big") == ("True", "RolledOut")


def test_relabelled_nodes_only_propose(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.make_ready()
    committed, pods = world.shown_plan("big"), {pod["metadata"]["uid"] for pod in world.cluster.of(POD)}
    world.rest()
    world.add_node("a", product="NVIDIA-H100-80GB-HBM3", memory_mib=81_559, gpus=8)
    status = world.status("big")
    assert world.shown_plan("big") == committed
    assert status["proposedPlan"]["accelerator"] == "NVIDIA-H100-80GB-HBM3"
    assert {pod["metadata"]["uid"] for pod in world.cluster.of(POD)} == pods
    assert world.rest() == [("patch/status", "ModelServe", "big"), ("create", "Event", "PoolsGone")]
    world.add_node("a", **H200)
    assert "proposedPlan" not in world.status("big")


def test_heartbeats_and_unrelated_nodes_cause_nothing(world, tiny_spec: dict[str, Any]) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.make_ready()
    world.rest()

    def heartbeat(node: dict[str, Any]) -> None:
        node["status"]["conditions"] = [
            {"type": "Ready", "status": "False", "lastHeartbeatTime": "2026-01-01T00:00:09Z"}
        ]
        node["spec"] = {
            "unschedulable": True,
            "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
        }

    world.cluster.change(NODE, "a", heartbeat)
    assert world.pending == set()
    world.cluster.put(NODE, {"metadata": {"name": "cpu", "labels": {"zone": "1"}}})
    assert world.pending == set()


def test_the_impossible_stalls_with_the_missing_bytes_and_new_nodes_clear_it(world) -> None:
    world.add_node("small", **L4)
    world.create({"model": MODEL}, name="big")
    assert world.condition("Stalled", "big") == ("True", "DoesNotFit")
    assert world.condition("Ready", "big") == ("False", "DoesNotFit")
    assert world.condition("Reconciling", "big") is None
    assert world.condition("Accepted", "big") == ("True", "Valid")
    assert "GiB" in world.message("Stalled", "big")
    (candidate,) = world.status("big")["plan"]["candidates"]
    assert candidate["verdict"] == "Refused"
    assert candidate["shortfallBytes"] > 0
    assert candidate["remedy"]
    assert world.cluster.of(DEPLOYMENT) == world.cluster.of(SERVICE) == []

    world.add_node("large", **H200)
    assert world.condition("Stalled", "big") is None
    assert world.condition("Planned", "big") == ("True", "PlanCommitted")
    assert world.status("big")["plan"]["accelerator"] == "NVIDIA-H200"


def test_pending_pods_are_explained_in_the_schedulers_words(world) -> None:
    world.create({"model": MODEL, "accelerators": {"products": ["NVIDIA-H200"]}}, name="big")
    assert world.condition("Planned", "big") == ("True", "PlanCommitted"), "a declared product may grow from nothing"
    (deployment,) = world.cluster.of(DEPLOYMENT)
    (pod,) = world.cluster.pods_of(deployment)
    assert world.condition("CapacityAvailable", "big") == ("Unknown", "WaitingForNodes"), "nobody has said yet"
    assert "WaitingForNodes" not in [event["reason"] for event in world.cluster.events]
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available",
    }
    world.cluster.set_pod(pod, phase="Pending", conditions=[scheduled])
    world.settle()
    assert world.condition("CapacityAvailable", "big") == ("False", "WaitingForNodes")
    assert world.condition("Reconciling", "big") == ("True", "WaitingForNodes")
    assert world.condition("Stalled", "big") is None
    assert "0/3 nodes are available" in world.message("CapacityAvailable", "big")
    world.cluster.set_pod(pod, phase="Pending", conditions=[{"type": "PodScheduled", "status": "True"}])
    world.settle()
    assert world.condition("CapacityAvailable", "big") == ("True", "CapacitySufficient")


def test_without_any_accelerator_it_waits(world) -> None:
    world.create({"model": MODEL}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    assert world.condition("Reconciling", "big") == ("True", "NoAccelerators")
    assert world.condition("Stalled", "big") is None
    world.add_node("a", **H200)
    assert world.condition("Planned", "big") == ("True", "PlanCommitted")


def test_no_room_for_a_surge_keeps_the_old_revision(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.make_ready()
    old = world.revision("big")
    world.edit("big", context={"maxModelLen": 4096})
    new = world.revision("big")
    (pod,) = world.cluster.pods_of(world.deployment(new))
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "Insufficient nvidia.com/gpu",
    }
    world.cluster.set_pod(pod, phase="Pending", conditions=[scheduled])
    world.settle()
    assert world.condition("CapacityAvailable", "big") == ("False", "NoSurgeCapacity")
    assert world.condition("Available", "big") == ("True", "Serving")
    assert world.deployments() == {old: 1, new: 1}
    world.edit("big", rollout={"allowDowntime": True})
    assert world.deployments() == {old: 0, new: 1}, "the old revision makes room"


def test_manual_plans_wait_for_approval(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL, "plan": {"mode": "Manual"}}, name="big")
    assert world.condition("Planned", "big") == ("False", "WaitingForApproval")
    assert world.condition("Reconciling", "big") is None
    assert world.condition("Ready", "big") is None, "nothing was approved yet, so nothing is under way"
    assert world.cluster.of(DEPLOYMENT) == world.cluster.of(CONFIG_MAP) == []
    proposed = world.status("big")["proposedPlan"]["hash"]
    assert proposed in world.message("Planned", "big")

    def approve(body: dict[str, Any]) -> None:
        body["metadata"]["annotations"] = {labels.APPROVE_PLAN: proposed}

    world.cluster.change(MODEL_SERVE, "big", approve)
    world.settle()
    assert world.status("big")["plan"]["hash"] == proposed
    assert world.deployments() == {world.revision("big"): 1}


def test_a_preview_plans_and_runs_nothing(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL, "plan": {"mode": "PreviewOnly"}}, name="big")
    assert world.condition("Planned", "big") == ("True", "PlanPreviewed")
    assert world.status("big")["plan"]["accelerator"] == "NVIDIA-H200"
    assert world.cluster.of(DEPLOYMENT) == world.cluster.of(CONFIG_MAP) == []
    assert world.condition("Ready", "big") is None, "there is nothing to be ready: it is settled"
    assert world.condition("Reconciling", "big") is None
    assert world.status("big")["maxModelLen"] == world.status("big")["plan"]["maxModelLen"]
    assert world.status("big")["phase"] == "Planned"
    world.rest()
    world.restart_operator()
    world.settle()
    assert world.rest() == []


def test_a_preview_beside_what_runs_leaves_it_running(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.make_ready()
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    pods, running, plan = world.cluster.of(POD), world.status("big"), world.shown_plan("big")
    world.edit("big", plan={"mode": "PreviewOnly"}, context={"maxModelLen": 4096})
    status = world.status("big")
    assert world.cluster.of(POD) == pods
    assert world.condition("Available", "big") == ("True", "Serving")
    assert world.condition("Ready", "big") == ("True", "RolledOut"), "of what runs"
    assert status["url"] == running["url"]
    assert (world.shown_plan("big"), status["revision"]) == (plan, running["revision"])
    assert status["proposedPlan"]["maxModelLen"] == 4096
    assert status["maxModelLen"] == running["maxModelLen"], "what clients may ask is what runs"
    world.edit("big", plan={"mode": "Automatic"})
    world.make_ready()
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    assert world.status("big")["plan"]["maxModelLen"] == 4096


def test_pools_are_named_in_labels_their_provisioner_knows(world) -> None:
    world.add_node("a", **H200)
    instance = {"node.kubernetes.io/instance-type": "p5en"}
    world.cluster.change(NODE, "a", lambda body: body["metadata"]["labels"].update(instance))
    world.create({"model": MODEL}, name="big")
    known = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["p5en"]}
    product = "nvidia.com/gpu.product"
    assert _terms(world) == [
        {"matchExpressions": [known, {"key": product, "operator": "DoesNotExist"}]},
        {"matchExpressions": [known, {"key": product, "operator": "In", "values": ["NVIDIA-H200"]}]},
    ]


def test_terms_do_not_depend_on_other_pools(world) -> None:
    """Another GPU under the same provisioner's labels, before or after, changes nothing."""
    instance = {"node.kubernetes.io/instance-type": "k3s"}
    world.add_node("a", **H200)
    world.cluster.change(NODE, "a", lambda body: body["metadata"]["labels"].update(instance))
    world.create({"model": MODEL}, name="big")
    before = _terms(world)
    world.add_node("later", **L4)
    world.cluster.change(NODE, "later", lambda body: body["metadata"]["labels"].update(instance))
    world.settle()
    assert "proposedPlan" not in world.status("big")
    world.cluster.remove(MODEL_SERVE, "ml", "big")
    world.create({"model": MODEL}, name="big")
    assert _terms(world) == before


def test_quantised_weights_are_served_beside_what_serves(world) -> None:
    """INT4 of the same model: a plan of its own, and the bfloat16 pods stay until its own are ready."""
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.make_ready()
    serving = world.deployments()
    world.edit("big", model={"uri": "hf://google/gemma-4-31B-it-qat-w4a16-ct"})
    assert world.condition("Accepted", "big") == ("True", "Valid")
    plan = world.status("big")["plan"]
    assert plan["candidates"][0]["perGpu"]["weightsBytes"] < 25 << 30
    assert set(serving) <= set(world.deployments()), "what serves is left alone"
    assert world.condition("Available", "big") == ("True", "Serving")


def test_pods_that_use_every_gpu_change_no_plan(world) -> None:
    """Free capacity is the scheduler's business: a full node makes pods wait, never another plan."""
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="before")
    planned = world.status("before")["plan"]

    def fill(node: dict[str, Any]) -> None:
        node["status"] = {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}, "phase": "full"}

    world.cluster.change(NODE, "a", fill)
    for number in range(8):
        container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        body = {"metadata": {"name": f"job-{number}", "namespace": "batch"}, "spec": {"nodeName": "a"}}
        world.cluster.put(POD, {**body, "spec": {**body["spec"], "containers": [container]}})
    assert world.pending == set()
    world.create({"model": MODEL}, name="after")
    assert world.status("after")["plan"] == planned
    (pod,) = world.cluster.pods_of(world.deployment_of("after"))
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient GPUs"}
    world.cluster.set_pod(pod, phase="Pending", conditions=[full])
    world.settle()
    assert world.condition("CapacityAvailable", "after") == ("False", "WaitingForNodes")
    assert world.status("after")["plan"]["hash"] == planned["hash"]
    assert world.condition("Stalled", "after") is None


def test_of_mixed_pools_the_one_that_fits_is_chosen_and_the_other_explained(world) -> None:
    for number in range(3):
        world.add_node(f"l4-{number}", **L4)
    world.add_node("h200", **H200)
    world.create({"model": MODEL}, name="big")
    plan = world.status("big")["plan"]
    verdicts = {candidate["accelerator"]: candidate["verdict"] for candidate in plan["candidates"]}
    assert verdicts == {"NVIDIA-H200": "Chosen", "NVIDIA-L4": "Refused"}
    assert [e["values"] for term in _terms(world) for e in term["matchExpressions"]] == [["NVIDIA-H200"]]
    pods = {pod["metadata"]["uid"] for pod in world.cluster.of(POD)}
    world.cluster.remove(NODE, "", "h200")
    world.settle()
    assert world.status("big")["plan"]["accelerator"] == "NVIDIA-H200", "a committed plan outlives its nodes"
    assert {pod["metadata"]["uid"] for pod in world.cluster.of(POD)} == pods
    assert "proposedPlan" not in world.status("big"), "and nothing that is left fits"


def test_labels_that_name_no_gpu_propose_nothing(world) -> None:
    for name, instance in (("a", "g6.xlarge"), ("b", "g6.2xlarge")):
        world.add_node(name, product="NVIDIA-H200", memory_mib=143_771, gpus=1)
        kind = {"node.kubernetes.io/instance-type": instance}
        world.cluster.change(NODE, name, lambda body, kind=kind: body["metadata"]["labels"].update(kind))
    world.create({"model": MODEL})
    assert len(_terms(world)) == 4
    for name in ("a", "b"):
        world.cluster.change(NODE, name, lambda body: body["metadata"]["labels"].update({"a.example/team": "x"}))
        world.settle()
        assert "proposedPlan" not in world.status()
        world.cluster.change(NODE, name, lambda body: body["metadata"]["labels"].pop("a.example/team"))


def test_the_longest_node_selector_fits_beside_the_labels_of_the_pool(world) -> None:
    wanted = {f"example.com/l{index}": "x" for index in range(16)}
    world.add_node("a", **H200)
    world.cluster.change(NODE, "a", lambda body: body["metadata"]["labels"].update(wanted))
    world.create({"model": MODEL, "accelerators": {"nodeSelector": wanted}})
    (term,) = _terms(world)
    assert len(term["matchExpressions"]) == 17
