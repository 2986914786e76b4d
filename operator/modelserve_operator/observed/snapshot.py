"""The frozen snapshot that one reconcile decides on. Everything in it was read by `gather`; nothing here does I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from modelserve.api import CalibrationPages, CalibrationTerm, GpuMemory
from modelserve.measured_drafts import MeasuredDrafts
from modelserve.measured_speed import MeasuredSteps
from modelserve.quality.cache_quality import CacheQuality
from modelserve.termination import TERMINAL_EXIT_CODE, FetchedDrafter, ResolvedModel, TerminationMessage
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    POD_TEMPLATE,
    SERVICE,
    ResourceKind,
)
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.revisions.history import History
from modelserve_operator.revisions.revision import FETCH_DRAFTER_CONTAINERS, RESOLVE_CONTAINER, Revision

Body = Mapping[str, Any]

WORKER_CONTAINER, FETCH_CONTAINER, INSPECT_CONTAINER = "worker", "fetch", "inspect"
PULL_FAILURES = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
MAKING_FAILURES = frozenset(  # of the kubelet, before a container's process begins
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PostStartHookError"}
)
KUEUE_GATE = f"{labels.KUEUE}admission"
_QUIET = frozenset({None, "ContainerCreating", "PodInitializing"})
ENDED_PHASES = frozenset({"Failed", "Succeeded"})
OWN_CONTAINERS = frozenset(
    {WORKER_CONTAINER, FETCH_CONTAINER, RESOLVE_CONTAINER, *FETCH_DRAFTER_CONTAINERS, INSPECT_CONTAINER}
)  # others are injected by somebody


@dataclass(frozen=True)
class Transition:
    """A change worth a Kubernetes Event."""

    reason: str
    message: str
    warning: bool


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says of itself on /v1/plan. Bytes are per GPU."""

    max_model_len: int
    predicted: GpuMemory | None
    measured: GpuMemory | None
    engine_version: str = ""
    terms: tuple[CalibrationTerm, ...] = ()
    pages: tuple[CalibrationPages, ...] = ()
    speed: tuple[MeasuredSteps, ...] = ()
    drafts: MeasuredDrafts | None = None
    cache_quality: CacheQuality | None = None


@dataclass(frozen=True)
class Failure:
    """Why a container ended for good, and what it had measured of its GPU by then, in bytes by term."""

    reason: str
    message: str
    measured: Mapping[str, int] = field(default_factory=dict, compare=False)
    engine_version: str = field(default="", compare=False)

    @classmethod
    def from_termination(cls, text: str) -> Failure:
        """Read a container's termination message."""
        try:
            message = TerminationMessage.model_validate_json(text)
        except ValidationError:
            return cls("WorkerFailed", text.strip()[-1000:] or f"exit code {TERMINAL_EXIT_CODE} without a message")
        missing = message.shortfallBytes
        numbers = f" ({missing:,} bytes are missing per GPU)" if missing is not None else ""
        text = message.message.rstrip(".") + numbers
        return cls(message.reason.value, text, message.measured or {}, message.engineVersion or "")


