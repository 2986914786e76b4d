"""Pools of real clusters: labels of every provisioner, MIG, sharing, Karpenter NodePools, and products users add."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve.api import ModelServeSpec, NodeSelectorTerm
from modelserve.api.status import MAX_TERMS
from modelserve.catalogue import declared_pools, user_catalogue
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, offers_from_node_pool, offers_from_nodes, plan
from modelserve.planning.pools.declared_pools import declared_offers
from modelserve.planning.pools.instance_types import INSTANCE_TYPES
from modelserve.published import published_model

GKE, KARPENTER, EKS = (
    "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu", "eks.amazonaws.com/instance-gpu",
)  # fmt: skip


def _node(labels: dict[str, str], allocatable: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"labels": labels}, "status": {"allocatable": allocatable or {}}, "spec": spec}


def _one(node: dict[str, Any]) -> AcceleratorOffer:
    (offer,) = offers_from_nodes([node])
    return offer


PRODUCT, ARCH = "nvidia.com/gpu.product", "kubernetes.io/arch"


def _selected(offer: AcceleratorOffer) -> dict[str, str]:
    """Labels by which the pool is named before it has a node; checks that its nodes are pinned to what was sized."""
    here, unlabelled = ({e.key: e for e in term.match_expressions} for term in offer.node_selector_terms)
    product, absent = here.pop(PRODUCT), unlabelled.pop(PRODUCT)
    assert (product.operator, product.values) == ("In", (offer.accelerator.product,))
    assert (absent.operator, absent.values) == ("DoesNotExist", None)
    assert here == unlabelled
    return {key: (e.values or ("",))[0] for key, e in here.items()}


def _gemma(size: str = "E4B", **spec: Any) -> Any:
    uri = f"hf://google/gemma-4-{size}-it"
    facts = published_model(uri)
    assert facts is not None
    return ModelServeSpec.model_validate({"model": {"uri": uri}, **spec}), facts.architecture


@pytest.mark.parametrize(
    ("labels", "product", "count", "named_by"),
    [
        ({GKE: "nvidia-l4", f"{GKE}-count": "2"}, "NVIDIA-L4", 2, GKE),
        ({f"{KARPENTER}-name": "l40s", f"{KARPENTER}-count": "4"}, "NVIDIA-L40S", 4, f"{KARPENTER}-name"),
        (
            {f"{EKS}-name": "a100", f"{EKS}-count": "8", f"{EKS}-memory": "81920"},
            "NVIDIA-A100-SXM4-80GB",
            8,
            f"{EKS}-name",
        ),
        (
            {f"{KARPENTER}-name": "a100", f"{KARPENTER}-count": "8", f"{KARPENTER}-memory": "40960"},
            "NVIDIA-A100-SXM4-40GB",
            8,
            f"{KARPENTER}-name",
        ),
    ],
)
def test_clouds_name_their_gpus(labels: dict[str, str], product: str, count: int, named_by: str) -> None:
    offer = _one(_node(labels))
    assert (offer.accelerator, offer.count) == (CATALOGUE[product], count)
    assert next(iter(_selected(offer))) == named_by, "the label exists before the node does"


def test_one_name_for_two_memories_is_pinned_to_one() -> None:
    labels = {f"{EKS}-name": "a100", f"{EKS}-count": "8", f"{EKS}-memory": "81920"}
    assert _selected(_one(_node(labels))) == {f"{EKS}-name": "a100", f"{EKS}-memory": "81920"}


def test_a_gpu_that_only_the_cloud_can_name_is_pinned_by_its_word() -> None:
    labels = {f"{KARPENTER}-name": "z9", f"{KARPENTER}-count": "1", f"{KARPENTER}-memory": "100000"}
    (term,) = _one(_node(labels)).node_selector_terms
    assert [(e.key, e.values) for e in term.match_expressions] == [(f"{KARPENTER}-name", ("z9",))]


def _matches(term: NodeSelectorTerm, labels: dict[str, str]) -> bool:
    """The scheduler's rule."""
    tests = {
        "In": lambda e: labels.get(e.key) in e.values,
        "DoesNotExist": lambda e: e.key not in labels,
        "Gt": lambda e: e.key in labels and int(labels[e.key]) > int(e.values[0]),
    }
    return all(tests[e.operator](e) for e in term.match_expressions)


