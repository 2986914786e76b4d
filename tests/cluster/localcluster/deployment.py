"""A ModelServe in a cluster, as the demo and the end-to-end tests watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from localcluster.kubectl import Kubectl, condition, wait_for
from localcluster.settings import REPOSITORY, ClusterError
from localcluster.target import Target

EXAMPLE = REPOSITORY / "docs" / "examples" / "gemma4-tiny.yaml"
ADAPTED_EXAMPLE = EXAMPLE.with_name("gemma4-tiny-adapters.yaml")  # the same, and adapters
CHECKPOINT = REPOSITORY / "tests" / "models" / "gemma4-tiny-ple"  # what both serve
ADAPTERS = CHECKPOINT.with_name(f"{CHECKPOINT.name}-adapters")
NAME_LABEL = "serving.modelserve.dev/name"
READY_TIMEOUT_S = 600.0


class Stalled(ClusterError):
    """The operator gave up on a ModelServe until something changes; the text is its reason."""


@dataclass(frozen=True)
class Deployed:
    """`kubectl` is bound to the namespace."""

    target: Target
    kubectl: Kubectl
    name: str

    def resource(self) -> dict[str, Any]:
        return self.kubectl.get("modelserve", self.name)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.resource().get("status") or {}
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        return condition(self.resource(), kind)

    def owned(self, kind: str) -> list[dict[str, Any]]:
        """Children of one kind, pods included."""
        return self.kubectl.items(kind, "-l", f"{NAME_LABEL}={self.name}")

    def patch(self, spec: Mapping[str, Any]) -> None:
        self.kubectl.run("patch", "modelserve", self.name, "--type=merge", "-p", yaml.safe_dump({"spec": dict(spec)}))

    def wait_ready(
        self, *, timeout_s: float = READY_TIMEOUT_S, seen: Callable[[dict[str, Any]], None] = lambda resource: None
    ) -> float:
        """Wait until Ready is True for the present generation; `seen` gets every state on the way.

        Returns seconds. Raises ClusterError with the reason when that generation stalls or it takes too long.
        """

        def ready() -> bool:
            resource = self.resource()
            seen(resource)
            generation = resource["metadata"]["generation"]
            stalled = condition(resource, "Stalled")
            if stalled.get("status") == "True" and stalled.get("observedGeneration") == generation:
                raise Stalled(f"ModelServe {self.name} stalled: {stalled['reason']}: {stalled['message']}")
            state = condition(resource, "Ready")
            return state.get("observedGeneration") == generation and state.get("status") == "True"

        try:
            return wait_for(f"ModelServe {self.name} Ready", ready, timeout_s=timeout_s, interval_s=0.5)
        except Stalled:
            raise
        except ClusterError as error:
            last = self.condition("Ready")
            raise ClusterError(f"{error}; Ready is {last.get('reason')}: {last.get('message')}") from error


def example(name: str | None = None, **spec: Any) -> dict[str, Any]:
    """docs/examples/gemma4-tiny.yaml, under another name and with some top-level spec fields replaced."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    if name is not None:
        document["metadata"]["name"] = name
    document["spec"] |= spec
    return document


def apply_example(target: Target, namespace: str, name: str | None = None, **spec: Any) -> Deployed:
    document = example(name, **spec)
    kubectl = target.kubectl.within(namespace)
    kubectl.apply(document)
    return Deployed(target, kubectl, document["metadata"]["name"])


def adapted_example() -> list[dict[str, Any]]:
    """docs/examples/gemma4-tiny-adapters.yaml: a ModelServe and its ModelAdapters."""
    return list(yaml.safe_load_all(ADAPTED_EXAMPLE.read_text()))
