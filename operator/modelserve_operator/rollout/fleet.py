"""Chooses the ModelServe that moves next to a newer worker: a budget, one first, and a halt where it fails. Pure.

Everything follows from what is observed: a ModelServe is on its way while the revision that was committed for it last
is a move (`Provenance.moved_from`) and is not rolled out. So a new operator goes on where another one stopped.

Namespaces are tenants. What is amiss with one ModelServe says nothing of the worker unless its reason is the worker's
and workers of it ran before; nobody waits for what waits for its own namespace; and what a status says of others names
no object of another namespace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from modelserve.termination import TerminationReason
from modelserve_operator import labels
from modelserve_operator.observed.snapshot import moment
from modelserve_operator.process.work_queue import Key
from modelserve_operator.reasons import ConditionType, Reason

Body = Mapping[str, Any]
MOST_NAMED = 3
OF_THE_HUB = frozenset({TerminationReason.ModelUnavailable.value, TerminationReason.ModelCommitGone.value})
OF_THE_WORKER = frozenset(
    {
        Reason.CRASH_LOOP.value,
        Reason.IMAGE_PULL_FAILED.value,
        Reason.POD_NOT_STARTING.value,
        Reason.PROGRESS_DEADLINE_EXCEEDED.value,
        "WorkerFailed",
    }
    | ({each.value for each in TerminationReason} - OF_THE_HUB)
)
"""Reasons of Stalled that may speak against an image. Others are of the spec, a quota, the Hub or another writer."""


@dataclass(frozen=True)
class Member:
    """One ModelServe, by the revision that was committed for it last."""

    image: str
    moved: bool  # that revision is a move to another worker
    settled: bool = False  # it is rolled out, or nothing of it is wanted
    serves: bool = False  # it is rolled out, with workers
    stalled: bool = False  # nothing more happens to it by itself, for whatever reason
    fails: str | None = None  # why it is stalled, where that speaks against the image
    no_room_since: datetime | None = None  # its pods lack nodes, quota or leave


@dataclass(frozen=True)
class Limits:
    """`budget`: ModelServes on their way at once, once a first one serves; `failures`: namespaces with failures that
    end all moves; `patience`: how long one without room keeps its turn.
    """

    budget: int
    failures: int
    patience: timedelta = timedelta(minutes=10)


@dataclass(frozen=True)
class Wait:
    """Why a ModelServe may not move yet, for its own status; and for the operator's administrators, with the names of
    all whom it concerns, where that is no matter of time: the image fails.
    """

    why: str
    halted: str | None = None


def members(model_serves: Iterable[Body], controller_revisions: Iterable[Body]) -> dict[Key, Member]:
    """Every ModelServe that has a revision and is not going. Those that cannot be read here count as they can."""
    last: dict[tuple[Key, str], tuple[int, Body]] = {}
    for body in controller_revisions:
        metadata = body["metadata"]
        key = Key(metadata["namespace"], labels.label_of(body, labels.NAME) or "")
        for owner in metadata.get("ownerReferences") or ():
            known = last.get((key, owner.get("uid")))
            if known is None or known[0] < int(body.get("revision") or 0):
                last[key, owner.get("uid")] = (int(body.get("revision") or 0), body)
    found = {}
    for model_serve in model_serves:
        metadata = model_serve["metadata"]
        key = Key(metadata["namespace"], metadata["name"])
        if (key, metadata["uid"]) in last and not metadata.get("deletionTimestamp"):
            found[key] = _member(model_serve, last[key, metadata["uid"]][1])
    return found


def _member(model_serve: Body, revision: Body) -> Member:
    data, status = revision.get("data") or {}, model_serve.get("status") or {}
    worker = data.get("worker")
    told = {each.get("type"): each for each in status.get("conditions") or ()}
    about = status.get("revision") == revision["metadata"]["name"]  # an older status speaks of another revision
    found = told if about else {}
    ready, capacity = (found.get(kind.value) or {} for kind in (ConditionType.READY, ConditionType.CAPACITY_AVAILABLE))
    settled, stalled = ready.get("status") == "True", told.get(ConditionType.STALLED.value) or {}
    of_worker = stalled.get("reason") in OF_THE_WORKER
    # One whose spec is refused speaks of the revision that serves; what workers do is said of one revision alone.
    ends = stalled.get("status") == "True" and (about or not of_worker)
    ran = data.get("movedFromReady") is not False  # earlier releases do not say
    return Member(
        image=str(worker.get("image")) if isinstance(worker, Mapping) else "",
        moved=bool(data.get("movedFrom")),
        settled=settled,
        serves=settled and ready.get("reason") == Reason.ROLLED_OUT,
        stalled=ends,
        fails=str(stalled["reason"]) if ends and of_worker and ran else None,
        no_room_since=_no_room_since(capacity, revision),
    )


def _no_room_since(capacity: Body, revision: Body) -> datetime | None:
    """Since when, at the earliest since there is that revision."""
    if capacity.get("status") != "False":
        return None
    times = (capacity.get("lastTransitionTime"), revision["metadata"].get("creationTimestamp"))
    return max(filter(None, map(moment, times)), default=None)


def turn(
    fleet: Mapping[Key, Member], *, key: Key, image: str, admitted: Collection[Key], limits: Limits, now: datetime
) -> Wait | None:
    """Why `key` may not move to `image` yet; None when it may. `admitted`: moves that nothing shows yet.

    The first to move goes alone: until one serves with the image, it may be one that no node can pull or run. Where it
    fails, its namespace waits, and the next one tries; in as many namespaces as `failures` it is the image, and nobody
    moves. As many as may be on their way may wait for room beside them, one of a namespace, until their patience ends;
    their pods get nodes whenever there are any. The words stay the same while others move: thousands may wait with them
    in their status.
    """
    moved = {each: member for each, member in fleet.items() if member.image == image and member.moved}
    failing = {each: member.fails for each, member in sorted(moved.items()) if member.fails is not None}
    namespaces = {each.namespace for each in failing}
    if len(namespaces) >= limits.failures or key.namespace in namespaces:
        return _halted(failing, key=key, image=image, everywhere=len(namespaces) >= limits.failures)
    open_turns = {
        each: member for each, member in moved.items() if each != key and not (member.settled or member.stalled)
    }
    young = {
        each
        for each, member in open_turns.items()
        if member.no_room_since is not None and now - member.no_room_since < limits.patience
    }
    if any(each.namespace == key.namespace for each in young):
        return Wait(f"another ModelServe of this namespace moves to {image} and has no room yet")
    proven = any(member.serves and member.image == image for member in fleet.values())
    most = limits.budget if proven else 1
    with_room = {each for each, member in open_turns.items() if member.no_room_since is None}
    with_room |= set(admitted) - moved.keys() - {key}
    if len(with_room) + max(0, len(young) - most) < most:
        return None
    return Wait(f"{limits.budget} at a time move to {image}" if proven else f"one moves to {image} before all others")


def _halted(failing: Mapping[Key, str], *, key: Key, image: str, everywhere: bool) -> Wait:
    own = [each for each in failing if each.namespace == key.namespace]
    names = [f"{each.namespace}/{each.name} ({failing[each]})" for each in own]
    others = sorted({reason for each, reason in failing.items() if each not in own})
    where = _told(names) if names else f"ModelServes of other namespaces ({_told(others)})"
    who = "no more ModelServes" if everywhere else "no more ModelServes of this namespace"
    named = _told([f"{each.namespace}/{each.name} ({reason})" for each, reason in failing.items()])
    scope = "no more ModelServes move to it" if everywhere else "no more ModelServes of these namespaces move to it"
    return Wait(f"{who} move to {image}: it fails in {where}", f"worker {image} fails in {named}: {scope}")


def _told(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
