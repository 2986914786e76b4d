"""What cannot work is said: by the API server, in the Stalled condition, or with the worker's own words."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from localcluster import weights_volume
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.kubectl import KubectlError, wait_for
from localcluster.operator_process import OperatorProcess
from localcluster.target import Target
from localcluster.weights_volume import MOUNT

NAMESPACE = "modelserve-e2e"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"context": {"maxModelLen": 0}}, ("spec.context.maxModelLen", "1")),
        ({"context": {"maxModelLen": 1024, "minModelLen": 2048}}, ("minModelLen", "maxModelLen")),
        ({"kvCache": {"dtype": "int3"}}, ("spec.kvCache.dtype", '"int8"')),
        ({"model": {"uri": "ftp://example.com/model"}}, ("spec.model.uri", "pvc://")),
        ({"contxt": {"maxModelLen": 1024}}, ("contxt",)),
        ({"replicas": -1}, ("spec.replicas", "0")),
        ({"parallelism": {"tensor": 1000}}, ("spec.parallelism.tensor", "should be less than or equal to")),
    ],
)
def test_an_invalid_spec_is_refused_with_field_and_limit(
    cluster: Target, spec: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(KubectlError) as refusal:
        apply_example(cluster, NAMESPACE, "invalid", **spec)
    assert [word for word in words if word not in str(refusal.value)] == [], str(refusal.value)
    assert not cluster.kubectl.exists("modelserve", "invalid", "-n", NAMESPACE)


def test_an_impossible_spec_is_accepted_and_says_what_is_missing(cluster: Target, operator: OperatorProcess) -> None:
    """31B in bfloat16 needs 57 GiB of weights; an L4 has 22."""
    served = apply_example(
        cluster,
        NAMESPACE,
        "impossible",
        model={"uri": "hf://google/gemma-4-31B-it"},
        accelerators={"products": ["NVIDIA-L4"], "maxPerReplica": 1},
        context={"maxModelLen": 8192},
        pod={},
    )
    try:
        wait_for("Stalled", lambda: served.condition("Stalled").get("status") == "True")
        stalled, status = served.condition("Stalled"), served.status()
        assert re.search(r"\d+(\.\d+)? GiB", stalled["message"]), stalled
        (candidate,) = status["plan"]["candidates"]
        assert (candidate["accelerator"], candidate["verdict"]) == ("NVIDIA-L4", "Refused")
        assert candidate["shortfallBytes"] > 30 << 30
        assert candidate["remedy"]
        assert candidate["remedy"] in stalled["message"]
        assert served.condition("Accepted")["status"] == "True"
        assert served.owned("deployments") == []
    finally:
        served.kubectl.delete("modelserve", "impossible")


def test_a_preview_is_settled_without_a_ready_condition(cluster: Target, operator: OperatorProcess) -> None:
    """kstatus takes an object without one for current; the schema's default has to go, too."""
    served = apply_example(
        cluster,
        NAMESPACE,
        "preview",
        model={"uri": "hf://google/gemma-4-31B-it"},
        accelerators={"products": ["NVIDIA-H200"]},
        context={"maxModelLen": 8192},
        plan={"mode": "PreviewOnly"},
        pod={},
    )
    try:
        wait_for("Planned", lambda: served.condition("Planned").get("status") == "True")
        wait_for("settled", lambda: served.condition("Ready") == {})
        status = served.status()
        assert status["observedGeneration"] == served.resource()["metadata"]["generation"]
        assert served.condition("Reconciling") == served.condition("Stalled") == {}
        assert status["maxModelLen"] == status["plan"]["maxModelLen"] == 8192
        assert served.owned("deployments,services,jobs") == []
    finally:
        served.kubectl.delete("modelserve", "preview")


