"""Fields of children that are ours alone: what somebody else put there, how it is put right, and when to stop. Pure.

Server-side apply takes back the values that we set, but leaves the entries that others add beside them: a second key in
a Service's selector keeps every worker from it. So these fields hold exactly what we want, and nothing else: selector,
ports and type of a Service; what a disruption budget says; of a Deployment whether it is paused, where and on what its
pods run, and image, command, environment and resources of the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster import diff
from modelserve_operator.cluster.kinds import DEPLOYMENT, DISRUPTION_BUDGET, SERVICE, ResourceKind
from modelserve_operator.observed.snapshot import WORKER_CONTAINER

Body = Mapping[str, Any]

MOST_HEALS = 3
WINDOW = timedelta(hours=1)
FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=10), timedelta(minutes=2)  # of a contest whose heals end no pod
QUIET = 2 * LONGEST_WAIT  # after which such a contest is over

_SERVICE_FIELDS = ("selector", "ports", "type")
_BUDGET_FIELDS = ("maxUnavailable", "minAvailable", "unhealthyPodEvictionPolicy", "selector")
_POD_FIELDS = (
    "nodeSelector",
    "nodeName",
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "schedulerName",
    "priorityClassName",
    "runtimeClassName",
)
_WORKER_FIELDS = ("image", "command", "args", "env", "envFrom", "resources")
_POD_DEFAULTS = {"schedulerName": "default-scheduler"}  # as the API server fills it in


@dataclass(frozen=True)
class Correction:
    """One field of a live object that does not hold exactly what we want; `wanted` None: it should not be there."""

    path: tuple[str | int, ...]
    wanted: Any
    field: str  # in words, with the entries that are not ours

    def operation(self) -> dict[str, Any]:
        """The operation of a JSON patch."""
        pointer = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in self.path)
        if self.wanted is None:
            return {"op": "remove", "path": pointer}
        return {"op": "add", "path": pointer, "value": self.wanted}  # replaces what is there


def corrections(kind: ResourceKind, live: Body, desired: Body) -> tuple[Correction, ...]:
    """What to put right in our own fields of a Service, a disruption budget or a Deployment; nothing for others."""
    names = {SERVICE: _SERVICE_FIELDS, DISRUPTION_BUDGET: _BUDGET_FIELDS, DEPLOYMENT: ("paused",)}.get(kind)
    if names is None:
        return ()
    found = _of_fields(live.get("spec") or {}, desired["spec"], path=("spec",), names=names)
    if kind is not DEPLOYMENT:
        return found
    path: tuple[str | int, ...] = ("spec", "template", "spec")
    have, want = live["spec"]["template"]["spec"], desired["spec"]["template"]["spec"]
    found += _of_fields(
        have, {**_POD_DEFAULTS, **want} if "schedulerName" in have else want, path=path, names=_POD_FIELDS
    )
    containers = have.get("containers") or ()
    at = next((index for index, each in enumerate(containers) if each["name"] == WORKER_CONTAINER), None)
    if at is None:  # the apply adds it
        return found
    worker = next(each for each in want["containers"] if each["name"] == WORKER_CONTAINER)
    return found + _of_fields(containers[at], worker, path=(*path, "containers", at), names=_WORKER_FIELDS)


def deviations(kind: ResourceKind, live: Body, desired: Body) -> dict[str, Any]:
    """What the live object has where it is not as we want it, by field in words. Empty when there is nothing to do."""
    wrong = corrections(kind, live, desired)
    if not wrong and diff.covers(live, desired):
        return {}
    found = {
        path: have
        for path, have in diff.uncovered(live, desired).items()
        if not any(each.field.startswith(path) for each in wrong)
    }
    for each in wrong:
        have: Any = live
        for part in each.path:
            have = have[part] if isinstance(part, int) else have.get(part)
        found[each.field] = have
    return found


def _of_fields(
    live: Body, desired: Body, *, path: tuple[str | int, ...], names: Sequence[str]
) -> tuple[Correction, ...]:
    found = []
    for name in names:
        have, want = live.get(name), desired.get(name)
        foreign = sorted(_entries(have) - _entries(want))
        if foreign or not diff.covers({name: have or None}, {name: want or None}):
            words = ".".join(str(part) for part in (*path, name) if isinstance(part, str))
            found.append(Correction((*path, name), want, f"{words} ({', '.join(foreign)})" if foreign else words))
    return tuple(found)


def _entries(value: Any) -> set[str]:
    """Keys of a mapping, `key.key` where its values are mappings, and names of a list of objects."""
    if isinstance(value, Mapping):
        inner = {key: each for key, each in value.items() if isinstance(each, Mapping)}
        return {f"{key}.{sub}" for key, each in inner.items() for sub in each} | (set(value) - set(inner))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {str(each.get("name") or each) for each in value if isinstance(each, Mapping)}
    return set()


class DriftContestedError(Exception):
    """Somebody changes a child of ours again each time it is put right."""

    def __init__(self, kind: ResourceKind, name: str, fields: str, *, again: datetime) -> None:
        minutes = WINDOW.total_seconds() / 60
        super().__init__(
            f"{kind.kind} {name} was put right {MOST_HEALS} times or more within {minutes:.0f} min, and somebody "
            f"changes it again: {fields}. Find who writes it (kubectl get {kind.plural} {name} -o yaml "
            f"--show-managed-fields) and stop that; it is put right again from {again:%Y-%m-%dT%H:%M:%SZ} on, or at "
            f"once when annotation {labels.RETRY} changes"
        )
        self.again = again


@dataclass
class _History:
    """`times`: when it was put right, within WINDOW. `contest`: the last one that our write ended, for now."""

    times: list[datetime] = field(default_factory=list)
    contest: DriftContestedError | None = None


class Heals:
    """When each child was put right, by uid; a memory of WINDOW.

    A heal of a template replaces pods, so a contest over it is given up for the rest of WINDOW. Those of other kinds
    end none, and giving up on a Service would have clients pay: they go on, FIRST_WAIT apart, doubling to LONGEST_WAIT.
    """

    def __init__(self) -> None:
        self._known: dict[str, _History] = {}

    def exhausted(self, kind: ResourceKind, uid: str, now: datetime) -> datetime | None:
        """When the child may be put right once more; None for now."""
        for each, history in tuple(self._known.items()):
            history.times = [time for time in history.times if now - time < WINDOW]
            if not history.times:
                del self._known[each]
        times = self._known[uid].times if uid in self._known else []
        if len(times) < MOST_HEALS:
            return None
        if kind is DEPLOYMENT:
            return times[0] + WINDOW
        again = times[-1] + min(FIRST_WAIT * (1 << min(len(times) - MOST_HEALS, 10)), LONGEST_WAIT)
        return again if now < again else None

    def count(self, kind: ResourceKind, name: str, uid: str, now: datetime, *, fields: str) -> None:
        """A child was put right. Raises DriftContestedError when that was one time too many to be over with it."""
        history = self._known.setdefault(uid, _History())
        history.times.append(now)
        if len(history.times) > MOST_HEALS:
            history.contest = DriftContestedError(kind, name, fields, again=now + LONGEST_WAIT)
            raise history.contest

    def quiet(self, uid: str, now: datetime) -> None:
        """The child is right. Raises DriftContestedError while that is our doing, and the other may come back."""
        history = self._known.get(uid)
        if history is None or history.contest is None:
            return
        if history.times and now - history.times[-1] < QUIET:
            raise history.contest
        history.contest = None

    def forget(self, uid: str) -> None:
        """Somebody asks for another try."""
        self._known.pop(uid, None)
