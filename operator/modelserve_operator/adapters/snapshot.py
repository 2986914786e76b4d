"""The frozen snapshot that one reconcile of a ModelServe's adapters decides on. Everything in it was read by
`modelserve_operator.gathering.adapter_gatherer`; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from modelserve.api import ModelServeSpec
from modelserve.api.model_adapter import ModelAdapterSpec
from modelserve.errors import InvalidInput, first_fault
from modelserve_operator import labels
from modelserve_operator.adapters.reasons import AdapterReason
from modelserve_operator.process.work_queue import Key

Body = Mapping[str, Any]

READY, FAILED, NO_EFFECT, PARTLY, DRAINING = "Ready", "Failed", "NoEffect", "PartlyNoEffect", "Draining"
BROKEN = frozenset({FAILED, NO_EFFECT, PARTLY})
MOST_REPORTED = 4096  # entries of a worker's answer that are read


class _Told(BaseModel):
    """Part of a worker's answer: what a later release adds to it is not looked at."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True)


Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Probe(_Told):
    """How answers with an adapter differ from the base's: KL in nats, share of changed top tokens, and how large its
    terms are, by kind of linear."""

    kl: float = Field(ge=0, allow_inf_nan=False)
    top1_changed: float = Field(ge=0, le=1, allow_inf_nan=False)
    prompts: int = Field(ge=0, le=1 << 20)
    strength: dict[Annotated[str, Field(max_length=32)], Strength] = Field(default_factory=dict, max_length=16)


class Loaded(_Told):
    """What a worker says of one version of an adapter."""

    name: Annotated[str, Field(max_length=128)]
    id: Annotated[str, Field(max_length=128)]
    uri: str = ""
    state: str
    weight: int | None = Field(default=None, ge=0, le=100)  # percent of requests that it is to answer
    reason: str | None = None
    message: str | None = None
    digest: Annotated[str, Field(max_length=128)] | None = None
    rank: int | None = Field(default=None, ge=0, le=1 << 20)
    size_bytes: int | None = Field(default=None, ge=0, le=1 << 53, alias="bytes")
    probe: Probe | None = None


def loaded_of(document: object) -> tuple[Loaded, ...]:
    """Read the body of a worker's GET /v1/adapters. Raises ValueError for another shape."""
    entries = document.get("adapters") if isinstance(document, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError("its answer has no list of adapters")
    try:
        return tuple(map(Loaded.model_validate, entries[:MOST_REPORTED]))
    except ValidationError as error:
        field, message = first_fault(error)
        raise ValueError(f"its answer: {field}: {message}") from error


def names_versions(document: object) -> bool:
    """Whether the worker that gave this answer takes NAME@ID for a version."""
    return isinstance(document, Mapping) and document.get("versionNames") is True


@dataclass(frozen=True)
class Problem:
    """Why a worker does not serve what it should: reason in one word, message for people."""

    reason: str
    message: str


@dataclass(frozen=True)
class AdapterWorker:
    """A worker pod. `loaded` None: it has not answered. `took`: digest of the set that this run of it took last, as
    far as this process knows; `problem`: why it did not answer, or did not take the set."""

    name: str
    uid: str
    ready: bool
    loaded: tuple[Loaded, ...] | None = None
    took: str | None = None
    problem: Problem | None = None
    names_versions: bool = False  # it answers requests for NAME@ID with that version

    @property
    def counts(self) -> bool:
        """Whether adapters have to be Ready on it: it takes requests, or will, and can be asked."""
        return self.ready or self.loaded is not None

    @property
    def may_have_adapters(self) -> bool:
        """Whether it was started with room for them, as far as it has said."""
        return self.problem is None or self.problem.reason != AdapterReason.WORKERS_WITHOUT

    def version(self, name: str, version_id: str) -> Loaded | None:
        """What it says of a version."""
        found = (each for each in self.loaded or () if (each.name, each.id) == (name, version_id))
        return next(found, None)

    def serves(self, name: str, version_id: str) -> bool:
        """Whether the version is Ready there."""
        found = self.version(name, version_id)
        return found is not None and found.state == READY


@dataclass(frozen=True)
class Adapter:
    """One ModelAdapter. `spec` None: it is invalid, as `fault` says."""

    body: Body
    spec: ModelAdapterSpec | None
    fault: str = ""
    token: str | None = field(default=None, repr=False)  # of its Secret
    secret_fault: str | None = None

    @classmethod
    def of(cls, body: Body, *, token: str | None = None, secret_fault: str | None = None) -> Adapter:
        """Read an object of the cluster."""
        try:
            spec, _ = ModelAdapterSpec.parse(body.get("spec"))
        except InvalidInput as error:
            return cls(body, None, str(error))
        return cls(body, spec, token=token, secret_fault=secret_fault)

    @property
    def key(self) -> Key:
        return Key(str(self.body["metadata"]["namespace"]), str(self.body["metadata"]["name"]))

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def leaving(self) -> bool:
        """Whether it is being deleted."""
        return bool(self.body["metadata"].get("deletionTimestamp"))

    @property
    def held(self) -> bool:
        """Whether its deletion waits for us."""
        return labels.DRAIN_ADAPTER in (self.body["metadata"].get("finalizers") or ())

    @property
    def status(self) -> Mapping[str, Any]:
        return self.body.get("status") or {}

    @property
    def served_name(self) -> str:
        """`model` of requests for it."""
        return (self.spec.served_name if self.spec else None) or self.key.name

    @property
    def age(self) -> tuple[str, str, str]:
        """Smaller for older ones."""
        return str(self.body["metadata"].get("creationTimestamp") or ""), *self.key


@dataclass(frozen=True)
class AdapterSnapshot:
    """The ModelAdapters that refer to one ModelServe, and what bears on them. `model_serve` None: there is none."""

    key: Key  # of the ModelServe
    adapters: tuple[Adapter, ...]
    model_serve: Body | None = None
    spec: ModelServeSpec | None = None  # None: it cannot be read
    workers: tuple[AdapterWorker, ...] = ()
    grants: tuple[Body, ...] = ()  # ReferenceGrants of the ModelServe's namespace
    grants_served: bool = False
    rewrite: Body | None = None  # the InferenceModelRewrite of the ModelServe, where that is ours
    rewrites_served: bool = False
    config_map: Body | None = None  # the set as it is written for workers that start
    key_digest: str = ""  # SHA-256 of the key that workers take sets by
    now: datetime = field(default=datetime.min)

    @cached_property
    def counted(self) -> tuple[AdapterWorker, ...]:
        """Workers on which adapters have to be Ready."""
        return tuple(worker for worker in self.workers if worker.counts)