K3S = {"node.kubernetes.io/instance-type": "k3s"}
H100 = {PRODUCT: "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.count": "1"}
A100 = {PRODUCT: "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8"}
SLICES = {"nvidia.com/mig-3g.40gb.count": "1", "nvidia.com/mig-3g.40gb.memory": "40448"}


@pytest.mark.parametrize(
    ("sized", "later", "taken"),
    [
        (K3S | H100, K3S | H100, True),
        (K3S | H100, K3S | {PRODUCT: "Tesla-T4"}, False),
        (K3S | H100, K3S, True),  # its labels are yet to come
        (K3S | H100, H100, False),  # of another provisioner
        (H100, H100 | K3S, True),
        (H100, K3S, False),
        (A100 | SLICES, A100 | SLICES | {"nvidia.com/mig-3g.40gb.count": "2"}, True),
        (A100 | SLICES, A100 | {"nvidia.com/mig-3g.40gb.count": "0"}, False),
        (A100 | SLICES, H100 | SLICES, False),
        (A100 | SLICES, A100, False),
        (K3S | A100 | SLICES, K3S, True),
        (K3S | A100 | SLICES, K3S | H100 | SLICES, False),
    ],
)
def test_nodes_that_arrive_later_are_taken_when_they_are_what_was_sized(
    sized: dict[str, str], later: dict[str, str], taken: bool
) -> None:
    resource = "nvidia.com/mig-3g.40gb" if "nvidia.com/mig-3g.40gb.count" in sized else "nvidia.com/gpu"
    (offer,) = (each for each in offers_from_nodes([_node(sized)]) if each.resource_name == resource)
    assert any(_matches(term, later) for term in offer.node_selector_terms) is taken


def test_a_selector_that_names_the_product_leaves_no_term_without_it() -> None:
    spec, architecture = _gemma(accelerators={"nodeSelector": {PRODUCT: "NVIDIA-H100-80GB-HBM3"}})
    (term,) = plan(spec, architecture, offers_from_nodes([_node(K3S | H100)])).node_selector_terms or ()
    assert [e.operator for e in term.match_expressions] == ["In", "In"]


def test_many_pools_of_one_product_stay_within_what_a_plan_may_hold() -> None:
    nodes = [_node(H100 | {"node.kubernetes.io/instance-type": f"t{number}"}) for number in range(100)]
    spec, architecture = _gemma()
    assert len(plan(spec, architecture, offers_from_nodes(nodes)).node_selector_terms or ()) == MAX_TERMS


@pytest.mark.parametrize(
    ("size", "product"),
    [
        ("p5.48xlarge", "NVIDIA-H100-80GB-HBM3"),
        ("g6e.12xlarge", "NVIDIA-L40S"),
        ("Standard_ND96isr_H200_v5", "NVIDIA-H200"),
    ],
)
def test_a_machine_that_nothing_else_names_is_known_by_its_type(size: str, product: str) -> None:
    """A managed node group of EKS without GPU feature discovery."""
    machine = {"node.kubernetes.io/instance-type": size}
    offer = _one(_node(machine, {"nvidia.com/gpu": "4"}))
    assert (offer.accelerator.product, offer.count) == (product, 4)
    assert _selected(offer) == machine
    assert offers_from_nodes([_node({"node.kubernetes.io/instance-type": "g6f.large"}, {"nvidia.com/gpu": "1"})]) == ()


def test_every_product_of_a_machine_is_in_the_catalogue() -> None:
    assert set(INSTANCE_TYPES) <= set(CATALOGUE)


def test_aks_names_the_machine() -> None:
    size = {
        "kubernetes.azure.com/accelerator": "nvidia",
        "node.kubernetes.io/instance-type": "Standard_NC24ads_A100_v4",
    }
    offer = _one(_node(size, {"nvidia.com/gpu": "1"}))
    assert offer.accelerator.product == "NVIDIA-A100-80GB-PCIe"
    assert _selected(offer) == {"node.kubernetes.io/instance-type": "Standard_NC24ads_A100_v4"}


