"""Pools from node labels, what changes them, and how they are named to the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator.inventory import Inventory, Pool, Taint, node_selector_terms, pool_of


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
    assert not inventory.hear(
        _node("a") | {"status": {"allocatable": {"nvidia.com/gpu": "2"}, "phase": "x"}}, deleted=False
    )
    assert not inventory.hear(_node("c", product=""), deleted=False)
    (pool,) = inventory.pools()
    assert (pool.product, pool.gpus_per_node, pool.memory_mib) == ("NVIDIA-L4", 2, 23034)
    assert inventory.hear(_node("a"), deleted=True)
    assert len(inventory.pools()) == 1
    assert inventory.hear(_node("b", product="NVIDIA-H200"), deleted=False)
    assert [pool.product for pool in inventory.pools()] == ["NVIDIA-H200"]


def test_cordons_and_lifecycle_taints_are_no_part_of_a_pool() -> None:
    node = _node()
    before = pool_of(node)
    node["spec"]["taints"].append({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"})
    assert pool_of(node) == before


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
    assert pool.accepts(node_selector={"zone": "a", "kubernetes.io/hostname": "z"}, tolerations=[gpu])
    assert not pool.accepts(node_selector={"zone": "b"}, tolerations=[gpu])
    assert not pool.accepts(node_selector={}, tolerations=[])


def test_the_product_is_added_where_a_provisioner_label_is_ambiguous() -> None:
    def pool(product: str, instance: str | None) -> Pool:
        labels = (("node.kubernetes.io/instance-type", instance),) if instance else ()
        return Pool(product, 8, 0, (0, 0), labels, ())

    slice_, whole, other, bare = pool("A-MIG", "p4"), pool("A", "p4"), pool("B", "p5"), pool("C", None)
    everything = [slice_, whole, other, bare]

    def keys(*pools: Pool) -> list[list[str]]:
        terms = node_selector_terms(pools, all_pools=everything)
        return [[expression["key"] for expression in term["matchExpressions"]] for term in terms]

    assert keys(whole) == [["node.kubernetes.io/instance-type", "nvidia.com/gpu.product"]]
    assert keys(other) == [["node.kubernetes.io/instance-type"]]
    assert keys(bare) == [["nvidia.com/gpu.product"]]
    assert len(keys(other, bare)) == 2
