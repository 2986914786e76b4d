"""What is asked of the API server without kubectl, and what is left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localcluster.api_reader import as_kubectl, paths, reader_of

LABELLED = "?labelSelector=a%3Db%2Cc%3Dd"
APPS, CORE = "/apis/apps/v1/namespaces/team", "/api/v1/namespaces/team"


@pytest.mark.parametrize(
    ("arguments", "namespace", "asked"),
    [
        (("pods",), "team", [f"{CORE}/pods"]),
        (("pod", "one"), "team", [f"{CORE}/pods/one"]),
        (("deployments,pods", "-l", "a=b,c=d"), "team", [f"{APPS}/deployments{LABELLED}", f"{CORE}/pods{LABELLED}"]),
        (("service", "one", "-n", "team"), None, [f"{CORE}/services/one"]),
        (("pods",), None, None),
        (("pods", "one", "two"), "team", None),
        (("pods,services", "one"), "team", None),
        (("pods", "--all-namespaces"), "team", None),
        (("nodes",), "team", None),
        (("pods,nodes",), "team", None),
    ],
)  # fmt: skip
def test_it_is_asked_for_what_kubectl_would_read(
    arguments: tuple[str, ...], namespace: str | None, asked: list[str] | None
) -> None:
    assert paths(arguments, namespace) == asked


def test_objects_are_shown_as_kubectl_shows_them() -> None:
    one: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one", "managedFields": [{}]}}
    assert as_kubectl([one]) == {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}}
    bare: dict[str, Any] = {"metadata": {"name": "two", "managedFields": [{}]}}
    lists: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [bare]},
        {"apiVersion": "apps/v1", "kind": "DeploymentList", "metadata": {}, "items": []},
    ]
    shown = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "two"}}
    assert as_kubectl(lists) == {"apiVersion": "v1", "kind": "List", "items": [shown]}


def test_a_kubeconfig_without_a_certificate_is_left_to_kubectl(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text("clusters: [{cluster: {server: 'https://x'}}]\nusers: [{user: {token: secret}}]\n")
    assert reader_of(path) is None