@pytest.mark.parametrize(
    ("size", "product"),
    [
        ("Standard_NC40ads_H100_v5", "NVIDIA-H100-NVL"),
        ("Standard_ND96isr_H100_v5", "NVIDIA-H100-80GB-HBM3"),
        ("Standard_ND96amsr_A100_v4", "NVIDIA-A100-SXM4-80GB"),
        ("Standard_ND96isr_H200_v5", "NVIDIA-H200"),
    ],
)
def test_sizes_of_azure_tell_boards_from_modules(size: str, product: str) -> None:
    """An H100 of an NC size has 94 GB, one of an ND size 80: a plan for the larger one fits no worker there."""
    labels = {"kubernetes.azure.com/accelerator": "nvidia", "node.kubernetes.io/instance-type": size}
    assert _one(_node(labels, {"nvidia.com/gpu": "8"})).accelerator == CATALOGUE[product]


def test_discovery_knows_the_gpu_and_the_cloud_names_the_pool() -> None:
    labels = {GKE: "nvidia-h100-80gb", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8"}
    offer = _one(_node(labels))
    assert (offer.accelerator.product, _selected(offer)) == ("NVIDIA-H100-80GB-HBM3", {GKE: "nvidia-h100-80gb"})


def test_an_unknown_cloud_name_is_planned_from_its_memory() -> None:
    labels = {f"{KARPENTER}-name": "z9", f"{KARPENTER}-count": "1", f"{KARPENTER}-memory": "100000"}
    offer = _one(_node(labels))
    assert (offer.accelerator.product, offer.accelerator.memory_mib) == ("z9", 100_000)
    assert offers_from_nodes([_node({f"{KARPENTER}-name": "z9", f"{KARPENTER}-count": "1"})]) == ()


def test_slices_of_the_single_strategy_are_whole_gpus_of_their_own_product() -> None:
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H200-MIG-3g.71gb", "nvidia.com/gpu.memory": "71040",
        "nvidia.com/gpu.count": "2", "nvidia.com/mig.strategy": "single",
    }  # fmt: skip
    offer = _one(_node(labels))
    assert (offer.resource_name, offer.count, offer.largest_replica) == ("nvidia.com/gpu", 2, 1)
    assert offer.accelerator.visible_bytes < 71_040 << 20
    assert offer.accelerator.flops == pytest.approx(CATALOGUE["NVIDIA-H200"].flops * 3 / 7)
    spec, architecture = _gemma()
    assert plan(spec, architecture, [offer]).gpus_per_replica == 1
    spec, architecture = _gemma(parallelism={"tensor": 2})
    (refused,) = plan(spec, architecture, [offer]).candidates
    assert refused.limited_by == "GPUsPerNode"
    assert refused.message == "parallelism.tensor 2: MIG slices cannot talk to each other, so a replica has one"
    assert refused.remedy is not None
    assert refused.remedy.startswith("fits on 1 x NVIDIA-H200-MIG-3g.71gb")


def test_a_slice_that_two_strategies_offer_is_not_placed_where_its_resource_means_a_whole_gpu() -> None:
    single = _node({"nvidia.com/gpu.product": "NVIDIA-H200-MIG-3g.71gb", "nvidia.com/gpu.count": "2"})
    mixed = _node(
        {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "4", "nvidia.com/mig-3g.71gb.count": "2"}
    )
    spec, architecture = _gemma(accelerators={"products": ["NVIDIA-H200-MIG-3g.71gb"]})
    result = plan(spec, architecture, offers_from_nodes([single, mixed]))
    assert result.resource_name == "nvidia.com/gpu"
    assert result.node_selector_terms is not None
    (term,) = result.node_selector_terms
    assert [each.values for each in term.match_expressions] == [("NVIDIA-H200-MIG-3g.71gb",)]


