"""`modelserve plan --nodes` and the operator decide alike about the same cluster: the preview is no second opinion."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from modelserve.api import ModelServeSpec
from modelserve.cli.plan_command import PlanOptions, run_plan
from modelserve.published import published_model
from modelserve_operator.inventory.pools import Inventory
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.planning.revision_builder import plan_for

URI = "hf://google/gemma-4-E4B-it"
PRODUCTS = {
    "NVIDIA-L4": "23034",
    "NVIDIA-L40S": "46068",
    "NVIDIA-H200": "143771",
    "Tesla-T4": "15360",
    "Odd-1": "40000",
}
HOST, TEAM = "kubernetes.io/hostname", "team"
TAINTED, NOT_READY = (
    {"key": "reserved", "effect": "NoSchedule"},
    {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"},
)


@st.composite
def clusters(draw: st.DrawFn) -> list[dict[str, Any]]:
    nodes = []
    for number in range(draw(st.integers(0, 4))):
        product = draw(st.sampled_from(sorted(PRODUCTS)))
        labels = {HOST: f"n{number}", TEAM: draw(st.sampled_from("ab")), "nvidia.com/gpu.product": product}
        if draw(st.booleans()):
            labels["nvidia.com/gpu.memory"] = PRODUCTS[product]
        taints = draw(
            st.sampled_from([[], [TAINTED], [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]])
        )
        gpus = draw(st.sampled_from(["0", "1", "2", "8"]))
        body = {"metadata": {"name": f"n{number}", "labels": labels}, "spec": {"taints": taints}}
        nodes.append({"kind": "Node", **body, "status": {"allocatable": {"nvidia.com/gpu": gpus}}})
    return nodes


SPECS = st.fixed_dictionaries(
    {"model": st.just({"uri": URI})},
    optional={
        "context": st.sampled_from([{"maxModelLen": 8192}, {"maxModelLen": 131072, "minModelLen": 1024}]),
        "accelerators": st.fixed_dictionaries(
            {},
            optional={
                "nodeSelector": st.sampled_from([{TEAM: "a"}, {HOST: "n1"}, {HOST: "n9"}]),
                "products": st.lists(st.sampled_from(sorted(PRODUCTS)), min_size=1, unique=True),
            },
        ),
        "pod": st.just({"tolerations": [{"key": "reserved", "operator": "Exists"}]}),
        "objective": st.sampled_from(["Latency", "MaxContext"]),
    },
)


@settings(max_examples=60)
@given(nodes=clusters(), document=SPECS)
def test_a_preview_of_the_nodes_is_the_plan(
    tmp_path_factory: Any, nodes: list[dict[str, Any]], document: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    serve = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "metadata": {"name": "g"}}
    (folder / "serve.yaml").write_text(yaml.safe_dump({**serve, "spec": document}))
    bystander = {"kind": "Node", "metadata": {"name": "cpu"}}
    (folder / "nodes.yaml").write_text(yaml.safe_dump_all([*nodes, bystander]))
    text, _ = run_plan(PlanOptions(file=str(folder / "serve.yaml"), nodes=str(folder / "nodes.yaml"), output="json"))
    (entry,) = yaml.safe_load(text)
    inventory = Inventory()
    for node in (*nodes, bystander):
        inventory.hear(node, deleted=False)
    supply = Supply(pools=inventory.pools(), nodes_of=inventory.nodes_of(), hosts=inventory.hosts())
    facts = published_model(URI)
    assert facts is not None
    assert entry["plan"] == plan_for(ModelServeSpec.model_validate(document), facts, supply).to_json()
