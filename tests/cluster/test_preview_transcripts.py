"""docs/preview.md as it is printed by a real API server, with the operator and the webhook as processes beside it.

MODELSERVE_WRITE_TRANSCRIPTS=1 writes what is printed now into the page.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from localcluster.control_plane import ControlPlane, control_plane
from localcluster.kubectl import wait_for
from localcluster.operator_process import permissions, process_environment
from localcluster.preview_webhook import CONFIGURATION, PreviewWebhook, at_url, chart_objects, preview_webhook
from localcluster.processes import free_ports, spawn
from localcluster.settings import REPOSITORY
from localcluster.tenant import TENANT
from localcluster.transcripts import entries, rewritten, without_hashes

pytestmark = pytest.mark.e2e

PAGE = REPOSITORY / "docs" / "preview.md"
NODES = REPOSITORY / "docs" / "examples" / "nodes" / "h100-l4.yaml"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with control_plane() as found:
        for node in yaml.safe_load_all(NODES.read_text()):
            if node["kind"] != "Node":  # of Karpenter, which this cluster has not
                continue
            found.kubectl.run("create", "-f", "-", document=json.dumps(node))
            found.kubectl.run("taint", "node", node["metadata"]["name"], "node.kubernetes.io/not-ready-")
        found.kubectl.run("apply", "-f", "-", document=TENANT)
        yield found


@pytest.fixture(scope="module")
def operator(plane: ControlPlane) -> Iterator[None]:
    plane.kubectl.apply(*permissions())
    (port,) = free_ports(1)
    environment = process_environment(plane.operator_kubeconfig, port)
    command = [sys.executable, "-m", "modelserve_operator"]
    process = spawn(command, log=plane.folder / "operator.log", environment=environment)
    yield
    process.terminate(timeout_s=20)


@pytest.fixture(scope="module")
def webhook(plane: ControlPlane) -> Iterator[PreviewWebhook]:
    with preview_webhook(plane) as found:
        wait_for(
            "the API server trusts the webhook",
            lambda: "Warning: " in _run(plane, f"kubectl apply --dry-run=server -f {EXAMPLE}"),
        )
        yield found


EXAMPLE = "docs/examples/gemma4-31b.yaml"
EDIT = """kubectl patch modelserve gemma-4-31b --dry-run=server --type=merge -p '{"spec": {"replicas": 2}}'"""


def _run(plane: ControlPlane, command: str) -> str:
    """Everything that a command of the page prints."""
    programs = [Path(plane.kubectl.program).parent, REPOSITORY / ".venv" / "bin", os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, programs))}
    environment["KUBECONFIG"] = str(plane.kubectl.kubeconfig)
    done = subprocess.run(
        command,
        shell=True,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def test_every_transcript_of_the_page_is_what_is_printed(
    plane: ControlPlane, operator: None, webhook: PreviewWebhook
) -> None:
    """In the order of the page: what one applies, the next ones edit. The operator commits what was previewed."""

    def run(command: str) -> str:
        printed = _run(plane, command)
        if command.startswith("kubectl apply -f"):
            wait_for("it is committed", lambda: bool(_status(plane).get("revision")))
        return printed

    def text(command: str) -> str:
        return "".join(line + "\n" for line in run(command).splitlines())

    if os.environ.get("MODELSERVE_WRITE_TRANSCRIPTS"):
        PAGE.write_text(rewritten(PAGE, text))
        return
    for entry in entries(PAGE):
        assert without_hashes(text(entry.command)) == without_hashes(entry.output), entry.command


def _status(plane: ControlPlane) -> dict[str, object]:
    found: dict[str, object] = plane.kubectl.get("modelserve", "gemma-4-31b", "-n", "default").get("status") or {}
    return found


def test_at_rest_the_charts_objects_differ_in_nothing(plane: ControlPlane, webhook: PreviewWebhook) -> None:
    """A GitOps tool would try to put right what differs: neither certificate nor bundle is a difference to it."""
    assert plane.kubectl.get("secret", CONFIGURATION.removeprefix("modelserve-system-"), "-n", "modelserve-system")[
        "data"
    ]
    documents = []
    for body in chart_objects():
        if body["kind"] in ("Secret", "ValidatingWebhookConfiguration"):
            documents.append(at_url(body, webhook.port) if "webhooks" in body else body)
    for flags in ((), ("--server-side",)):
        plane.kubectl.run("diff", *flags, "-f", "-", document=yaml.safe_dump_all(documents))  # raises where they differ


def _ignored(plane: ControlPlane) -> int:
    """Calls of the webhook that failed, and were ignored."""
    lines = plane.kubectl.run("get", "--raw", "/metrics").splitlines()
    return sum(
        int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("apiserver_admission_webhook_fail_open_count{")
    )


@pytest.mark.parametrize("fault", ["down", "blackholed"])
def test_where_the_webhook_does_not_answer_an_apply_goes_on_without_it(
    plane: ControlPlane, webhook: PreviewWebhook, fault: str
) -> None:
    (body,) = (each for each in chart_objects() if each["kind"] == "ValidatingWebhookConfiguration")
    name = f"{fault}-example"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if fault == "blackholed":  # connections are taken by the kernel, and nobody ever reads them
            silent.listen(16)
        plane.kubectl.apply(at_url(body, silent.getsockname()[1], waits_s=1))
        before = _ignored(plane)

        renamed = f"sed 's/gemma-4-31b/{name}/' {EXAMPLE} | kubectl apply -f -"

        def unanswered() -> bool:
            assert "created (server dry run)" in _run(plane, f"{renamed} --dry-run=server")
            return _ignored(plane) > before

        wait_for("the API server asks the address that does not answer", unanswered)
        printed = _run(plane, renamed)
    assert printed == f"modelserve.serving.modelserve.dev/{name} created\n"
    plane.kubectl.apply(at_url(body, webhook.port))
    wait_for("its preview is back", lambda: "Warning: " in _run(plane, EDIT))