def test_slices_of_the_mixed_strategy_are_resources_of_their_own() -> None:
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8",
        "nvidia.com/mig-3g.40gb.count": "4", "nvidia.com/mig-3g.40gb.memory": "40448",
        "nvidia.com/mig-1g.10gb.count": "7",
    }  # fmt: skip
    offers = offers_from_nodes([_node(labels, {"nvidia.com/gpu": "2", "nvidia.com/mig-3g.40gb": "3"})])
    seen = {offer.resource_name: (offer.accelerator.product, offer.count) for offer in offers}
    assert seen == {
        "nvidia.com/gpu": ("NVIDIA-A100-SXM4-80GB", 2),
        "nvidia.com/mig-3g.40gb": ("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", 3),
        "nvidia.com/mig-1g.10gb": ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 7),
    }
    spec, architecture = _gemma(accelerators={"products": ["NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"]})
    chosen = plan(spec, architecture, offers)
    assert (chosen.resource_name, chosen.gpus_per_replica) == ("nvidia.com/mig-3g.40gb", 1)


@pytest.mark.parametrize(
    "labels",
    [
        {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.count": "4"},
        {"nvidia.com/gpu.product": "NVIDIA-L4-SHARED", "nvidia.com/gpu.count": "1"},
        {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/gpu.count": "1"},
        {GKE: "nvidia-l4", f"{GKE}-count": "1", "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"},
    ],
)
def test_shared_gpus_are_a_candidate_with_a_reason(labels: dict[str, str]) -> None:
    spec, architecture = _gemma()
    (candidate,) = plan(spec, architecture, offers_from_nodes([_node(labels)])).candidates
    assert (candidate.accelerator, candidate.verdict, candidate.limited_by) == (
        "NVIDIA-L4-SHARED",
        "Refused",
        "Sharing",
    )
    assert "no pool can be promised" in (candidate.message or "")
    assert (candidate.remedy or "").startswith("fits on 1 x")


def test_taints_that_keep_pods_away_are_listed() -> None:
    taints = [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "team", "value": "a", "effect": "NoExecute"},
        {"key": "soft", "effect": "PreferNoSchedule"},
        {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"},
    ]
    labels = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "1"}
    assert _one(_node(labels, taints=taints)).taints == ("nvidia.com/gpu:NoSchedule", "team=a:NoExecute")


def _node_pool(*requirements: dict[str, Any], **spec: Any) -> dict[str, Any]:
    template = {"spec": {"requirements": list(requirements), "taints": [{"key": "gpu", "effect": "NoSchedule"}]}}
    return {"kind": "NodePool", "metadata": {"name": "gpus"}, "spec": {"template": template, **spec}}


def _in(key: str, *values: str, operator: str = "In") -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


def test_a_node_pool_declares_what_it_may_bring() -> None:
    pool = _node_pool(_in(f"{KARPENTER}-name", "l4", "l40s", "unheard-of"), _in(f"{KARPENTER}-count", "1", "4"))
    offers = offers_from_node_pool(pool)
    assert [(o.accelerator.product, o.count, o.declared) for o in offers] == [
        ("NVIDIA-L4", 4, True), ("NVIDIA-L40S", 4, True),
    ]  # fmt: skip
    named = {f"{KARPENTER}-name": "l4", "karpenter.sh/nodepool": "gpus", ARCH: "amd64"}
    assert _selected(offers[0]) == named
    assert offers[0].taints == ("gpu:NoSchedule",)
    spec, architecture = _gemma()
    terms = plan(spec, architecture, offers).node_selector_terms
    assert terms
    assert {e.key for e in terms[0].match_expressions} == {*named, PRODUCT}


@pytest.mark.parametrize(
    ("requirement", "limits", "count"),
    [
        (_in(f"{KARPENTER}-count", "3", operator="Lt"), None, 2),
        (_in(f"{KARPENTER}-count", "0", operator="Gt"), None, 8),
        (_in("kubernetes.io/arch", "amd64"), {"nvidia.com/gpu": 2}, 2),
    ],
)
def test_the_largest_node_is_bounded(requirement: dict[str, Any], limits: dict[str, Any] | None, count: int) -> None:
    pool = _node_pool(_in(f"{KARPENTER}-name", "h200"), requirement, **({"limits": limits} if limits else {}))
    (offer,) = offers_from_node_pool(pool)
    assert offer.count == count


@pytest.mark.parametrize("resource", ["cpu", "memory", "nvidia.com/gpu"])
@pytest.mark.parametrize("limit", [0, "0"], ids=["number", "text"])
def test_a_node_pool_that_may_bring_nothing_declares_nothing(resource: str, limit: object) -> None:
    pool = _node_pool(_in(f"{KARPENTER}-name", "h200"), limits={resource: limit})
    assert offers_from_node_pool(pool) == ()


def test_memory_requirements_tell_the_large_a100() -> None:
    pool = _node_pool(_in(f"{KARPENTER}-name", "a100"), _in(f"{KARPENTER}-memory", "80000", operator="Gt"))
    assert offers_from_node_pool(pool)[0].accelerator.product == "NVIDIA-A100-SXM4-80GB"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_ODD_LABELS = st.dictionaries(
    st.sampled_from([
        "nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu.count", "nvidia.com/gpu.replicas", GKE,
        f"{KARPENTER}-name", f"{KARPENTER}-memory", "nvidia.com/mig-1g.5gb.count", "nvidia.com/gpu.compute.major",
    ]),
    _JSON | st.sampled_from(["0", "1", "-1", "99999999999999999999", "NVIDIA-L4", "l4", "MIG", "A-MIG-1g.5gb", "²"]),
)  # fmt: skip


@given(labels=_ODD_LABELS, status=_JSON, spec=_JSON, body=_JSON)
def test_odd_nodes_offer_nothing_or_something_but_never_fail(labels: Any, status: Any, spec: Any, body: Any) -> None:
    for offer in offers_from_nodes([{"metadata": {"labels": labels}, "status": status, "spec": spec}]):
        assert offer.count >= 1
        assert offer.accelerator.visible_bytes >= 1
    assert isinstance(
        offers_from_node_pool({"metadata": body, "spec": {"template": {"spec": {"requirements": body}}}}), tuple
    )
    assert isinstance(offers_from_node_pool({"spec": body}), tuple)
    odd = {"spec": {"template": {"metadata": body, "spec": {"requirements": body, "taints": status}}}}
    asking = _gemma(accelerators={"nodeSelector": {"zone": "a"}})[0]
    assert isinstance(declared_offers(asking, declared=(), node_pools=[odd], catalogue=CATALOGUE), list)


ENTRY = """
memoryMiB: 200000
bandwidthGBps: 6000
bfloat16TFLOPS: 1500
computeCapability: "9.0"
"""


def test_users_add_products() -> None:
    made = user_catalogue({"NVIDIA-H300": ENTRY, "NVIDIA-H200": ENTRY + "visibleMiB: 150000"})
    assert made["NVIDIA-H300"].bandwidth == 6e12
    assert made["NVIDIA-H200"].visible_bytes == 150_000 << 20
    (pool,) = declared_pools({"NVIDIA-H300": ENTRY + "gpusPerNode: 8\nnodeSelector: {cloud.example/gpu: h300}"})
    assert (pool.count, pool.declared, _selected(pool)) == (8, True, {"cloud.example/gpu": "h300", ARCH: "amd64"})
    labels = {"nvidia.com/gpu.product": "NVIDIA-H300", "nvidia.com/gpu.count": "1"}
    assert offers_from_nodes([_node(labels)], {**CATALOGUE, **made})[0].accelerator == made["NVIDIA-H300"]


@pytest.mark.parametrize(
    ("product", "text", "says"),
    [
        ("X", "", "must be a mapping"),
        ("X", "[", "not YAML"),
        ("X", ENTRY.replace("200000", "-5"), "memoryMiB"),
        ("X", ENTRY.replace("200000", "1e400"), "memoryMiB"),
        ("X", ENTRY + "colour: green", "colour"),
        ("X", ENTRY.replace('"9.0"', "nine"), "computeCapability"),
        ("X", ENTRY.replace("6000", ".inf"), "bandwidthGBps"),
        ("not a label", ENTRY, "node label"),
        ("CPU", ENTRY, "no catalogue entry"),
        ("X", "a" * 5000, "at most 4,096"),
    ],
)
def test_a_wrong_entry_is_named(product: str, text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        user_catalogue({product: text})
