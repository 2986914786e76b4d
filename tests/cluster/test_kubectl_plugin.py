"""`kubectl modelserve plan` at a real API server: as the CLI over the same nodes, and without rights over nodes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from localcluster.control_plane import ControlPlane, control_plane
from localcluster.settings import REPOSITORY
from localcluster.tenant import TENANT
from modelserve.cli.adapter_preview import NOT_SEEN
from modelserve.cli.kubectl_plugin import NOT_COUNTED
from modelserve.cli.plan_command import PlanOptions, run_plan
from modelserve.model.model_facts import FACTS_KEY
from modelserve.published import published_model
from modelserve_operator import labels

pytestmark = pytest.mark.e2e

BIG = {
    "apiVersion": "serving.modelserve.dev/v1alpha1",
    "kind": "ModelServe",
    "metadata": {"name": "big", "namespace": "default"},
    "spec": {"model": {"uri": "hf://google/gemma-4-31B-it"}},
}


def _node(name: str, product: str, memory: int, gpus: int) -> dict[str, object]:
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": str(memory)}
    allocatable = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(gpus)}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"allocatable": allocatable}}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with control_plane() as found:
        for node in (_node("h200", "NVIDIA-H200", 143_771, 8), _node("l4", "NVIDIA-L4", 23_034, 1)):
            found.kubectl.run("create", "-f", "-", document=json.dumps(node))
            found.kubectl.run("taint", "node", node["metadata"]["name"], "node.kubernetes.io/not-ready-")  # type: ignore[index]
        found.kubectl.run("apply", "-f", "-", document=TENANT)
        found.kubectl.run("create", "-f", "-", document=json.dumps(BIG))
        yield found


def _kubectl(plane: ControlPlane, *arguments: str, document: object = None) -> subprocess.CompletedProcess[str]:
    """kubectl, which finds the plugin in this environment and hands it what is behind its name."""
    programs = [Path(plane.kubectl.program).parent, REPOSITORY / ".venv" / "bin", os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, programs))}
    environment["KUBECONFIG"] = str(plane.kubectl.kubeconfig)
    text = None if document is None else yaml.safe_dump(document)
    command = [str(plane.kubectl.program), "modelserve", *arguments]
    return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False)


def test_it_plans_on_the_nodes_of_the_cluster_as_the_cli_does(plane: ControlPlane, tmp_path: Path) -> None:
    before = plane.kubectl.get("modelserve", "big", "-n", "default")
    done = _kubectl(plane, "plan", "big", "-n", "default")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "nodes.json").write_text(plane.kubectl.run("get", "nodes", "-o", "json"))
    (tmp_path / "big.yaml").write_text(yaml.safe_dump(BIG))
    text, _ = run_plan(PlanOptions(file=str(tmp_path / "big.yaml"), nodes=str(tmp_path / "nodes.json")))
    assert done.stdout == f"{text}\n\n{NOT_COUNTED}\n"
    assert "NVIDIA-H200" in text
    assert "NVIDIA-L4" in text
    assert _kubectl(plane, "plan", "-f", "-", document=BIG).stdout == done.stdout
    assert plane.kubectl.get("modelserve", "big", "-n", "default") == before, "it is only read"


def test_what_does_not_fit_has_an_exit_code_and_what_is_not_there_a_name(plane: ControlPlane) -> None:
    wrong = {**BIG, "spec": {**BIG["spec"], "modle": {}}}  # type: ignore[dict-item]
    done = _kubectl(plane, "plan", "-f", "-", document=wrong)
    assert done.returncode == 2
    assert "modle" in done.stderr
    small = {**BIG, "spec": {**BIG["spec"], "accelerators": {"products": ["NVIDIA-L4"]}}}  # type: ignore[dict-item]
    done = _kubectl(plane, "plan", "-f", "-", document=small)
    assert done.returncode == 3, done.stderr
    for arguments, words in ((("plan", "none"), "no ModelServe none"), (("plan",), "kubectl get modelserves")):
        done = _kubectl(plane, *arguments)
        assert done.returncode == 2
        assert words in done.stderr


def test_a_model_that_the_operator_has_inspected_is_planned_by_what_it_found(plane: ControlPlane) -> None:
    mine = {**BIG, "metadata": {"name": "mine", "namespace": "default"}, "spec": {"model": {"uri": "hf://me/mine"}}}
    plane.kubectl.run("create", "-f", "-", document=json.dumps(mine))
    done = _kubectl(plane, "plan", "mine")
    assert done.returncode == 2
    assert "hf://me/mine cannot be looked into" in done.stderr
    facts = published_model("hf://google/gemma-4-E2B-it")
    assert facts is not None
    child = labels.child("mine", labels.MODEL_FACTS)
    metadata = {"name": "mine-model-0123456789", "namespace": "default", "labels": child}
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    data = {FACTS_KEY: facts.model_dump_json(by_alias=True)}
    plane.kubectl.run("create", "-f", "-", document=json.dumps({**found, "data": data}))
    done = _kubectl(plane, "plan", "mine", "-o", "json")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    shipped = {**BIG, "spec": {"model": {"uri": "hf://google/gemma-4-E2B-it"}}}
    (other,) = json.loads(_kubectl(plane, "plan", "-f", "-", "-o", "json", document=shipped).stdout)
    assert entry["plan"]["perGpu"] == other["plan"]["perGpu"]


def test_without_rights_over_nodes_the_api_server_is_asked(plane: ControlPlane) -> None:
    status = {"status": {"plan": {"message": "what the operator said"}, "conditions": []}}
    patch = ("patch", "modelserve", "big", "-n", "default", "--subresource=status", "--type=merge", "-p")
    plane.kubectl.run(*patch, json.dumps(status))
    done = _kubectl(plane, "plan", "-f", "-", "--as=tenant", "-n", "default", document=BIG)
    assert done.returncode == 0, done.stderr
    assert "without reading nodes" in done.stdout
    assert "dry run accepts it" in done.stdout
    assert "runs: what the operator said" in done.stdout
    elsewhere = {**BIG, "metadata": {"name": "big", "namespace": "kube-system"}}
    done = _kubectl(plane, "plan", "-f", "-", "--as=tenant", document=elsewhere)
    assert done.returncode == 1
    assert "forbidden" in done.stderr


def test_an_adapter_of_a_file_is_told_where_it_would_be_loaded_or_why_not(plane: ControlPlane) -> None:
    reference = {"modelRef": {"name": "big"}, "uri": "hf://team/legal"}
    adapter = {**BIG, "kind": "ModelAdapter", "metadata": {"name": "legal"}, "spec": reference}
    done = _kubectl(plane, "plan", "-f", "-", document=adapter)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith(
        "legal: Accepted, and not served: AdaptersNotEnabled: ModelServe big serves no adapters"
    )
    assert done.stdout.endswith(f"\n{NOT_SEEN}\n")
    roomy = {**BIG, "metadata": {"name": "roomy"}, "spec": {**BIG["spec"], "adapters": {"max": 4}}}  # type: ignore[dict-item]
    plane.kubectl.run("create", "-f", "-", document=json.dumps(roomy))
    adapter["spec"] = {**reference, "modelRef": {"name": "roomy"}}
    done = _kubectl(plane, "plan", "-f", "-", document=adapter)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("legal: 0 workers of roomy load hf://team/legal beside what they serve")
    assert not plane.kubectl.exists("modeladapter", "legal", "-n", "default")
    plane.kubectl.run("create", "-f", "-", document=json.dumps(adapter))
    moved = {**adapter, "spec": reference}
    done = _kubectl(plane, "plan", "-f", "-", document=moved)
    assert done.returncode == 1
    assert "modelRef cannot be changed" in done.stderr
    wrong = {**adapter, "spec": {**reference, "uri": "https://example.com/x"}}
    done = _kubectl(plane, "plan", "-f", "-", document=wrong)
    assert done.returncode == 2
    assert "spec.uri" in done.stderr
