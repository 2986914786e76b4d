"""Fields of children that are ours alone: what somebody else put there, how it is put right, and when to stop. Pure.

Server-side apply takes back the values that we set, but leaves the entries that others add beside them: a second key in
a Service's selector keeps every worker from it. So these fields hold exactly what we want, and nothing else: selector,
ports and type of a Service; image, command, environment and resources of the worker in a Deployment's template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from modelserve_operator import diff
from modelserve_operator.kinds import DEPLOYMENT, SERVICE, ResourceKind
from modelserve_operator.observed import WORKER_CONTAINER

Body = Mapping[str, Any]

MOST_HEALS = 3
WINDOW = timedelta(hours=1)

_SERVICE_FIELDS = ("selector", "ports", "type")
_WORKER_FIELDS = ("image", "command", "args", "env", "envFrom", "resources")


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
    """What to put right in our own fields of a Service or a Deployment; nothing for other kinds."""
    if kind is SERVICE:
        return _of_fields(live.get("spec") or {}, desired["spec"], path=("spec",), names=_SERVICE_FIELDS)
    if kind is not DEPLOYMENT:
        return ()
    found = live["spec"]["template"]["spec"].get("containers") or ()
    wanted = desired["spec"]["template"]["spec"]["containers"]
    at = next((index for index, each in enumerate(found) if each["name"] == WORKER_CONTAINER), None)
    if at is None:  # the apply adds it
        return ()
    worker = next(each for each in wanted if each["name"] == WORKER_CONTAINER)
    return _of_fields(found[at], worker, path=("spec", "template", "spec", "containers", at), names=_WORKER_FIELDS)


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
            f"{kind.kind} {name} was put right {MOST_HEALS} times within {minutes:.0f} min, and somebody changes it "
            f"again: {fields}. Find who writes it (kubectl get {kind.plural} {name} -o yaml --show-managed-fields) and "
            f"stop that; it is put right again at {again:%Y-%m-%dT%H:%M:%SZ}"
        )
        self.again = again


class Heals:
    """When each child was last put right, by uid; a memory of WINDOW."""

    def __init__(self) -> None:
        self._times: dict[str, list[datetime]] = {}

    def exhausted(self, uid: str, now: datetime) -> datetime | None:
        """When the child may be put right once more; None for now."""
        for each in tuple(self._times):
            recent = [time for time in self._times[each] if now - time < WINDOW]
            if recent:
                self._times[each] = recent
            else:
                del self._times[each]
        times = self._times.get(uid, [])
        return times[0] + WINDOW if len(times) >= MOST_HEALS else None

    def count(self, uid: str, now: datetime) -> None:
        """A child was put right."""
        self._times.setdefault(uid, []).append(now)
