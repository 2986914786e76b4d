"""A revision: a committed plan with everything its pods are made of. Its ControllerRevision is its only memory.

`data` of a ControllerRevision never changes, so keys that a later release writes stay where they are, and are ignored
here. `schemaVersion` grows only when an older release could no longer read the rest; a digest over all finds damage.
Who may write ControllerRevisions is trusted: that is a matter of RBAC, which no digest takes the place of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml
from pydantic import ValidationError

from modelserve.api import PlanStatus
from modelserve.api.unknown_fields import without_unknown
from modelserve.planning.pools.pinning import besides_architecture
from modelserve_operator import labels
from modelserve_operator.revisions.spec_inputs import SpecInputs, inputs_of_any_release

Body = Mapping[str, Any]

SCHEMA_VERSION = 1
ENGINE_FILE = "engine.yaml"
RESOLVE_CONTAINER = "resolve"
FETCH_DRAFTER_CONTAINERS = ("fetch-drafter", "fetch-drafter-2")  # of the plan's drafters, in their order
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the C form, where PyYAML was built with it, is much faster


class UnreadableRevisionError(Exception):
    """A ControllerRevision that this release cannot read, with why, for people."""


@dataclass(frozen=True)
class Worker:
    """What the pods run: the image, and the release that it is taken for, whose dialect its settings are in."""

    image: str
    release: str


@dataclass(frozen=True)
class Provenance:
    """Who made a revision of what."""

    renderer: str = ""  # release that rendered the template and the settings
    planner: str = ""  # release that the plan's hash is of
    build: str = ""  # of the renderer, where its image names one
    generation: int = 0  # of the ModelServe when it was committed
    approved_by: str = ""  # field manager of the spec, or of the approval
    imported_from: str = ""  # release whose own format it was read from
    policy: str = ""  # for other worker images, when it was committed
    replanned_from: str = ""  # hash of the revision that it replaced by itself
    moved_from: tuple[str, ...] = ()  # hashes of the revisions, and their plans, that it is with another worker
    moved_from_ready: bool = True  # a worker of the first of them was ready then: if this one fails, that is new


@dataclass(frozen=True)
class Revision:
    """`hash` covers plan, image, placement and the pod-relevant spec; `plan.hash` is the planner's.

    `template` is a PodTemplateSpec and `engine` the worker's settings, both as they were rendered when the revision was
    committed. `number` orders commits: the largest is the last one, 0 is none yet. `inputs` None: of an unknown spec.
    """

    hash: str
    plan: PlanStatus
    engine: Mapping[str, Any]
    template: Mapping[str, Any]
    weight_bytes: int
    worker: Worker
    inputs: SpecInputs | None
    spec: Mapping[str, Any] = field(default_factory=dict)  # what `inputs` are hashes of, in canonical form
    source: str = ""  # hash of the model's address and revision
    identity: str = ""  # of the checkpoint's files, where an inspection has read them
    commit: str = ""  # of the Hub, that the first of its pods resolved the revision to; an annotation of the object
    drafter_sources: tuple[str, ...] = ()  # of the plan's drafters: hash of address and revision, where that may move
    drafter_commits: tuple[str, ...] = ()  # the commits of these, as far as they are known
    provenance: Provenance = field(default_factory=Provenance)
    undone: bool = False  # it replaced another one by itself and was given up for it; an annotation of the object
    number: int = 0

    @property
    def engine_yaml(self) -> str:
        """The settings as the worker's file has them."""
        return _as_yaml(_json(self.engine))

    @property
    def served_name(self) -> str:
        """Name of the model in the API."""
        return str(self.engine.get("servedModelName"))

    @property
    def model(self) -> tuple[str, str]:
        """What is served: the directory in the pod, and the volume it lies on, unless it was downloaded there."""
        pod = self.template.get("spec") or {}
        volumes = [volume for volume in pod.get("volumes") or () if volume.get("name") == "weights"]
        downloaded = any(each.get("name") not in FETCH_DRAFTER_CONTAINERS for each in pod.get("initContainers") or ())
        where = "" if downloaded else _json(volumes)
        return str(self.engine.get("model")), where

    @property
    def unresolved(self) -> bool:
        """Whether its pods ask the Hub which commit they should serve: nobody knows yet."""
        return not self.commit and any(each.get("name") == RESOLVE_CONTAINER for each in self._before)

    @property
    def unresolved_drafters(self) -> tuple[int, ...]:
        """Which of its drafters' revisions may move, and nobody knows yet where to."""
        asking = {each.get("name") for each in self._before if "--recorded" in each.get("command", ())}
        numbered = enumerate(FETCH_DRAFTER_CONTAINERS)
        return tuple(number for number, name in numbered if name in asking and not self.drafter_commit(number))

    def drafter_commit(self, number: int) -> str:
        """Of one of its drafters; empty where it is not known."""
        return self.drafter_commits[number] if number < len(self.drafter_commits) else ""

    @property
    def pinned_drafters(self) -> tuple[tuple[str, str], ...]:
        """(hash of the address, commit) of its drafters, as far as they are resolved."""
        pairs = ((of, self.drafter_commit(number)) for number, of in enumerate(self.drafter_sources))
        return tuple((of, commit) for of, commit in pairs if of and commit)

    @property
    def _before(self) -> tuple[Mapping[str, Any], ...]:
        """What runs before the worker."""
        return tuple((self.template.get("spec") or {}).get("initContainers") or ())

    @property
    def runs(self) -> tuple[Any, ...]:
        """What another revision of the same spec would have to differ in to be worth a proposal."""
        secrets = (self.template.get("spec") or {}).get("imagePullSecrets") or []
        return self.plan.hash, besides_architecture(self.plan.node_selector_terms), self.worker.image, _json(secrets)

    def to_data(self, name: str) -> dict[str, Any]:
        """`data` of the ControllerRevision NAME-HASH."""
        made = self.provenance
        document = {
            "schemaVersion": SCHEMA_VERSION,
            "name": labels.revision_name(name, self.hash),
            "generation": made.generation,
            "approvedBy": made.approved_by,
            "inputs": {**self.inputs.to_json(), "spec": self.spec} if self.inputs is not None else None,
            "plan": bare(self.plan).to_json(),
            "engine": self.engine,
            "template": self.template,
            "weightBytes": self.weight_bytes,
            "source": self.source,
            "modelIdentity": self.identity,
            "worker": {"image": self.worker.image, "release": self.worker.release},
            "renderer": {"release": made.renderer, "build": made.build},
            "planner": {"release": made.planner},
            "importedFrom": made.imported_from,
            "workerPolicy": made.policy,
            "movedFrom": list(made.moved_from),
            **({"movedFromReady": made.moved_from_ready} if made.moved_from else {}),
            **({"replannedFrom": made.replanned_from} if made.replanned_from else {}),
        }
        if len(self.drafter_sources) > 1:
            document["drafterSources"] = list(self.drafter_sources)
        elif any(self.drafter_sources):
            document["drafterSource"] = self.drafter_sources[0]
        return {**document, "digest": content_digest(document)}