@dataclass(frozen=True)
class Pod:
    """A worker or inspect pod, reduced to what decisions need."""

    name: str
    uid: str
    plan_hash: str | None
    job: str | None
    restarts: int  # of all containers
    ready: bool
    terminating: bool
    ended: bool  # over as a whole, as one that was evicted: its object stays, its controller makes another
    placed: bool  # it has a node
    unschedulable: str | None  # the scheduler's message
    gated: str | None  # why its scheduling gates are there, as far as Kubernetes says
    trouble: str | None  # why a container waits or restarts, in words
    failure: Failure | None  # a container of ours ended with the terminal exit code, and has not recovered since
    report: str | None  # termination message of the container `inspect`, where that ended well
    created: str = ""  # when, in UTC and in the format of Kubernetes
    started: bool = False  # the worker's startup probe, which asks for readiness, has passed
    unready_since: datetime | None = None
    owner: str | None = None  # uid of its ReplicaSet or Job
    placed_since: datetime | None = None
    priority: int = 0  # as admission resolved it
    node: str | None = None
    lingers_since: datetime | None = None  # its container `inspect` ended badly, and others keep the pod from ending
    making: bool = False  # it has a node, and no container of it has begun: volumes, network and image come first
    making_fails: bool = False  # a container of ours cannot be made
    pull_fails: bool = False  # the image of a container of ours cannot be pulled at the moment
    crashes: int = 0  # restarts of a container of ours whose last run ended badly
    last_run: timedelta = timedelta(0)  # how long that run was
    held: bool | None = None  # from autoscalers, as its annotation says; None: that is not ours to say
    queued: bool = False  # Kueue has not admitted it yet
    commit: str | None = None  # of the model, as its container `resolve` told it
    drafters: tuple[tuple[int, FetchedDrafter], ...] = ()  # what downloads of drafters told that ended; number in plan

    @classmethod
    def from_body(cls, body: Body) -> Pod:
        status = body.get("status") or {}
        conditions = {c["type"]: c for c in status.get("conditions") or ()}
        scheduled = conditions.get("PodScheduled") or {}
        containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        own = [container for container in containers if container.get("name") in OWN_CONTAINERS]
        needed = [each for each in own if each["name"] not in FETCH_DRAFTER_CONTAINERS]
        placed = scheduled.get("status") == "True" or status.get("phase") not in (None, "Pending")
        ready = (conditions.get("Ready") or {}).get("status") == "True"
        started = any(container.get("started") for container in own if container["name"] == WORKER_CONTAINER)
        unready = conditions.get("Ready") or {}
        crashed: Body = max((each for each in own if _bad_end(each)), key=_restarts, default={})
        return cls(
            name=body["metadata"]["name"],
            uid=body["metadata"]["uid"],
            created=body["metadata"].get("creationTimestamp") or "",
            plan_hash=labels.label_of(body, labels.PLAN_HASH),
            job=labels.label_of(body, "batch.kubernetes.io/job-name"),
            restarts=sum(map(_restarts, containers)),
            ready=ready,
            terminating=bool(body["metadata"].get("deletionTimestamp")),
            ended=status.get("phase") in ENDED_PHASES,
            placed=placed,
            owner=next((each.get("uid") for each in body["metadata"].get("ownerReferences") or ()), None),
            placed_since=moment(scheduled.get("lastTransitionTime")) if placed else None,
            making=placed and not ready and all(_waiting(each) in _QUIET and not _begun(each) for each in containers),
            priority=int((body.get("spec") or {}).get("priority") or 0),
            node=(body.get("spec") or {}).get("nodeName"),
            making_fails=any(_waiting(container) in MAKING_FAILURES for container in own),
            unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else None,
            gated=scheduled.get("message", "") if scheduled.get("reason") == "SchedulingGated" else None,
            trouble=next(filter(None, map(_trouble, containers)), None),
            failure=None if ready or started else next(filter(None, map(_failure, needed)), None),
            report=_report(status),
            lingers_since=None if status.get("phase") in ENDED_PHASES else _lingers(status),
            started=started,
            unready_since=None if ready else moment(unready.get("lastTransitionTime")),
            pull_fails=any(_waiting(container) in PULL_FAILURES for container in own),
            crashes=_restarts(crashed),
            last_run=_run_time(crashed),
            held=None if (mark := labels.annotation_of(body, labels.HELD)) is None else mark == "true",
            queued=KUEUE_GATE in {each["name"] for each in (body.get("spec") or {}).get("schedulingGates") or ()},
            commit=next(filter(None, map(_commit, own)), None),
            drafters=tuple(sorted(filter(None, map(_drafter, own)), key=lambda each: each[0])),
        )


def moment(text: object) -> datetime | None:
    """A time of the API; None for anything else."""
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _restarts(container: Body) -> int:
    return int(container.get("restartCount") or 0)


def _waiting(container: Body) -> str | None:
    reason = ((container.get("state") or {}).get("waiting") or {}).get("reason")
    return str(reason) if reason is not None else None


def _begun(container: Body) -> bool:
    """Whether it runs, or has run."""
    return "running" in (container.get("state") or {}) or bool(_ends(container))


def _bad_end(container: Body) -> Body | None:
    """The newest end of a container, when it was not a good one."""
    end = next(iter(_ends(container)), None)
    return end if end is not None and end.get("exitCode") else None


def _run_time(container: Body) -> timedelta:
    end = _bad_end(container) or {}
    began, ended = moment(end.get("startedAt")), moment(end.get("finishedAt"))
    return ended - began if began and ended else timedelta(0)


def _ends(container: Body) -> list[Body]:
    """Terminated states of a container, the newest first."""
    states = (container.get("state") or {}, container.get("lastState") or {})
    return [state["terminated"] for state in states if "terminated" in state]


def _failure(container: Body) -> Failure | None:
    for end in _ends(container):
        if end.get("exitCode") == TERMINAL_EXIT_CODE:
            return Failure.from_termination(end.get("message") or "")
    return None


def _trouble(container: Body) -> str | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    ends = [end for end in _ends(container) if end.get("exitCode")]
    quiet = waiting.get("reason") in _QUIET
    if quiet and not ends:
        return None
    words = [] if quiet else [f"{waiting['reason']}: {waiting.get('message') or ''}".rstrip(": ")]
    if ends:
        tail = (ends[0].get("message") or ends[0].get("reason") or "").strip()[-500:]
        words.append(f"last exit code {ends[0]['exitCode']}: {tail}")
    return f"container {container['name']}: {'; '.join(words)}"


def _commit(container: Body) -> str | None:
    if container.get("name") != RESOLVE_CONTAINER:
        return None
    for end in _ends(container):
        if not end.get("exitCode"):
            try:
                return ResolvedModel.model_validate_json(end.get("message") or "").commit
            except ValidationError:
                continue
    return None


def _drafter(container: Body) -> tuple[int, FetchedDrafter] | None:
    if container.get("name") not in FETCH_DRAFTER_CONTAINERS:
        return None
    number = FETCH_DRAFTER_CONTAINERS.index(container["name"])
    for end in _ends(container):
        try:
            return number, FetchedDrafter.model_validate_json(end.get("message") or "")
        except ValidationError:
            return number, FetchedDrafter(problem=f"its download ended with exit code {end.get('exitCode')}")
    return None


