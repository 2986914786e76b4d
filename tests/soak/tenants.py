"""What a tenant's rollout, eviction and worker update take alone, and beside a hostile tenant; real workers on the CPU:

    PYTHONPATH=operator:worker:tests/cluster python tests/soak/tenants.py

All is real: Jobs that read the model, workers that load it, and the kubelet. The update is to another name of the
image. Seconds depend on what else the machine does; that everything ends, and that no worker of the other tenant that
served is taken, does not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from localcluster import lifecycle, operator_process, weights_volume
from localcluster.checkpoint_upload import upload_checkpoint
from localcluster.convergence import wait_converged, worker_pods
from localcluster.crds import install_crds
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.kubectl import wait_for
from localcluster.settings import Layout
from localcluster.target import Target, local

GOOD, BAD = "modelserve-tenant-a", "modelserve-tenant-b"
SIZES = ((8192, 4096), (16384, 8192))  # maxModelLen: alone, beside the other
PAIR = ("first", "second")


@contextmanager
def cluster() -> Iterator[Target]:
    layout = Layout("scratch")
    lifecycle.down(layout)
    try:
        target = local(layout, print)
        install_crds(target.kubectl)
        for namespace in (GOOD, BAD):
            weights_volume.create_namespace(target, namespace)
            upload_checkpoint(target, namespace, CHECKPOINT)
        yield target
    finally:
        operator_process.stop(layout)
        lifecycle.down(layout)


def images(served: Deployed) -> set[str]:
    return {each["spec"]["containers"][0]["image"] for each in worker_pods(served).values()}


def rollout(tenant: list[Deployed], lengths: tuple[int, ...]) -> float:
    began = time.monotonic()
    for served, length in zip(tenant, lengths, strict=True):
        served.patch({"context": {"maxModelLen": length}})
    for served in tenant:
        wait_converged(served, 1)
    return time.monotonic() - began


def eviction(served: Deployed) -> float:
    """As a drain does it, until another worker serves."""
    (only,) = worker_pods(served).values()
    name, namespace = only["metadata"]["name"], only["metadata"]["namespace"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    began = time.monotonic()
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    served.kubectl.run("create", "--raw", path, "-f", "-", document=json.dumps(body))
    wait_for("another worker", lambda: set(worker_pods(served)) - {only["metadata"]["uid"]} != set())
    wait_converged(served, 1)
    return time.monotonic() - began


def update(target: Target, tenant: list[Deployed], image: str) -> float:
    operator_process.stop(target.layout)
    settings = {"MODELSERVE_WORKER_IMAGE": image, "MODELSERVE_WORKER_POLICY": "Rolling"}
    began = time.monotonic()
    operator_process.start(target, settings=settings)
    for served in tenant:
        wait_for(f"{served.name} on {image}", lambda served=served: images(served) == {image}, timeout_s=600)
        wait_converged(served, 1)
    return time.monotonic() - began


def hostile(target: Target) -> Deployed:
    """Pods that never start, a model that is not there, and a ModelServe that serves and whose spec is then broken."""
    bad = target.kubectl.within(BAD)
    for number, more in enumerate(({"nodeSelector": {"nope": "x"}}, {}, {"resourceClaims": [CLAIM]})):
        bad.apply(pod(f"never-{number}", more))
    apply_example(target, BAD, "nowhere", model={"uri": "pvc://weights/nowhere"})
    served = apply_example(target, BAD, "typo")
    wait_converged(served, 1)
    served.patch({"plan": {"revision": "typo-0000000000"}})
    wait_for("a refused spec", lambda: served.condition("Stalled").get("reason") == "RevisionUnknown")
    return served


CLAIM = {"name": "gpu", "resourceClaimName": "nobodys"}


def pod(name: str, more: dict[str, Any]) -> dict[str, Any]:
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "train", "image": "train:1", "securityContext": security}
    container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    whole = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "securityContext": whole, **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def main() -> None:
    with cluster() as target:
        names = target.worker_image, target.worker_image.rpartition("/")[2]
        operator_process.start(target)
        tenant = [apply_example(target, GOOD, name) for name in PAIR]
        for served in tenant:
            wait_converged(served, 1)
        found: list[dict[str, float]] = []
        kept: set[str] = set()
        other: Deployed | None = None
        for number, lengths in enumerate(SIZES):
            if number:
                other = hostile(target)
                kept = set(worker_pods(other))
            took = {"rollout": rollout(tenant, lengths), "eviction": eviction(tenant[0])}
            took["update"] = update(target, tenant, names[1 - number])
            found.append(took)
            print({what: round(seconds, 1) for what, seconds in took.items()}, flush=True)
        for what, alone in found[0].items():
            beside = found[1][what]
            print(f"{what:>8}: alone {alone:5.1f} s, beside the hostile tenant {beside:5.1f} s: {beside / alone:.2f} x")
        assert other is not None
        if not kept <= set(worker_pods(other)):
            sys.exit("a worker of the other tenant was taken")


if __name__ == "__main__":
    main()
