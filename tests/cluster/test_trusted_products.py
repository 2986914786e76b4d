"""A product that a spec names and no pool is known of: the real scheduler puts its pods on what each cloud's node group
publishes of itself while it has no node, and on no other GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster.binaries import require_programs
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.kubectl import wait_for
from localcluster.processes import spawn
from localcluster.settings import ClusterError
from modelserve.api import ModelServeSpec
from modelserve.hardware import CATALOGUE
from modelserve.planning import plan
from modelserve.planning.pools.declared_pools import named_offers
from modelserve.published import published_model

pytestmark = pytest.mark.e2e

TEMPLATES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "node_templates.yaml").read_text())
PRODUCTS = sorted({template["product"] for template in TEMPLATES})
MODEL = "hf://google/gemma-4-E2B-it"


@pytest.fixture(scope="module")
def scheduled() -> Iterator[ControlPlane]:
    """An API server and a scheduler; each template has become a node that holds every pod of this test."""
    with control_plane() as plane:
        program = require_programs(lambda _: None)["kube-scheduler"]
        line = [str(program), f"--kubeconfig={plane.folder / 'admin.kubeconfig'}", "--leader-elect=false"]
        line += ["--secure-port=0"]
        scheduler = spawn(line, log=plane.folder / "scheduler.log", environment={})
        try:
            plane.kubectl.apply({"apiVersion": "v1", "kind": "List", "items": list(map(_node, range(len(TEMPLATES))))})
            for number in range(len(TEMPLATES)):
                plane.kubectl.run("taint", "node", f"node-{number}", "node.kubernetes.io/not-ready-", "--overwrite")
            yield plane
        finally:
            scheduler.terminate(timeout_s=20)


def _node(number: int) -> dict[str, Any]:
    resources = {"cpu": "96", "memory": "1Ti", "pods": "500", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"node-{number}", "labels": TEMPLATES[number]["labels"]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def _affinity(product: str) -> dict[str, Any]:
    """As the worker's template has it for a spec that names the product, in a cluster that has no GPU."""
    spec = ModelServeSpec.model_validate({"model": {"uri": MODEL}, "accelerators": {"products": [product]}})
    facts = published_model(MODEL)
    assert facts is not None
    made = plan(spec, facts.architecture, named_offers(spec, CATALOGUE, []))
    terms = [term.to_json() for term in made.node_selector_terms or ()]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _pod(product: str, number: int) -> dict[str, Any]:
    """A worker that only this node may run."""
    affinity = _affinity(product)
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    field = {"key": "metadata.name", "operator": "In", "values": [f"node-{number}"]}
    required["nodeSelectorTerms"] = [{**term, "matchFields": [field]} for term in required["nodeSelectorTerms"]]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{product.lower()}-{number}", "namespace": "default"},
        "spec": {"affinity": affinity, "containers": [{"name": "worker", "image": "worker"}]},
    }


def test_pods_go_to_what_each_provisioner_would_make_and_to_no_other_gpu(scheduled: ControlPlane) -> None:
    pods = [_pod(product, number) for product in PRODUCTS for number in range(len(TEMPLATES))]
    scheduled.kubectl.apply({"apiVersion": "v1", "kind": "List", "items": pods})
    wanted = {
        f"{product.lower()}-{number}": template["product"] == product
        for product in PRODUCTS
        for number, template in enumerate(TEMPLATES)
    }
    found: dict[str, bool | None] = {}

    def as_wanted() -> bool:
        """A pod that is looked at before the scheduler has heard of its node has none at first."""
        found.update({pod["metadata"]["name"]: _placed(pod) for pod in _listed(scheduled)})
        return found == wanted

    with suppress(ClusterError):  # what is wrong says more
        wait_for("every pod where it belongs", as_wanted, interval_s=0.5)
    wrong = {name: placed for name, placed in found.items() if placed is not wanted[name]}
    named = {name: TEMPLATES[int(name.rpartition("-")[2])]["provisioner"] for name in wrong}
    assert wrong == {}, named
    assert sum(wanted.values()) == len(TEMPLATES)


def _listed(plane: ControlPlane) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(plane.kubectl.run("get", "pods", "-n", "default", "-o", "json"))["items"]
    return items


def _placed(pod: dict[str, Any]) -> bool | None:
    """Whether the scheduler gave it a node; None while it has not said."""
    states = {each["type"]: each for each in (pod.get("status") or {}).get("conditions") or ()}
    told = states.get("PodScheduled")
    return None if told is None else told["status"] == "True"
