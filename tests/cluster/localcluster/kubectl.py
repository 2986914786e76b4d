"""kubectl against one cluster, for the demo and the end-to-end tests."""

from __future__ import annotations

import json
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import yaml

from localcluster.api_reader import ReadFailed, as_kubectl, paths, reader_of
from localcluster.settings import ClusterError


class KubectlError(ClusterError):
    """kubectl exited with another status than 0; the text is what it wrote."""


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl with a kubeconfig, in `namespace` unless an argument or a document names another."""

    program: Path
    kubeconfig: Path
    namespace: str | None = None

    def within(self, namespace: str) -> Kubectl:
        return replace(self, namespace=namespace)

    def run(
        self, *arguments: str, document: str | None = None, stdin: IO[bytes] | None = None, timeout_s: float = 120.0
    ) -> str:
        """Standard output of kubectl, which is given `document` or the file `stdin` to read. Raises KubectlError."""
        scope = [] if self.namespace is None else [f"--namespace={self.namespace}"]
        command = [str(self.program), f"--kubeconfig={self.kubeconfig}", *scope, *arguments]
        shown = textwrap.shorten(" ".join(arguments), 200)  # a whole program may be among them
        try:
            done = subprocess.run(
                command, input=document, stdin=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {shown} gave no answer within {timeout_s:.0f} s") from error
        if done.returncode:
            raise KubectlError(f"kubectl {shown}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *documents: Mapping[str, Any]) -> str:
        """Server-side apply of parsed manifests."""
        return self.run("apply", "--server-side", "-f", "-", document=yaml.safe_dump_all(documents))

    def get(self, *arguments: str) -> dict[str, Any]:
        """One object or a List, parsed. Without a program where the API server can be asked as easily."""
        asked = paths(arguments, self.namespace)
        reader = None if asked is None else reader_of(self.kubeconfig)
        if asked is not None and reader is not None:
            try:
                return as_kubectl([reader.get(path) for path in asked])
            except ReadFailed as error:
                raise KubectlError(f"get {' '.join(arguments)}: {error}") from error
        document: dict[str, Any] = json.loads(self.run("get", *arguments, "-o", "json"))
        return document

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.get(*arguments)["items"]
        return listed

    def exists(self, *arguments: str) -> bool:
        return bool(self.run("get", *arguments, "--ignore-not-found", "-o", "name").strip())

    def delete(self, *arguments: str) -> None:
        self.run("delete", *arguments, "--ignore-not-found")


def wait_for(what: str, ready: Callable[[], bool], *, timeout_s: float = 300.0, interval_s: float = 0.25) -> float:
    """Poll until `ready` is true and return the seconds it took. Raises ClusterError naming `what`.

    The time-out is for what never comes, and no measure: on a busy machine kubectl alone takes seconds. By what the
    operator heard of an edit is in the audit log (`audit.asked_before_answers`).
    """
    started = time.monotonic()
    while not ready():
        if time.monotonic() - started > timeout_s:
            raise ClusterError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(interval_s)
    return time.monotonic() - started


def condition(resource: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The condition of type `kind` in an object's status; empty when it has none."""
    conditions: Sequence[dict[str, Any]] = (resource.get("status") or {}).get("conditions") or ()
    return next((entry for entry in conditions if entry["type"] == kind), {})
