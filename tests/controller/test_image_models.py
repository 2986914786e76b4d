"""oci://: a model inside an image that the pod mounts; nothing is downloaded, and what is read is what is served."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.api import ModelServe
from modelserve.errors import InvalidInput
from modelserve.model.model_facts import ModelFacts
from modelserve_operator.cluster.kinds import CLAIM, CONFIG_MAP, DEPLOYMENT, JOB

HEAD = {
    "apiVersion": "serving.modelserve.dev/v1alpha1",
    "kind": "ModelServe",
    "metadata": {"name": "x", "namespace": "ml"},
}
DIGEST = "sha256:" + "a1" * 32
PINNED, TAGGED = f"oci://registry.example.com:5000/models/tiny@{DIGEST}", "oci://registry.example.com/models/tiny:1.2"


def _pod(body: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = body["spec"]["template"]["spec"]
    return pod


def _weights(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = [each for each in pod["volumes"] if each["name"] == "weights"]
    return found


def _create(world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts, **model: str) -> None:
    world.create({**tiny_spec, "model": model})
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()


def test_job_and_workers_mount_the_image_that_the_spec_names(world, tiny_spec, tiny_facts) -> None:
    secrets = {"imagePullSecrets": [{"name": "registry"}]}
    world.create({**tiny_spec, "model": {"uri": PINNED}, "pod": {**tiny_spec["pod"], **secrets}})
    image = {"reference": PINNED.removeprefix("oci://"), "pullPolicy": "IfNotPresent"}
    (job,) = world.cluster.of(JOB)
    assert _weights(_pod(job)) == {"name": "weights", "image": image}
    assert _pod(job)["containers"][0]["command"][:3] == ["modelserve", "inspect", "/models/models"]
    assert "initContainers" not in _pod(job), "there is nothing to download"
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    (deployment,) = world.cluster.of(DEPLOYMENT)
    pod = _pod(deployment)
    assert _weights(pod) == {"name": "weights", "image": image}
    assert "initContainers" not in pod
    assert pod["imagePullSecrets"] == secrets["imagePullSecrets"], "those of the pod are those of the image"
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "weights"]
    assert mount == {"name": "weights", "mountPath": "/models", "readOnly": True}
    engine = next(each["data"] for each in world.cluster.of(CONFIG_MAP) if "engine.yaml" in each["data"])["engine.yaml"]
    assert "model: /models/models\n" in engine
    assert "servedModelName: tiny\n" in engine, "neither a tag nor a digest is a part of the name"
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert "not pinned" not in world.message("Planned")


def test_a_tag_is_said_to_be_unpinned_and_served(world, tiny_spec, tiny_facts) -> None:
    world.create({**tiny_spec, "model": {"uri": TAGGED}})
    assert "not pinned" in world.message("Planned"), "before anything is read"
    assert [each["type"] for each in world.cluster.events if each["reason"] == "ModelUnpinned"] == ["Warning"]
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")


def test_another_directory_of_the_image_is_another_model(world, tiny_spec, tiny_facts) -> None:
    _create(world, tiny_spec, tiny_facts, uri=PINNED)
    world.make_ready()
    before = world.revision()
    world.edit(model={"uri": PINNED, "imagePath": "weights/gemma"})
    (job,) = world.cluster.of(JOB)
    assert _pod(job)["containers"][0]["command"][2] == "/models/weights/gemma", "it is read anew"
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.revision() != before
    assert len(world.deployments()) == 2, "the old one serves until the new one is ready"


def test_a_claim_of_downloads_is_no_business_of_an_image(world, tiny_spec, tiny_facts) -> None:
    """A ReadWriteOnce claim keeps nobody from several workers that do not mount it."""
    claim = {"metadata": {"name": "cache", "namespace": "ml"}, "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {}}
    world.cluster.put(CLAIM, claim)
    world.create({**tiny_spec, "model": {"uri": PINNED}, "storage": {"pvcName": "cache"}, "replicas": 2})
    assert world.condition("Accepted") == ("True", "Valid")


@pytest.mark.parametrize(
    "uri",
    [
        "oci://",
        "oci://registry",
        "oci://Registry/x",
        "oci://r/x@sha256:abc",
        "oci://r/../x",
        "oci://r/x:",
        "oci://r/x y",
    ],
)
def test_what_is_no_reference_is_refused(uri: str) -> None:
    with pytest.raises(InvalidInput, match="is not a model address"):
        ModelServe.parse({**HEAD, "spec": {"model": {"uri": uri}}})
