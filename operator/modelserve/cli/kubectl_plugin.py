"""`kubectl modelserve plan`: what the operator would decide in this cluster, for ModelServes of a file or of its own,
and ModelAdapters of a file.

The program is kubectl-modelserve, which kubectl finds on the PATH. It reads by kubectl, with the flags and the rights
of its caller, writes nothing, and plans by the code of `modelserve plan`. Who may not list nodes gets the API server's
dry run, with the preview of the operator's webhook, and what the operator last said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from modelserve import __version__
from modelserve.api import GROUP, KIND, PLURAL, VERSION, ModelServe, PlanStatus
from modelserve.api.model_adapter import ADAPTER_KIND, ADAPTER_PLURAL, ModelAdapterSpec
from modelserve.api.unknown_fields import without_unknown
from modelserve.catalogue import CATALOGUE_NAME
from modelserve.cli.adapter_preview import NOT_SEEN, AdapterSurroundings, adapter_preview, target_of
from modelserve.cli.plan_command import (
    EXIT_BAD_INPUT,
    EXIT_FITS,
    EXIT_NO_PLAN,
    PlanOptions,
    plan_serves,
    planned_output,
)
from modelserve.cli.plan_sources import documents, inventory_of_cluster, shown_name
from modelserve.errors import InvalidInput
from modelserve.hardware import IMAGE_ARCHITECTURES
from modelserve.model.drafters.reading import drafter_kind
from modelserve.model.model_facts import FACTS_KEY, AssistantFacts, ModelFacts
from modelserve.planning.changes import placed_on, plan_changes

EXIT_NO_CLUSTER = 1
FACTS_LABELS = "app.kubernetes.io/component=model-facts,serving.modelserve.dev/name"
RESOURCE = f"{PLURAL}.{VERSION}.{GROUP}"  # kubectl would take the latest version that is served
ADAPTERS = f"{ADAPTER_PLURAL}.{VERSION}.{GROUP}"
WARNING = "Warning: "
NO_PREVIEW = "it gave no preview: the operator's webhook is not installed (webhook.enabled), or did not answer"
NOT_COUNTED = "What workers of this cluster have measured, and the operator has learned, is not counted here."

Body = dict[str, Any]


class ClusterError(Exception):
    """kubectl could not answer; the text is its own."""

    @property
    def forbidden(self) -> bool:
        return "forbidden" in str(self).lower()


@dataclass(frozen=True)
class Kubectl:
    """kubectl with the caller's flags for cluster, user and namespace."""

    flags: tuple[str, ...]

    def run(self, *arguments: str, document: str | None = None) -> str:
        """Its standard output; warnings of the API server pass through. Raises ClusterError."""
        output, notes = self._run(*arguments, document=document)
        sys.stderr.write(notes)
        return output

    def dry_run(self, body: Body) -> tuple[list[str], bool]:
        """What the API server warns of, were the object applied, and whether anything would change.

        Raises ClusterError.
        """
        output, notes = self._run("apply", "--dry-run=server", "-f", "-", document=json.dumps(body))
        lines = [line.removeprefix(WARNING) for line in notes.splitlines() if line.startswith(WARNING)]
        return lines, " unchanged " not in output

    def as_applied(self, body: Body) -> Body:
        """The object as it would be, with its namespace. Raises ClusterError where the API server refuses it."""
        output, _ = self._run("apply", "--dry-run=server", "-f", "-", "-o", "json", document=json.dumps(body))
        found: Body = json.loads(output)
        return found

    def _run(self, *arguments: str, document: str | None) -> tuple[str, str]:
        command = [os.environ.get("KUBECTL", "kubectl"), *self.flags, *arguments]
        try:
            done = subprocess.run(command, input=document, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ClusterError(f"kubectl cannot be run: {error.strerror}; put it on the PATH") from error
        if done.returncode:
            raise ClusterError(done.stderr.strip() or f"kubectl {arguments[0]} ended with status {done.returncode}")
        return done.stdout, done.stderr

    def items(self, *arguments: str) -> list[Body]:
        """Objects of `get`, be it one or a list of them; none where nothing was found."""
        text = self.run("get", *arguments, "--ignore-not-found", "-o", "json").strip()
        found: Body = json.loads(text) if text else {"items": []}
        items: list[Body] = found.get("items", [found])
        return items

    def optional(self, *arguments: str) -> list[Body]:
        """As `items`; none either of a kind that the cluster does not have or the caller may not read."""
        try:
            return self.items(*arguments)
        except ClusterError:
            return []


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code, as `modelserve plan`, and 1 when the cluster does not answer."""
    arguments = _parser().parse_args(argv)
    try:
        print(*_plan(arguments), sep="\n", flush=True)
    except InvalidInput as error:
        print(f"kubectl modelserve: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ClusterError as error:
        print(f"kubectl modelserve: {error}", file=sys.stderr)
        return EXIT_NO_CLUSTER
    return int(arguments.code)


def _plan(arguments: argparse.Namespace) -> Iterable[str]:
    """Lines of the answer; leaves the exit code in `arguments.code`."""
    kubectl = Kubectl(tuple(_flags(arguments)))
    bodies, adapters = _bodies(kubectl, arguments)
    beside = _adapters(kubectl, arguments, adapters, bodies) if arguments.output == "table" else []
    if not bodies:
        return beside
    return (*_plans(kubectl, arguments, bodies), *(("", *beside) if beside else ()))


def _plans(kubectl: Kubectl, arguments: argparse.Namespace, bodies: list[Body]) -> Iterable[str]:
    serves = [_parsed(body, of_file=arguments.file is not None) for body in bodies]
    built = tuple(arguments.image_architecture) or IMAGE_ARCHITECTURES
    options = PlanOptions(file="", output=arguments.output, every=arguments.all, image_architectures=built)
    try:
        nodes = kubectl.items("nodes")
    except ClusterError as error:
        if not error.forbidden:
            raise
        return _without_nodes(kubectl, bodies, error, of_file=arguments.file is not None)
    pools = kubectl.optional("nodepools.karpenter.sh")
    shared = kubectl.optional("configmap", CATALOGUE_NAME, f"--namespace={arguments.operator_namespace}")
    where = inventory_of_cluster(nodes, pools, shared[0].get("data") or {} if shared else None)
    inspected, assistants = _inspected(kubectl, bodies)
    planned = plan_serves(serves, where, options, inspected=inspected, assistants=assistants)
    text, code = planned_output(planned, where, options)
    arguments.code = arguments.code or code
    if arguments.output != "table":
        return (text,)
    pairs = zip(bodies, planned, strict=True)
    beside = [line for body, entry in pairs for line in _beside(kubectl, body, entry.plan)]
    return (text, *(("", *beside) if beside else ()), "", NOT_COUNTED)


def _beside(kubectl: Kubectl, body: Body, planned: PlanStatus) -> Iterable[str]:
    """How the plan differs from the one that runs, where the object exists."""
    for live in kubectl.optional(*_named(body)):
        name, found = body["metadata"]["name"], (live.get("status") or {}).get("plan") or {}
        try:
            runs = PlanStatus.model_validate(without_unknown(PlanStatus, found)[0])
        except ValidationError:
            continue
        if not runs.fits:
            continue
        place = f"{name} has plan {runs.hash} on {placed_on(runs)}."
        if not planned.fits:
            yield f"{place} It stays: this one fits nowhere."
        elif changes := list(plan_changes(runs, planned)):
            yield f"{place} This one changes: {'; '.join(changes)}."
        else:
            yield f"{place} This one is the same."


def _adapters(kubectl: Kubectl, arguments: argparse.Namespace, bodies: list[Body], serves: list[Body]) -> list[str]:
    """What each ModelAdapter of the file would come to. Raises InvalidInput and, for what the API server refuses,
    ClusterError."""
    said: list[str] = []
    for given in bodies:
        spec, unknown = ModelAdapterSpec.parse(given.get("spec"))
        name = given.get("metadata", {}).get("name")
        if unknown or not isinstance(name, str):
            raise InvalidInput(f"{ADAPTER_KIND} {name}: {f'spec has no {unknown[0]}' if unknown else 'it has no name'}")
        body = kubectl.as_applied(given)
        lines, served = adapter_preview(body, spec, _around(kubectl, body, serves))
        said += [f"{name}: {lines[0]}", *(f"  {line}" for line in lines[1:])]
        arguments.code = arguments.code or (EXIT_FITS if served else EXIT_NO_PLAN)
    return [*said, "", NOT_SEEN] if said else []


def _around(kubectl: Kubectl, body: Body, serves: list[Body]) -> AdapterSurroundings:
    """What bears on a ModelAdapter. A ModelServe of the same file is there by then. Of other namespaces it is what the
    caller may read."""
    own, (namespace, name) = body["metadata"]["namespace"], target_of(body)
    place = f"--namespace={namespace}"
    found = kubectl.optional(RESOURCE, name, place)
    if not found:
        found = [each for each in serves if each["metadata"]["name"] == name]
    live = kubectl.optional(ADAPTERS, body["metadata"]["name"], f"--namespace={own}")
    others = kubectl.optional(ADAPTERS, "--all-namespaces") or kubectl.optional(ADAPTERS, place)
    uids = {each["metadata"]["uid"] for each in live}
    others = [each for each in others if each["metadata"]["uid"] not in uids and target_of(each) == (namespace, name)]
    granted = kubectl.optional("referencegrants.gateway.networking.k8s.io", place) if own != namespace else []
    return AdapterSurroundings(found[0] if found else None, live[0] if live else None, others, granted)


def _bodies(kubectl: Kubectl, arguments: argparse.Namespace) -> tuple[list[Body], list[Body]]:
    """ModelServes, and ModelAdapters, of the file, or ModelServes that are named. Raises InvalidInput where there is
    none."""
    if (arguments.file is None) == (not arguments.names):
        raise InvalidInput(f"name ModelServes, or give a file with -f: kubectl get {PLURAL} lists those that exist")
    if arguments.file is None:
        found = [body for name in arguments.names for body in kubectl.items(RESOURCE, name)]
        missing = set(arguments.names) - {body["metadata"]["name"] for body in found}
        if missing:
            raise InvalidInput(f"there is no {KIND} {', '.join(sorted(missing))} in this namespace")
        return found, []
    held = [body for body in documents(arguments.file) if isinstance(body, dict)]
    found, adapters = ([body for body in held if body.get("kind") == kind] for kind in (KIND, ADAPTER_KIND))
    if not found and not adapters:
        raise InvalidInput(f"{shown_name(arguments.file)} holds no {KIND} and no {ADAPTER_KIND}")
    return found, adapters


def _parsed(body: Body, *, of_file: bool) -> ModelServe:
    """Unknown fields are a mistake in a file, and of a later release in the cluster. Raises InvalidInput."""
    return ModelServe.parse(body) if of_file else ModelServe.parse_of_any_release(body)[0]


def _named(body: Body) -> tuple[str, ...]:
    """The object of the cluster, as kubectl is asked for it."""
    metadata = body["metadata"]
    place = (f"--namespace={metadata['namespace']}",) if metadata.get("namespace") else ()
    return (RESOURCE, metadata["name"], *place)


def _inspected(kubectl: Kubectl, bodies: Iterable[Body]) -> tuple[dict[str, ModelFacts], dict[str, AssistantFacts]]:
    """Facts that the operator keeps of the models of ModelServes that exist, and of their drafters, by address."""
    models, assistants = dict[str, ModelFacts](), dict[str, AssistantFacts]()
    for body in bodies:
        _, name, *place = _named(body)
        for live in kubectl.optional(*_named(body)):
            for config_map in kubectl.optional("configmap", f"--selector={FACTS_LABELS}={name}", *place):
                text, spec = (config_map.get("data") or {}).get(FACTS_KEY, ""), live["spec"]
                with contextlib.suppress(ValidationError):
                    models[str(spec["model"]["uri"])] = ModelFacts.model_validate_json(text)
                with contextlib.suppress(ValidationError):
                    facts = AssistantFacts.model_validate_json(text)
                    assistants[_named_as(spec.get("drafter") or {}, facts)] = facts
    return models, assistants


def _named_as(drafter: Body, facts: AssistantFacts) -> str:
    """Address by which a spec names a drafter: of two the one of its kind."""
    kind = drafter_kind(facts.assistant)
    alike = (each.get("uri") for each in drafter.get("models") or () if each.get("kind") == kind)
    return str(drafter.get("uri") or next(alike, None))


def _without_nodes(kubectl: Kubectl, bodies: list[Body], error: ClusterError, *, of_file: bool) -> Iterable[str]:
    """The API server's opinion of a file, and what the operator has said of what exists."""
    yield f"No plan can be made without reading nodes ({error})."
    for body in bodies:
        name = body["metadata"]["name"]
        if of_file:
            said, changes = kubectl.dry_run(body)
            told = ":" if said else f"; {NO_PREVIEW}." if changes else "; it changes nothing."
            yield f"{name}: the API server's dry run accepts it{told}"
            yield from (f"  {line}" for line in said)
        for live in kubectl.optional(*_named(body)):
            status: Mapping[str, Any] = live.get("status") or {}
            for field, what in (("plan", "runs"), ("proposedPlan", "is proposed")):
                if (status.get(field) or {}).get("message"):
                    yield f"{name}: {what}: {status[field]['message']}"


def _flags(arguments: argparse.Namespace) -> Iterable[str]:
    for flag in ("kubeconfig", "context", "namespace", "as_"):
        value = getattr(arguments, flag)
        if value is not None:
            yield f"--{flag.rstrip('_')}={value}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl modelserve", description="Preview plans in this cluster.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(code=EXIT_FITS)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what the operator would decide (exit 0 fits, 3 does not)")
    plan.add_argument("names", nargs="*", metavar="NAME", help="ModelServes that exist; they are only read")
    plan.add_argument("-f", "--file", help="YAML file with ModelServes and ModelAdapters, - for standard input")
    plan.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="form of the output")
    plan.add_argument("--all", action="store_true", help="every candidate, not only the best of each product")
    plan.add_argument(
        "--image-architecture", action="append", default=[], metavar="ARCH",
        help="CPUs that the worker's image is built for (amd64), as kubernetes.io/arch names them; may be repeated",
    )  # fmt: skip
    plan.add_argument("--operator-namespace", default="modelserve-system", help="where its catalogue is")
    plan.add_argument("-n", "--namespace", help="as of kubectl")
    plan.add_argument("--context", help="as of kubectl")
    plan.add_argument("--kubeconfig", help="as of kubectl")
    plan.add_argument("--as", dest="as_", help="as of kubectl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