def test_a_refused_child_is_said_with_who_refused_it(cluster: Target, operator: OperatorProcess) -> None:
    kubectl = cluster.kubectl.within(NAMESPACE)
    kubectl.run("create", "quota", "no-jobs", "--hard=count/jobs.batch=0")
    try:
        wait_for("the quota in force", lambda: "used" in kubectl.get("quota", "no-jobs")["status"])
        served = apply_example(cluster, NAMESPACE, "refused")
        wait_for("Stalled", lambda: served.condition("Stalled").get("status") == "True")
        assert served.condition("Stalled")["reason"] == "QuotaExceeded"
        assert "no-jobs" in served.condition("Stalled")["message"]
        assert served.condition("Accepted")["status"] == "True"

        def warned() -> set[str]:
            """Events follow the status."""
            events = kubectl.items("events", "--field-selector=involvedObject.name=refused,type=Warning")
            return {event["reason"] for event in events}

        wait_for("the Event", lambda: warned() != set())
        assert warned() == {"QuotaExceeded"}
    finally:
        kubectl.delete("modelserve", "refused")
        kubectl.delete("quota", "no-jobs")


RENAME_A_TENSOR = f"""
import pathlib, shutil
shutil.copytree("{MOUNT}/{CHECKPOINT.name}", "{MOUNT}/broken", dirs_exist_ok=True)
path = pathlib.Path("{MOUNT}/broken/model.safetensors")
content = path.read_bytes()
assert content.count(b"layers.0.mlp.up_proj.weight") == 1
path.write_bytes(content.replace(b"layers.0.mlp.up_proj.weight", b"layers.0.mlp.xx_proj.weight"))
"""
CUT_THE_FILE = f"""
import pathlib, shutil
shutil.copytree("{MOUNT}/{CHECKPOINT.name}", "{MOUNT}/cut", dirs_exist_ok=True)
path = pathlib.Path("{MOUNT}/cut/model.safetensors")
path.write_bytes(path.read_bytes()[:-4096])
"""


def _stalls(served: Deployed, *, reason: str) -> str:
    wait_for("Stalled", lambda: served.condition("Stalled").get("status") == "True")
    stalled = served.condition("Stalled")
    assert stalled["reason"] == reason
    assert served.condition("Ready")["status"] == "False"
    message: str = stalled["message"]
    return message


def test_a_worker_that_fails_for_good_stops_with_its_reason(cluster: Target, operator: OperatorProcess) -> None:
    weights_volume.run_job(cluster, NAMESPACE, name="break", command=["python", "-c", RENAME_A_TENSOR])
    served = apply_example(cluster, NAMESPACE, "broken", model={"uri": "pvc://weights/broken"})
    try:
        message = _stalls(served, reason="InvalidCheckpoint")
        assert "layers.0.mlp.up_proj" in message or "layers.0.mlp.xx_proj" in message
        wait_for("scaled to zero", lambda: served.owned("pods") == [])
        operator.stop()
        time.sleep(1)
        assert [d["spec"]["replicas"] for d in served.owned("deployments")] == [0]
    finally:
        served.kubectl.delete("modelserve", "broken")


def test_a_cut_checkpoint_is_refused_before_a_worker_starts(cluster: Target, operator: OperatorProcess) -> None:
    weights_volume.run_job(cluster, NAMESPACE, name="cut", command=["python", "-c", CUT_THE_FILE])
    served = apply_example(cluster, NAMESPACE, "cut", model={"uri": "pvc://weights/cut"})
    try:
        assert "model.safetensors" in _stalls(served, reason="InvalidCheckpoint")
        assert served.owned("deployments") == []
    finally:
        served.kubectl.delete("modelserve", "cut")


def test_a_stopped_revision_stays_stopped_over_a_restart_and_a_new_spec_clears_it(
    cluster: Target, operator: OperatorProcess
) -> None:
    weights_volume.run_job(cluster, NAMESPACE, name="break", command=["python", "-c", RENAME_A_TENSOR])
    served = apply_example(cluster, NAMESPACE, "mended", model={"uri": "pvc://weights/broken"})
    try:
        _stalls(served, reason="InvalidCheckpoint")
        wait_for("scaled to zero", lambda: served.owned("pods") == [])
        served.patch({"model": {"uri": f"pvc://weights/{CHECKPOINT.name}"}})
        wait_for("Stalled is cleared", lambda: served.condition("Stalled") == {})
        served.wait_ready()
    finally:
        served.kubectl.delete("modelserve", "mended")
