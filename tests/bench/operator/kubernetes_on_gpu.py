"""Once through everything on a machine with a GPU: Kubernetes, the operator, a ModelServe, Ready, a completion.

    python tests/bench node_archive run FOLDER [--variant 31B] [--max-model-len 131072] [--rehearse]

unpacks the programs that `node_archive pack` packed into FOLDER and runs this with them. A rehearsal serves the demo's
small model on the CPU, on the same kind of node. transcript.md is written to $OUT (default: the present folder),
and after a failure logs.tar.gz beside it. All else that is made goes again, but for the unpacked programs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import yaml

from bench.entries import command
from bench.operator import gpu_node
from bench.operator.transcript import Transcript
from localcluster import lifecycle, operator_process, target, weights_volume
from localcluster.binaries import build_folder
from localcluster.crds import install_crds
from localcluster.deployment import NAME_LABEL, Deployed
from localcluster.kubectl import Kubectl, condition, wait_for
from localcluster.node_profile import NodeProfile
from localcluster.plan_text import describe_plan
from localcluster.service_access import service_url
from localcluster.settings import ClusterError, Layout, cache_dir
from localcluster.target import Target
from modelserve_operator.labels import FIELD_MANAGER, MANAGED_BY
from modelserve_operator.revisions.revision import ENGINE_FILE
from modelserve_operator.settings import DEFAULT_NAMESPACE

LAYOUT = Layout("gpu")
NAMESPACE = "modelserve-gpu"
VOLUME = cache_dir() / "weights-volume"
KERNELS = cache_dir() / "gpu-kernels"
VOLUME_BYTES = 80 << 30  # a 31B in bfloat16, and air
READY_TIMEOUT_S = 270.0
PREFACE = """\
Written by `tests/bench kubernetes_on_gpu` on one machine. Kubernetes, the operator, its pods and the engine are the
real ones, unchanged. What stands in for a cluster's device plugin, container toolkit, GPU feature discovery and
container images is for tests only (`tests/bench`, `tests/cluster`). The weights have the published shapes and random
values, so the completion means nothing."""
PROMPT = "A page table maps"
FIRST_LOOK = (
    "get pods,jobs,deployments -o wide",
    "describe pods",
    "get events",
    f"logs --tail=40 -l {NAME_LABEL}",
)


@dataclass(frozen=True)
class Options:
    rehearse: bool
    variant: str
    max_model_len: int
    site: Path | None

    @property
    def name(self) -> str:
        return f"gemma-4-{self.variant.lower()}"

    def manifest(self) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "model": {"uri": f"pvc://{weights_volume.CLAIM}/{self.variant.lower()}", "servedName": self.name},
            "context": {"maxModelLen": self.max_model_len},
        }
        if self.rehearse:
            spec["accelerators"] = {"products": ["CPU"]}
            spec["pod"] = {"resources": {"limits": {"cpu": "2", "memory": "3Gi"}}}
        kind = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe"}
        return {**kind, "metadata": {"name": self.name}, "spec": spec}


def start_weights(options: Options) -> subprocess.Popen[str]:
    """Begin to write the checkpoint to the volume's folder, in a process of its own."""
    VOLUME.mkdir(parents=True)
    if not options.rehearse:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"mode=755,size={VOLUME_BYTES}", "tmpfs", str(VOLUME)], check=True
        )
    device = "cpu" if options.rehearse else "cuda"
    folder = str(VOLUME / options.variant.lower())
    writing = command("random_checkpoint", folder, f"--variant={options.variant}", f"--device={device}")
    return subprocess.Popen(writing, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def require_bridges() -> None:
    """Pods hang on a bridge. Raises ClusterError where the kernel has none, before anything waits for a pod."""
    for change in (["add", "name", "modelserve-try", "type", "bridge"], ["delete", "modelserve-try"]):
        done = subprocess.run(["ip", "link", *change], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(
                f"ip link {' '.join(change)}: {done.stderr.strip()}: this kernel has no bridges for pods"
            )


def wait_weights(writing: subprocess.Popen[str], transcript: Transcript) -> None:
    said, _ = writing.communicate(timeout=240)
    transcript.block(said)
    if writing.returncode:
        raise ClusterError(f"writing the checkpoint failed with exit status {writing.returncode}")


def show_served(served: Deployed, options: Options, transcript: Transcript) -> None:
    """Apply the ModelServe and show its life up to a completion and its calibration."""
    kubectl = served.kubectl
    transcript.stage("kubectl apply, and the conditions as they change")
    transcript.kubectl(kubectl, "apply", "-f", "-", document=yaml.safe_dump(options.manifest(), sort_keys=False))
    shown: dict[str, tuple[str, str]] = {}
    seconds = served.wait_ready(timeout_s=READY_TIMEOUT_S, seen=lambda state: transcript.condition(shown, state))
    transcript.progress(f"Ready {seconds:.0f} s after the apply")
    transcript.stage("The resource, its plan and its pod")
    transcript.kubectl(kubectl, "get", "modelserve", "-o", "wide")
    transcript.kubectl(kubectl, "get", "pods", "-o", "wide")
    transcript.block(describe_plan(served.status()["plan"]))
    transcript.stage("A completion through kubectl port-forward")
    show_completion(served.target, options, transcript)
    if not options.rehearse:  # on the CPU nothing is predicted
        show_calibration(served, transcript)
    transcript.stage("Events and the worker's log")
    columns = "custom-columns=REASON:.reason,KIND:.involvedObject.kind,MESSAGE:.message"
    transcript.kubectl(kubectl, "get", "events", "--sort-by=.metadata.creationTimestamp", "-o", columns)
    transcript.kubectl(kubectl, "logs", f"deployment/{served.owned('deployment')[0]['metadata']['name']}", "--tail=12")


def show_calibration(served: Deployed, transcript: Transcript) -> None:
    transcript.stage("Predicted and measured")
    transcript.block(f"nvidia-smi memory.used, memory.total in MiB: {gpu_node.query('memory.used,memory.total')}")
    predicted = sum(served.status()["plan"]["perGpu"].values())
    transcript.block(f"the plan's terms together, in MiB: {predicted / (1 << 20):.0f}")
    wait_for("status.calibration", lambda: "calibration" in served.status(), timeout_s=30)
    transcript.block(yaml.safe_dump({"calibration": served.status()["calibration"]}, sort_keys=False))
    learned = ("get", "configmaps", "-n", DEFAULT_NAMESPACE, "-l", f"{MANAGED_BY}={FIELD_MANAGER}")
    transcript.kubectl(served.target.kubectl, *learned, "-o", "jsonpath={.items[*].data}")


def show_completion(cluster: Target, options: Options, transcript: Transcript) -> None:
    """As from a machine that reaches nothing of the cluster but its API server."""
    body = json.dumps({"model": options.name, "prompt": PROMPT, "max_tokens": 32, "temperature": 0})
    with service_url(replace(cluster, local=None), NAMESPACE, options.name) as url:
        transcript.block(f"$ kubectl port-forward service/{options.name} {url.rpartition(':')[2]}:80 &")
        transcript.block(f"$ curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
        request = Request(f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as response:
            text = response.read().decode()
    transcript.block(text)
    if json.loads(text)["usage"]["completion_tokens"] < 1:
        raise ClusterError(f"the completion holds no token: {text}")


def run(options: Options, transcript: Transcript) -> None:
    if options.rehearse:
        gpus, profile = None, NodeProfile(services=False, fixed_memory=False, site=options.site)
        transcript.progress("rehearsal: the demo's model on the CPU")
    else:
        KERNELS.mkdir(parents=True)
        gpus, profile = gpu_node.Gpus.find(), gpu_node.profile(site=options.site, kernels=KERNELS)
        driver = gpu_node.query("driver_version").splitlines()[0]
        transcript.progress(f"{gpus.count} x {gpus.name}, {gpus.memory_mib} MiB, driver {driver}")
        transcript.progress("device nodes: " + " ".join(map(str, profile.devices)))
    require_bridges()
    writing = start_weights(options)
    try:
        transcript.stage("A single-node Kubernetes")
        cluster = target.local(LAYOUT, transcript.progress, profile)
        if gpus is not None:
            gpu_node.advertise(cluster.kubectl, gpus)
        transcript.kubectl(cluster.kubectl, "get", "nodes", "-o", "wide")
        allocatable = "jsonpath={.items[0].status.allocatable}"
        transcript.kubectl(cluster.kubectl, "get", "nodes", "-o", allocatable)
        transcript.stage("The CRD, the operator, a volume with the weights")
        install_crds(cluster.kubectl)
        operator_process.start(cluster)
        weights_volume.create_namespace(cluster, NAMESPACE, folder=VOLUME)
        wait_for("the volume's claim Bound", lambda: _bound(cluster.kubectl.within(NAMESPACE)), timeout_s=30)
        transcript.progress("the operator runs")
        wait_weights(writing, transcript)
        transcript.progress("the weights are written")
        served = Deployed(cluster, cluster.kubectl.within(NAMESPACE), options.name)
        show_served(served, options, transcript)
        if gpus is not None:
            show_next_pod(served, gpus, options, transcript)
    finally:
        writing.kill()
        writing.wait()


def show_next_pod(served: Deployed, gpus: gpu_node.Gpus, options: Options, transcript: Transcript) -> None:
    """A pod in place of one that is deleted finds its kernels compiled, as the worker's image ships them."""
    transcript.stage("A pod that takes another's place, with kernels as an image ships them")
    configs = (each["data"].get(ENGINE_FILE) for each in served.owned("configmap"))
    engine = KERNELS.with_suffix(".yaml")
    engine.write_text(next(filter(None, configs)))
    command = [sys.executable, "-m", "modelserve_worker", "kernels", f"--config={engine}", f"--output={KERNELS}"]
    command += [
        f"--model={VOLUME / options.variant.lower()}",
        f"--target=sm_{gpus.compute_capability.replace('.', '')}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    transcript.block(f"$ modelserve-worker {' '.join(command[3:])}\n{(done.stdout + done.stderr)[-1000:]}")
    if done.returncode:
        raise ClusterError("the kernels were not compiled")
    (before,) = served.owned("pod")
    transcript.kubectl(served.kubectl, "delete", "pod", before["metadata"]["name"])

    def ready() -> bool:
        others = (pod for pod in served.owned("pod") if pod["metadata"]["uid"] != before["metadata"]["uid"])
        return any(condition(pod, "Ready").get("status") == "True" for pod in others)

    seconds = wait_for("another pod Ready", ready, timeout_s=READY_TIMEOUT_S, interval_s=0.5)
    transcript.progress(f"Ready {seconds:.0f} s after the pod before it was gone")
    deployment = served.owned("deployment")[0]["metadata"]["name"]
    transcript.kubectl(served.kubectl, "logs", f"deployment/{deployment}", "--tail=12")


def _bound(kubectl: Kubectl) -> bool:
    claim = kubectl.get("persistentvolumeclaim", weights_volume.CLAIM)
    return bool(claim["status"].get("phase") == "Bound")


def show_failure(transcript: Transcript, output: Path) -> None:
    """The end of what a person looks at first; the logs in full go to logs.tar.gz."""
    kubectl = [str(build_folder() / "kubectl"), f"--kubeconfig={LAYOUT.admin_kubeconfig}", "--request-timeout=10s"]
    for look in FIRST_LOOK:
        done = subprocess.run([*kubectl, "-n", NAMESPACE, *look.split()], capture_output=True, text=True, check=False)
        transcript.block(f"$ kubectl {command}\n{(done.stdout + done.stderr)[-2000:]}")
    if LAYOUT.operator_log.exists():
        transcript.block("the operator's log:\n" + LAYOUT.operator_log.read_text(errors="replace")[-2000:])
    with tarfile.open(output / "logs.tar.gz", "w:gz") as archive:
        for folder in (LAYOUT.logs, LAYOUT.path / "pod-logs", LAYOUT.config, LAYOUT.operator_folder):
            if folder.exists():
                archive.add(folder, arcname=folder.name)


def remove(transcript: Transcript) -> None:
    operator_process.stop(LAYOUT)
    lifecycle.down(LAYOUT)
    if VOLUME.is_mount():
        subprocess.run(["umount", str(VOLUME)], check=True)
    shutil.rmtree(VOLUME, ignore_errors=True)
    shutil.rmtree(KERNELS, ignore_errors=True)
    KERNELS.with_suffix(".yaml").unlink(missing_ok=True)
    transcript.progress("operator, cluster and weights are removed")


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="the demo's model on the CPU")
    parser.add_argument("--variant", default="31B")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--site", type=Path, help="folder of packages that containers need beside the environment's")
    given = parser.parse_args()
    if given.rehearse:
        return Options(rehearse=True, variant="tiny", max_model_len=2048, site=given.site)
    return Options(rehearse=False, variant=given.variant, max_model_len=given.max_model_len, site=given.site)


def main() -> int:
    options = _options()
    output = Path(os.environ.get("OUT") or ".").resolve()
    transcript = Transcript(output / "transcript.md")
    transcript.line(f"# {options.name} on one machine, from nothing to tokens\n\n{PREFACE}\n")
    status = 1
    try:
        run(options, transcript)
        status = 0
    except Exception:
        transcript.stage("FAILED")
        transcript.block(traceback.format_exc())
        show_failure(transcript, output)
    finally:
        transcript.stage("Removal")
        remove(transcript)
    return status
