"""A model served from an image volume: `make image-model`.

A cluster of its own (`scratch`) with containerd 2 and a registry, both built from Go modules; the small trained
checkpoint goes into the registry as an image, and a ModelServe names it by its digest. `push` is the part inside the
node's network.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from localcluster import lifecycle, node_namespaces, operator_process, target
from localcluster.binaries import tools_folder
from localcluster.crds import install_crds
from localcluster.deployment import CHECKPOINT, apply_example
from localcluster.processes import spawn
from localcluster.record import Record
from localcluster.service_access import service_url
from localcluster.settings import ClusterError, Layout

LAYOUT = Layout("scratch")
NAMESPACE, REGISTRY, NAME = "images", "localhost:5000", "models/gemma4-tiny"


def _step(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def push() -> str:
    """Put CHECKPOINT into the registry as an image of one layer, below models/. Returns the manifest's digest."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for path in sorted(CHECKPOINT.iterdir()):
            entry = archive.gettarinfo(str(path), arcname=f"models/{path.name}")
            entry.uid = entry.gid = entry.mtime = 0
            entry.mode = 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
    plain = layer.getvalue()
    packed = gzip.compress(plain, mtime=0)
    root = {"type": "layers", "diff_ids": [_digest(plain)]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": root}).encode()
    kind = "application/vnd.oci.image"
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": _descriptor(f"{kind}.config.v1+json", config),
        "layers": [_descriptor(f"{kind}.layer.v1.tar+gzip", packed)],
    }
    for blob in (config, packed):
        _send("POST", f"blobs/uploads/?digest={_digest(blob)}", blob, "application/octet-stream")
    document = json.dumps(manifest).encode()
    _send("PUT", "manifests/latest", document, manifest["mediaType"])
    return _digest(document)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _send(method: str, path: str, body: bytes, media_type: str) -> None:
    url = f"http://{REGISTRY}/v2/{NAME}/{path}"
    with urlopen(Request(url, body, {"Content-Type": media_type}, method=method), timeout=60) as answer:
        assert answer.status in (201, 202), answer.status


def serve(programs: Path) -> None:
    """The whole of it, on the cluster that runs."""
    cluster = target.local(LAYOUT, _step)
    node = Record.load(LAYOUT)
    assert node is not None
    inside = node_namespaces.enter(node.processes["node"])
    registry = spawn([*inside, str(programs / "registry"), "--port=5000"], log=LAYOUT.logs / "registry.log")
    try:
        _step(f"pushing {CHECKPOINT.name} to {REGISTRY}/{NAME}, in the node's network")
        time.sleep(1.0)
        line = [*inside, sys.executable, str(Path(__file__).resolve()), "push"]
        pushed = subprocess.run(line, capture_output=True, text=True, check=False)
        if pushed.returncode:
            raise ClusterError(pushed.stderr[-2000:])
        digest = pushed.stdout.strip()
        install_crds(cluster.kubectl)
        operator_process.start(cluster)
        enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforced}}
        cluster.kubectl.apply(space)
        uri = f"oci://{REGISTRY}/{NAME}@{digest}"
        served = apply_example(cluster, NAMESPACE, model={"uri": uri})
        _step(f"ModelServe {served.name} with model.uri {uri}")
        took = served.wait_ready()
        (pod,) = [each for each in served.owned("pod") if "plan-hash" in str(each["metadata"]["labels"])]
        volume = next(each for each in pod["spec"]["volumes"] if each["name"] == "weights")
        _step(f"Ready after {took:.0f} s; the worker's volume: {json.dumps(volume)}")
        with service_url(cluster, NAMESPACE, served.name) as url:
            body = {"model": "gemma4-tiny", "prompt": "one two three", "max_tokens": 8, "temperature": 0}
            request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urlopen(request, timeout=60) as answer:
                said = json.load(answer)
        _step(f"model {said['model']} answers {said['choices'][0]['text']!r}, {said['usage']}")
    finally:
        registry.terminate(timeout_s=10)


def main() -> None:
    if sys.argv[1:] == ["push"]:
        print(push())
        return
    programs = tools_folder("containerd", _step)
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    _step(subprocess.run(["containerd", "--version"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        serve(programs)
    finally:
        operator_process.stop(LAYOUT)
        lifecycle.down(LAYOUT)
    _step("operator and cluster are gone")


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        sys.exit(f"error: {error}")