def _report(status: Body) -> str | None:
    end = _inspect_end(status)
    return str(end["message"]) if not end.get("exitCode") and end.get("message") else None


def _lingers(status: Body) -> datetime | None:
    end = _inspect_end(status)
    return moment(end.get("finishedAt")) if end.get("exitCode") else None


def _inspect_end(status: Body) -> Body:
    """How the container `inspect` ended, whatever runs beside it; empty where it has not."""
    containers = status.get("containerStatuses") or ()
    ends = (_ends(each) for each in containers if each.get("name") == INSPECT_CONTAINER)
    return next((end for found in ends for end in found), {})


def ready_endpoints(slices: Iterable[Body], service: Body | None) -> frozenset[str]:
    """uids of the pods that the EndpointSlices of this very Service name as ready."""
    uid = service["metadata"]["uid"] if service is not None else None
    found = set()
    for body in slices:
        if any(reference.get("uid") == uid for reference in body["metadata"].get("ownerReferences") or ()):
            for endpoint in body.get("endpoints") or ():
                target = endpoint.get("targetRef") or {}
                if target.get("kind") == "Pod" and (endpoint.get("conditions") or {}).get("ready") is not False:
                    found.add(str(target.get("uid")))
    return frozenset(found)


@dataclass(frozen=True)
class Observed:
    """One ModelServe and everything that bears on it."""

    model_serve: Body
    deployments: tuple[Body, ...] = ()
    controller_revisions: tuple[Body, ...] = ()  # of the revisions in `history` that are stored
    history: History = field(default_factory=History)
    config_maps: tuple[Body, ...] = ()
    jobs: tuple[Body, ...] = ()
    pods: tuple[Pod, ...] = ()
    service: Body | None = None
    disruption_budget: Body | None = None
    claim_templates: tuple[Body, ...] = ()
    buffer_kind: ResourceKind | None = None  # CapacityBuffer in the version that the cluster serves
    capacity_buffer: Body | None = None
    buffer_template: Body | None = None
    not_served: frozenset[ResourceKind] = frozenset()  # optional kinds that the cluster does not have
    model_cache: Body | None = None  # that the spec names
    http_route: Body | None = None
    inference_pool: Body | None = None
    endpoints: frozenset[str] = frozenset()  # uids of the pods that the Service sends requests to
    supply: Supply = field(default_factory=Supply)
    causes: Mapping[str, str] = field(default_factory=dict)  # uid of a Job without pods -> why, where that is known
    claim_modes: Mapping[str, tuple[str, ...] | None] = field(
        default_factory=dict
    )  # claim -> access modes; None: absent
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)  # pod uid -> report
    rivals: tuple[str, ...] = ()  # whose pods a rollout does not stop a worker for, in words
    to_move: frozenset[str] = frozenset()  # uids of pods on nodes that are drained, or about to be removed
    silent: frozenset[str] = frozenset()  # uids of ready workers that cannot be asked
    ask_again: float | None = None  # seconds until one of them is
    now: datetime = field(default=datetime.min)

    @property
    def name(self) -> str:
        return str(self.model_serve["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.model_serve["metadata"]["namespace"])

    @property
    def generation(self) -> int:
        return int(self.model_serve["metadata"].get("generation") or 1)

    @property
    def orphans(self) -> Iterator[tuple[ResourceKind, Body]]:
        """Children that an earlier ModelServe of this name left without an owner."""
        shared = [(SERVICE, self.service), (DISRUPTION_BUDGET, self.disruption_budget)]
        shared.append((POD_TEMPLATE, self.buffer_template))
        if self.buffer_kind is not None:
            shared.append((self.buffer_kind, self.capacity_buffer))
        many = (
            (CONTROLLER_REVISION, self.controller_revisions),
            (CONFIG_MAP, self.config_maps),
            (DEPLOYMENT, self.deployments),
            (JOB, self.jobs),
            (CLAIM_TEMPLATE, self.claim_templates),
        )
        found = [(kind, body) for kind, body in shared if body is not None]
        found += [(kind, body) for kind, bodies in many for body in bodies]
        yield from ((kind, body) for kind, body in found if labels.orphaned(body))

    @property
    def revisions(self) -> tuple[Revision, ...]:
        """Revisions that were committed, of whatever spec."""
        return self.history.revisions

    @property
    def selected(self) -> str | None:
        """Hash of the revision that the Service selects."""
        selector = ((self.service or {}).get("spec") or {}).get("selector") or {}
        found = selector.get(labels.PLAN_HASH)
        return str(found) if found is not None else None

    @property
    def workers(self) -> tuple[Pod, ...]:
        """Worker pods of all revisions that their Deployments count: not on their way out, and not ended."""
        return tuple(pod for pod in self.pods if pod.plan_hash and not pod.terminating and not pod.ended)

    def pods_of(self, plan_hash: str) -> tuple[Pod, ...]:
        """The `workers` of one revision."""
        return tuple(pod for pod in self.workers if pod.plan_hash == plan_hash)
