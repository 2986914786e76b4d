"""Pods under OpenShift's restricted-v2, which assigns the user: emulated by manifest, and programs with such a user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localcluster.openshift import FIRST_USER, refusals
from modelserve.errors import InvalidInput
from modelserve.model.model_facts import ModelFacts
from modelserve_operator.cluster.kinds import DEPLOYMENT, JOB
from modelserve_operator.settings import Settings, from_environment

HUB = {"uri": "hf://example/tiny"}


def _pods(world, spec: dict[str, Any], facts: ModelFacts) -> list[dict[str, Any]]:
    """The inspect Job's pod and the worker's, as the operator makes them."""
    world.restart_operator()
    world.create(spec)
    found = [job["spec"]["template"]["spec"] for job in world.cluster.of(JOB)]
    world.cluster.end_job(message=facts.model_dump_json(by_alias=True))
    world.settle()
    return [*found, *(body["spec"]["template"]["spec"] for body in world.cluster.of(DEPLOYMENT))]


@pytest.mark.parametrize("model", [{"uri": "pvc://weights/tiny"}, HUB], ids=["claim", "download"])
def test_where_the_platform_assigns_the_user_no_pod_names_one(
    world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts, model: dict[str, Any]
) -> None:
    world.settings = from_environment({"MODELSERVE_WORKER_IMAGE": "worker:test", "MODELSERVE_POD_USER_ID": ""})
    spec = {**tiny_spec, "model": model, "apiKeySecretRef": {"name": "key", "key": "key"}}
    pods = _pods(world, spec, tiny_facts)
    assert len(pods) == 2
    for pod in pods:
        assert list(refusals(pod)) == []
        assert pod["securityContext"]["runAsNonRoot"] is True


def test_elsewhere_they_do_and_it_would_refuse_them(world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts) -> None:
    pods = _pods(world, tiny_spec, tiny_facts)
    assert [next(refusals(pod)) for pod in pods] == ["fsGroup 65532 is not in the namespace's range"] * 2
    assert Settings().pod_user_id == 65532


@pytest.mark.parametrize("value", ["0", "-1", "root"])
def test_no_pod_runs_as_root(value: str) -> None:
    with pytest.raises(InvalidInput, match="MODELSERVE_POD_USER_ID"):
        from_environment({"MODELSERVE_POD_USER_ID": value})


def _somebody() -> list[str]:
    """A command line that has the rest of it run as a user from a namespace's range, group 0, without a name."""
    prefix = ["unshare", "--user", f"--map-user={FIRST_USER}", "--map-group=0"]
    try:
        told = subprocess.run([*prefix, "id", "-u"], capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        told = ""
    if told != str(FIRST_USER):
        pytest.skip("needs user namespaces, to be somebody else")
    return prefix


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["-m", "modelserve_worker", "serve", "--config", "nope.yaml"], "nope.yaml"),
        (["-m", "modelserve.cli", "inspect", "nowhere"], "nowhere"),
        (["-m", "modelserve_operator"], "MODELSERVE_METRICS_PORT"),
    ],
    ids=["worker", "inspect", "operator"],
)
def test_a_user_without_a_name_starts_what_pods_start(tmp_path: Path, command: list[str], error: str) -> None:
    """They come as far as the first error of their own."""
    done = subprocess.run(
        [*_somebody(), sys.executable, *command],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "MODELSERVE_METRICS_PORT": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert error in done.stderr, done.stderr
