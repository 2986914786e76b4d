"""Pools from node labels, what changes them, and how they are named to the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.planning.pools.eligibility import Taint
from modelserve.planning.pools.resource_slices import Devices
from modelserve_operator.inventory.catalogue import Catalogue
from modelserve_operator.inventory.pools import Inventory, PassingTaints, pool_of, pool_offers


def _node(name: str = "a", *, product: str = "NVIDIA-L4", gpus: str = "2", **labels: str) -> dict[str, Any]:
    known = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": "23034"}
    return {
        "metadata": {"name": name, "labels": {**known, **labels}},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
        "status": {"allocatable": {"nvidia.com/gpu": gpus}},
    }


def test_like_nodes_are_one_pool_and_heartbeats_change_nothing() -> None:
    inventory = Inventory()
    assert inventory.hear(_node("a"), deleted=False)
    assert inventory.hear(_node("b"), deleted=False)
    heartbeat = _node("a") | {"status": {"allocatable": {"nvidia.com/gpu": "2"}, "phase": "x"}}
    assert not inventory.hear(heartbeat, deleted=False)
    assert not inventory.hear(_node("c", product=""), deleted=False), "it offers nothing"
    assert inventory.names() == {"a", "b", "c"}
    (pool,) = inventory.pools()
    (offer,) = pool_offers(pool, Catalogue())
    assert (offer.accelerator.product, offer.count, offer.accelerator.memory_mib) == ("NVIDIA-L4", 2, 23034)
    assert inventory.hear(_node("a"), deleted=True)
    assert len(inventory.pools()) == 1
    assert inventory.hear(_node("b", product="NVIDIA-H200"), deleted=False)
    assert [dict(pool.labels)["nvidia.com/gpu.product"] for pool in inventory.pools()] == ["NVIDIA-H200"]


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"unschedulable": True}},
        {"status": {"allocatable": {"nvidia.com/gpu": "2"}, "nodeInfo": {"bootID": "2"}}},
        {"status": {"allocatable": {"nvidia.com/gpu": "2"}, "conditions": [{"type": "Ready", "status": "True"}]}},
    ],
)
def test_what_a_node_goes_through_changes_no_plan(change: dict[str, Any]) -> None:
    inventory, node = Inventory(), _node("a")
    inventory.hear(node, deleted=False)
    assert not inventory.hear(node | {key: node[key] | value for key, value in change.items()}, deleted=False)
    assert inventory.hear(_node("a"), deleted=True)


def test_cordons_and_lifecycle_taints_are_no_part_of_a_pool() -> None:
    node = _node()
    before = pool_of(node)
    node["spec"]["taints"].append({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"})
    assert pool_of(node) == before


@pytest.mark.parametrize(
    "key",
    [
        "node.cloudprovider.kubernetes.io/uninitialized",
        "karpenter.sh/unregistered",
        "node.cilium.io/agent-not-ready",
        "ebs.csi.aws.com/agent-not-ready",
        "startup-taint.cluster-autoscaler.kubernetes.io/anything",
        "aws-node-termination-handler/spot-itn",
        "example.com/boots",
        "drainer.example.com/any",
    ],
)
def test_a_node_that_starts_or_leaves_is_no_pool_of_its_own(key: str) -> None:
    inventory = Inventory(PassingTaints(starting=("example.com/boots",), leaving=("drainer.example.com/",)))
    inventory.hear(_node("a"), deleted=False)
    inventory.hear(_node("b"), deleted=False)
    node = _node("b")
    node["spec"]["taints"].append({"key": key, "effect": "NoSchedule"})
    assert not inventory.hear(node, deleted=False), "no plan may come out differently"
    assert len(inventory.pools()) == 1
    assert ("b" in inventory.leaving) is (key.startswith(("aws-", "drainer.")))
    node["spec"]["taints"][-1]["key"] = "example.com/boots-differently"
    assert inventory.hear(node, deleted=False), "another one lasts"


@pytest.mark.parametrize("count", ["0", "", "many"])
def test_a_node_without_gpus_is_in_no_pool(count: str) -> None:
    assert pool_of(_node(gpus=count)) is None


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "operator": "Equal", "value": "a"}, True),
        ({"key": "team", "value": "a", "effect": "NoSchedule"}, True),
        ({"key": "team", "operator": "Equal", "value": "b"}, False),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations_follow_kubernetes_rule(toleration: dict[str, str], tolerated: bool) -> None:
    assert Taint("team", "a", "NoSchedule").tolerated([toleration]) is tolerated


def test_a_selector_and_taints_decide_where_pods_may_run() -> None:
    pool = pool_of(_node(zone="a"))
    assert pool is not None
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists"}
    assert list(pool.unmet(selector={"zone": "a", "kubernetes.io/hostname": "z"}, tolerations=[gpu])) == []
    assert list(pool.unmet(selector={"zone": "b"}, tolerations=[gpu])) != []
    assert list(pool.unmet(selector={}, tolerations=[])) != []


def test_mig_slices_are_offers_of_their_own_resource() -> None:
    node = _node(
        product="NVIDIA-A100-SXM4-80GB",
        gpus="4",
        **{
            "nvidia.com/mig-3g.40gb.count": "2",
            "nvidia.com/mig-3g.40gb.memory": "40192",
            "nvidia.com/gpu.memory": "81920",
        },
    )
    node["status"]["allocatable"]["nvidia.com/mig-3g.40gb"] = "2"
    pool = pool_of(node)
    assert pool is not None
    offers = {offer.resource_name: offer for offer in pool_offers(pool, Catalogue())}
    assert set(offers) == {"nvidia.com/gpu", "nvidia.com/mig-3g.40gb"}
    assert (offers["nvidia.com/mig-3g.40gb"].count, offers["nvidia.com/mig-3g.40gb"].accelerator.memory_mib) == (
        2,
        40192,
    )
    node["status"]["allocatable"]["ephemeral-storage"] = "96Gi"
    assert pool_of(node) == pool, "resources that no plan asks about are no part of a pool"
    node["status"]["allocatable"]["cpu"] = "96"
    assert pool_of(node) != pool
    del node["status"]["allocatable"]["cpu"]
    node["status"]["allocatable"]["nvidia.com/mig-3g.40gb"] = "1"
    assert pool_of(node) != pool


def _sized(memory: str, cpu: str = "15890m", name: str = "a") -> dict[str, Any]:
    node = _node(name)
    node["status"]["allocatable"] |= {"memory": memory, "cpu": cpu}
    return node


def test_the_few_kib_by_which_a_node_moves_are_no_news() -> None:
    """A kubelet's restart, a kernel that keeps a little more: nothing is planned again, on either side of a step."""
    inventory = Inventory()
    steps = 1 << 19  # KiB: nodes of 32 GiB and more are counted in steps of half a GiB
    assert inventory.hear(_sized(f"{120 * steps + 5}Ki"), deleted=False)
    for memory in (120 * steps, 120 * steps - 64, 120 * steps - steps // 2 + 1, 121 * steps, 121 * steps + 4096):
        assert not inventory.hear(_sized(f"{memory}Ki"), deleted=False), memory
    assert not inventory.hear(_sized(f"{120 * steps}Ki", cpu="15900m"), deleted=False)
    assert not inventory.hear(_sized(f"{120 * steps}Ki", cpu="15850m"), deleted=False)
    (pool,) = inventory.pools()
    assert (pool.host.memory_bytes, pool.host.cpu_millis) == (60 << 30, 15_800)
    assert inventory.hear(_sized(f"{120 * steps}Ki", cpu="7890m"), deleted=False), "half of its processors"
    assert inventory.hear(_sized(f"{60 * steps}Ki", cpu="7890m"), deleted=False), "half of its memory"


def test_like_nodes_of_nearly_the_same_memory_are_one_pool() -> None:
    inventory = Inventory()
    for number in range(50):
        inventory.hear(_sized(f"{130_862_312 - 37 * number}Ki", name=f"n{number}"), deleted=False)
    assert len(inventory.pools()) == 1


@pytest.mark.parametrize("memory", ["", "many", "-4Gi", "1e99Gi", "9" * 40])
def test_a_figure_that_is_none_counts_as_not_known(memory: str) -> None:
    pool = pool_of(_sized(memory))
    assert pool is not None
    assert pool.host.memory_bytes == 0


def test_a_node_whose_gpus_only_slices_tell_of_has_its_memory_too() -> None:
    node = _sized("62Gi")
    del node["status"]["allocatable"]["nvidia.com/gpu"]
    pool = pool_of(node, (Devices("NVIDIA-L4", 23_034, (8, 9), 2),))
    assert pool is not None
    (offer,) = pool_offers(pool, Catalogue())
    assert (offer.resource_name, offer.host.memory_bytes) == ("gpu.nvidia.com", 62 << 30)
