"""Nothing that the stock role `edit` can forge runs: it is refused by name, and nothing is touched."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from localcluster.convergence import workers_of
from localcluster.deployment import Deployed
from localcluster.kubectl import Kubectl, KubectlError, wait_for
from localcluster.target import Target
from modelserve_operator import labels
from modelserve_operator.revisions.revision import content_digest

NAMESPACE = "modelserve-e2e"
TENANT = "tenant"
FORGED = "aaaaaaaaaa"


@pytest.fixture
def tenant(cluster: Target) -> Iterator[Kubectl]:
    """kubectl as administrator, where a user `tenant` has the stock role `edit` in the namespace."""
    kubectl = cluster.kubectl.within(NAMESPACE)
    kubectl.run("create", "rolebinding", TENANT, "--clusterrole=edit", f"--user={TENANT}")
    # The API server's authorizer hears of it by a watch.
    wait_for("the role in force", lambda: _can(kubectl, "create", "configmaps"))
    yield kubectl
    kubectl.delete("rolebinding", TENANT)


def _as_tenant(kubectl: Kubectl, *arguments: str, document: Any = None) -> str:
    text = None if document is None else json.dumps(document)
    return kubectl.run(*arguments, f"--as={TENANT}", document=text)


def _can(kubectl: Kubectl, verb: str, resource: str, subresource: str = "") -> bool:
    question = ("auth", "can-i", verb, resource, f"--subresource={subresource}", f"--as={TENANT}")
    try:
        return "yes" in kubectl.run(*question)
    except KubectlError:  # "no" is exit code 1
        return False


def _renamed(body: dict[str, Any]) -> dict[str, Any]:
    """The object under the forger's hash, as one would create it."""
    made = copy.deepcopy(body)
    metadata = made["metadata"]
    old = metadata["labels"][labels.PLAN_HASH]
    made["metadata"] = {
        "name": metadata["name"].replace(old, FORGED),
        "namespace": metadata["namespace"],
        "labels": {**metadata["labels"], labels.PLAN_HASH: FORGED},
        # With blockOwnerDeletion the API server refuses it to whoever may not set finalizers of a ModelServe.
        "ownerReferences": [{**each, "blockOwnerDeletion": False} for each in metadata["ownerReferences"]],
    }
    return made


def _said(kubectl: Kubectl, name: str, reason: str) -> list[str]:
    chosen = f"--field-selector=involvedObject.name={name},reason={reason}"
    return [event["message"] for event in kubectl.items("events", chosen)]


def _everything(served: Deployed) -> set[tuple[str, str, str]]:
    kinds = "deployments,controllerrevisions.apps,replicasets,services,poddisruptionbudgets,jobs"
    return {(each["kind"], each["metadata"]["name"], each["metadata"]["uid"]) for each in served.owned(kinds)}


def test_what_edit_can_forge_runs_nothing(tiny: Deployed, tenant: Kubectl, cluster: Target) -> None:
    assert _can(tenant, "patch", "deployments.apps")
    for verb in ("create", "update", "patch", "delete"):
        assert not _can(tenant, verb, "controllerrevisions.apps")
    assert not _can(tenant, "patch", "modelserves.serving.modelserve.dev", "status")

    (real,) = tiny.owned("controllerrevisions.apps")
    name = real["metadata"]["name"]
    workers, before = workers_of(cluster), _everything(tiny)
    forged_name = _renamed(real)["metadata"]["name"]

    revision = _renamed(real)
    revision["data"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
    revision["data"]["name"], revision["revision"] = forged_name, 99
    revision["data"]["digest"] = content_digest(revision["data"])
    with pytest.raises(KubectlError, match="forbidden"):
        _as_tenant(tenant, "create", "-f", "-", document=revision)
    revision["metadata"]["ownerReferences"] = []  # by somebody who may, without the owner that vouches for it
    tenant.run("create", "-f", "-", document=json.dumps(revision))

    (settings,) = (each for each in tiny.owned("configmaps") if each["metadata"]["name"] == name)
    config_map = _renamed(settings)
    config_map["metadata"]["annotations"] = {f"{labels.GROUP}/committed-at": "2099-01-01T00:00:00Z"}
    config_map["data"] |= {
        "template.json": json.dumps(revision["data"]["template"]),
        "plan.json": json.dumps(real["data"]["plan"]),
        "revision.json": '{"weightBytes": 1}',
    }
    _as_tenant(tenant, "create", "-f", "-", document=config_map)
    committed = f"{labels.GROUP}/committed-at"
    later = {"reason": "X", "message": "x", "attempts": 1, "at": "2099-01-01T00:00:00+00:00", "trying": False}
    failure = json.dumps(later)
    _as_tenant(tenant, "annotate", "deployment", name, f"{committed}=2099", f"{labels.TERMINAL_FAILURE}={failure}")
    try:
        wait_for("the Events", lambda: len(_said(tenant, tiny.name, "RevisionRefused")) == 2)
        wait_for("the Event", lambda: _said(tenant, tiny.name, "AnnotationRefused") != [])
        refused = " ".join(_said(tenant, tiny.name, "RevisionRefused"))
        assert f"ControllerRevision {forged_name}" in refused
        assert f"ConfigMap {forged_name}" in refused
        annotated = _said(tenant, tiny.name, "AnnotationRefused")[-1]
        assert f"Deployment {name}" in annotated
        assert committed in annotated
        assert labels.TERMINAL_FAILURE in annotated
        added = ("ControllerRevision", forged_name)
        assert {each for each in _everything(tiny) if each[:2] != added} == before, (
            "nothing runs, and nothing is touched"
        )
        assert workers_of(cluster) == workers
        assert tiny.condition("Ready")["status"] == "True"
        assert tiny.status()["revision"] == name
    finally:
        tenant.delete("controllerrevision.apps", forged_name)
        tenant.delete("configmap", forged_name)
        tenant.run("annotate", "deployment", name, f"{committed}-", f"{labels.TERMINAL_FAILURE}-")
    wait_for("nothing left to say", lambda: "refused" not in tiny.condition("Planned")["message"])
