"""CPUs of a GPU's nodes: what is known of them, plans that they refuse, and pods that stay on them."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.api import API_VERSION, KIND, ModelServe, ModelServeSpec, PlanStatus
from modelserve.catalogue import declared_pools, user_catalogue
from modelserve.hardware import CATALOGUE, accelerator_from_labels
from modelserve.planning import AcceleratorOffer, offers_from_node_pool, offers_from_nodes, plan
from modelserve.planning.evaluation import Fit, Refusal, evaluate
from modelserve.planning.planner import consider
from modelserve.planning.pools.declared_pools import declared_offers, named_offers
from modelserve.planning.pools.resource_slices import Devices, device_offers
from modelserve.planning.remedies import remedies, remedy_text
from modelserve.planning.wishes import Wishes
from modelserve.published import published_model

ARCH, PRODUCT = "kubernetes.io/arch", "nvidia.com/gpu.product"
GH200, H200 = "NVIDIA-GH200-480GB", "NVIDIA-H200"
BOTH = ("amd64", "arm64")


def _spec(size: str = "31B", **spec: Any) -> ModelServeSpec:
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "gemma"}}
    return ModelServe.parse({**document, "spec": {"model": {"uri": f"hf://google/gemma-4-{size}"}, **spec}}).spec


def _plan(
    offers: tuple[AcceleratorOffer, ...], spec: ModelServeSpec | None = None, *, images: tuple[str, ...] = BOTH
) -> PlanStatus:
    facts = published_model("hf://google/gemma-4-31B")
    assert facts is not None
    return plan(spec or _spec(), facts.architecture, offers, image_architectures=images)


def _node(product: str, cpus: str | None, gpus: int = 4, **labels: str) -> dict[str, Any]:
    named = {
        PRODUCT: product,
        **({ARCH: cpus} if cpus else {}),
        **{key.replace("_", "."): v for key, v in labels.items()},
    }
    return {"metadata": {"labels": named}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


def _gb200(cpus: str = "arm64") -> dict[str, Any]:
    node = _node("NVIDIA-GB200", cpus)
    compute = {"nvidia.com/gpu.compute.major": "10", "nvidia.com/gpu.compute.minor": "0"}
    node["metadata"]["labels"] |= {"nvidia.com/gpu.memory": "189471", **compute}
    return node


def _pinned(planned: PlanStatus) -> list[tuple[str, ...] | None]:
    """What each term says of CPUs."""
    terms = planned.node_selector_terms or ()
    return [next((each.values for each in term.match_expressions if each.key == ARCH), None) for term in terms]


@pytest.mark.parametrize("objective", ["Throughput", "Latency", "Cost"])
@pytest.mark.parametrize("nodes", [[_node(GH200, "arm64")], [_node(GH200, None)], [_gb200()]])
def test_no_replica_on_arm_has_several_gpus(nodes: list[dict[str, Any]], objective: str) -> None:
    """Ranks pass steps through shared memory in the order of stores of x86-64; two GPUs would have been chosen."""
    offers = offers_from_nodes(nodes)
    prices = {"accelerators": {"costPerHour": {GH200: "3", "NVIDIA-GB200": "3"}}} if objective == "Cost" else {}
    chosen = _plan(offers, _spec(objective=objective, **prices))
    assert (chosen.fits, chosen.gpus_per_replica, chosen.tensor_parallel) == (True, 1, 1)
    refused = _plan(offers, _spec(parallelism={"tensor": 2}))
    (candidate,) = refused.candidates
    assert (refused.fits, candidate.verdict, candidate.limited_by) == (False, "Refused", "Architecture")
    assert candidate.shortfall_bytes is None
    assert "arm64 CPUs, where a replica has one GPU" in (candidate.message or "")
    assert (candidate.remedy or "").startswith(f"fits on 1 x {candidate.accelerator}")


@pytest.mark.parametrize("gpus", [1, 2])
def test_without_an_image_for_arm_nothing_is_planned_there(gpus: int) -> None:
    """An image of x86-64 ends there in an exec format error, for ever."""
    refused = _plan(offers_from_nodes([_gb200()]), _spec(parallelism={"tensor": gpus}), images=("amd64",))
    (candidate,) = refused.candidates
    assert (refused.fits, candidate.limited_by) == (False, "Architecture")
    assert "arm64 CPUs, which the worker's image is not built for; it is for amd64" in (candidate.message or "")
    assert "with an image of the worker for arm64" in (candidate.remedy or "")


def test_pods_stay_on_the_cpus_that_were_planned() -> None:
    """Pools of one product with other CPUs are other places; one GPU a replica is no reason to mix them."""
    offers = offers_from_nodes([_node(H200, "amd64", 2), _node(H200, "arm64", 8), _node("NVIDIA-L4", "amd64", 1)])
    for images in (("amd64",), BOTH):
        chosen = _plan(offers, _spec(parallelism={"tensor": 2}), images=images)
        assert (chosen.accelerator, _pinned(chosen)) == (H200, [("amd64",)])
    assert not _plan(offers, _spec(parallelism={"tensor": 8}), images=BOTH).fits, "eight are on Arm alone"
    arm = _plan(offers, _spec(accelerators={"nodeSelector": {ARCH: "arm64"}}), images=("arm64",))
    assert (arm.tensor_parallel, _pinned(arm)) == (1, [("arm64",)])


def test_every_way_to_name_a_pool_says_which_cpus() -> None:
    pool = {"metadata": {"name": "gpus"}, "spec": {"template": {"spec": {"requirements": []}}}}
    requirements: list[dict[str, Any]] = pool["spec"]["template"]["spec"]["requirements"]  # type: ignore[index]
    requirements.append({"key": PRODUCT, "operator": "In", "values": [H200]})
    slices = Devices("NVIDIA-GB200", 189_471, (10, 0), 4)
    facts = {"memoryMiB": 284_208, "bandwidthGBps": 8000, "bfloat16TFLOPS": 2500, "computeCapability": "10.3"}
    data: dict[str, Any] = {"NVIDIA-GB300": {**facts, "gpusPerNode": 4, "nodeSelector": {"a": "b"}}}
    named = named_offers(_spec(accelerators={"products": [GH200]}), CATALOGUE, ())
    offers: list[tuple[tuple[AcceleratorOffer, ...], str]] = [
        (offers_from_nodes([_node(GH200, "arm64")]), "arm64"),
        (offers_from_node_pool(pool), "amd64"),
        (declared_pools(data), "arm64"),
        (device_offers([slices], {ARCH: "arm64"}, (), CATALOGUE), "arm64"),
        (tuple(named), "arm64"),
    ]
    for made, cpus in offers:
        (offer,) = made
        assert offer.accelerator.architecture == cpus
        for term in offer.node_selector_terms:
            assert [each.values for each in term.match_expressions if each.key == ARCH] == [(cpus,)], offer
    requirements.append({"key": ARCH, "operator": "In", "values": ["arm64", "amd64"]})
    assert [each.accelerator.architecture for each in offers_from_node_pool(pool)] == ["amd64", "arm64"]
    asking = _spec(accelerators={"nodeSelector": {ARCH: "arm64"}})
    (arm,) = declared_offers(asking, declared=(), node_pools=[pool], catalogue=CATALOGUE)
    assert arm.accelerator.architecture == "arm64"
    requirements[-1] = {"key": ARCH, "operator": "NotIn", "values": ["amd64"]}
    assert [each.accelerator.architecture for each in offers_from_node_pool(pool)] == ["arm64"]


@pytest.mark.parametrize(
    ("product", "cpus"),
    [
        (GH200, "arm64"), ("NVIDIA-GH200-144G-HBM3e", "arm64"), ("NVIDIA-GB200", "arm64"), ("NVIDIA-GB300", "arm64"),
        ("NVIDIA-GB10", "arm64"), (f"{GH200}-MIG-1g.12gb", "arm64"), (H200, "amd64"), ("NVIDIA-B200", "amd64"),
        ("NVIDIA-GeForce-RTX-3090", "amd64"), ("NVIDIA-H300", "amd64"),
    ],
)  # fmt: skip
def test_where_no_node_says_it_cpus_are_those_that_come_with_the_product(product: str, cpus: str) -> None:
    """Also beside the facts of the listed product that is nearest, whose CPUs are others."""
    made = accelerator_from_labels(product, memory_mib=97_000)
    assert made is not None
    assert made.architecture == cpus


def test_what_users_say_of_a_product_counts() -> None:
    facts = {"memoryMiB": 16_384, "bandwidthGBps": 320, "bfloat16TFLOPS": 65, "computeCapability": "8.6"}
    made = user_catalogue({"NVIDIA-A": {**facts, "architecture": "arm64"}, "NVIDIA-B": facts})  # type: ignore[dict-item]
    assert [made[name].architecture for name in ("NVIDIA-A", "NVIDIA-B")] == ["arm64", "amd64"]


def test_remedies_of_an_architecture_fit() -> None:
    facts = published_model("hf://google/gemma-4-31B")
    assert facts is not None
    device = CATALOGUE[GH200]
    for gpus, images in ((1, ("amd64",)), (4, ("amd64",)), (4, BOTH)):
        wishes = Wishes(tensor_parallel=gpus, image_architectures=images)
        refusal = evaluate(wishes, facts.architecture, device, gpus=gpus)
        assert isinstance(refusal, Refusal)
        found = remedies(refusal, facts.architecture, wishes)
        assert found
        for remedy in found:
            result = evaluate(remedy.wishes, facts.architecture, remedy.accelerator, gpus=remedy.gpus)
            assert isinstance(result, Fit)
            if "image" not in (remedy_text(found[:1]) or ""):
                assert remedy.wishes.image_architectures == images


def test_candidates_of_refused_cpus_come_behind_those_that_fit() -> None:
    facts = published_model("hf://google/gemma-4-31B")
    assert facts is not None
    offers = offers_from_nodes([_node(H200, "arm64"), _node(H200, "amd64")])
    first, *_ = consider(_spec(), facts.architecture, offers)
    assert first.evaluation.accelerator.architecture == "amd64"
    shown = _plan(offers, images=("amd64",)).candidates
    assert [(each.accelerator, each.verdict) for each in shown] == [(H200, "Chosen")]


def test_workers_on_the_cpu_run_where_their_image_does() -> None:
    facts = published_model("hf://google/gemma-4-E2B-it")
    assert facts is not None
    memory = {"pod": {"resources": {"limits": {"memory": "32Gi"}}}}
    for cpus, images, fits in ((None, ("arm64",), True), ("arm64", BOTH, True), ("arm64", ("amd64",), False)):
        places = {"products": ["CPU"], **({"nodeSelector": {ARCH: cpus}} if cpus else {})}
        made = plan(_spec("E2B-it", accelerators=places, **memory), facts.architecture, (), image_architectures=images)
        assert made.fits is fits
        if fits:
            assert _pinned(made)[0] in (images, (cpus,))
        else:
            assert made.candidates[0].limited_by == "Architecture"