def bare(plan: PlanStatus) -> PlanStatus:
    """A plan without the candidates that were not chosen: they are no part of what runs, and there may be many."""
    return plan.model_copy(update={"candidates": tuple(each for each in plan.candidates if each.verdict == "Chosen")})


def content_digest(document: Mapping[str, Any]) -> str:
    """SHA-256 over canonical JSON of everything but the digest itself, keys of later releases included."""
    covered = {key: value for key, value in document.items() if key != "digest"}
    return f"sha256:{hashlib.sha256(_json(covered).encode()).hexdigest()}"


def revision_of(body: Body) -> Revision:
    """Read a ControllerRevision. Raises UnreadableRevisionError."""
    data = body.get("data")
    if not isinstance(data, Mapping):
        raise UnreadableRevisionError("it has no data")
    version = data.get("schemaVersion")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise UnreadableRevisionError(
            f"schemaVersion {version} is not known; this release reads up to {SCHEMA_VERSION}"
        )
    if data.get("digest") != content_digest(data):
        raise UnreadableRevisionError("its content is damaged: it does not match its digest")
    if data.get("name") != body["metadata"]["name"]:
        raise UnreadableRevisionError(f"it is a copy of {data.get('name')}")
    try:
        return _parsed(body, data)
    except (KeyError, ValueError, TypeError, AttributeError, ValidationError) as error:
        raise UnreadableRevisionError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _parsed(body: Body, data: Mapping[str, Any]) -> Revision:
    plan, _ = without_unknown(PlanStatus, data["plan"])
    worker, renderer = data["worker"], data["renderer"]
    inputs, spec = inputs_of_any_release(data["inputs"]) if data["inputs"] is not None else (None, {})
    return Revision(
        hash=str(data["name"])[-labels.HASH_LENGTH :],
        plan=PlanStatus.model_validate(plan),
        engine=dict(data["engine"]),
        template=dict(data["template"]),
        weight_bytes=int(data["weightBytes"]),
        worker=Worker(str(worker["image"]), str(worker["release"])),
        inputs=inputs,
        spec=spec,
        source=str(data.get("source", "")),
        identity=str(data.get("modelIdentity", "")),
        commit=labels.annotation_of(body, labels.MODEL_COMMIT) or "",
        drafter_sources=tuple(map(str, data.get("drafterSources") or filter(None, [data.get("drafterSource")]))),
        drafter_commits=_drafter_commits(body),
        provenance=Provenance(
            renderer=str(renderer["release"]),
            planner=str(data["planner"]["release"]),
            build=str(renderer.get("build", "")),
            generation=int(data["generation"]),
            approved_by=str(data.get("approvedBy", "")),
            imported_from=str(data.get("importedFrom", "")),
            policy=str(data.get("workerPolicy", "")),
            replanned_from=str(data.get("replannedFrom", "")),
            moved_from=tuple(map(str, data.get("movedFrom", ()))),
            moved_from_ready=data.get("movedFromReady") is not False,
        ),
        undone=labels.annotation_of(body, labels.UNDONE) is not None,
        number=int(body.get("revision") or 0),
    )


def _drafter_commits(body: Body) -> tuple[str, ...]:
    several, one = (labels.annotation_of(body, each) for each in (labels.DRAFTER_COMMITS, labels.DRAFTER_COMMIT))
    return tuple(several.split(",")) if several else (one,) if one else ()


def _json(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@lru_cache(maxsize=1024)  # many ModelServes are alike
def _as_yaml(document: str) -> str:
    return str(yaml.dump(json.loads(document), Dumper=_DUMPER, sort_keys=True))
