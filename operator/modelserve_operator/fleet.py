"""Who moves next to a newer worker, over all ModelServes: a budget, one first, and a halt where it fails. Pure.

Everything follows from what is observed: a ModelServe is on its way while the revision that was committed for it last
is a move (`Provenance.moved_from`) and is not rolled out. So a new operator goes on where another one stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve_operator import labels
from modelserve_operator.reasons import ConditionType, Reason
from modelserve_operator.work_queue import Key

Body = Mapping[str, Any]
MOST_NAMED = 3


@dataclass(frozen=True)
class Member:
    """One ModelServe, by the revision that was committed for it last."""

    image: str
    moved: bool  # that revision is a move to another worker
    settled: bool  # it is rolled out, or nothing of it is wanted
    serves: bool  # it is rolled out, with workers
    stalled: str | None  # why nothing more will happen to it


@dataclass(frozen=True)
class Limits:
    """`budget`: ModelServes on their way at once, once a first one serves; `failures`: how many end the moves."""

    budget: int
    failures: int


def members(model_serves: Iterable[Body], controller_revisions: Iterable[Body]) -> dict[Key, Member]:
    """Every ModelServe that has a revision. Those that cannot be read here count as they can."""
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
        if (key, metadata["uid"]) in last:
            found[key] = _member(model_serve, last[key, metadata["uid"]][1])
    return found


def _member(model_serve: Body, revision: Body) -> Member:
    data, status = revision.get("data") or {}, model_serve.get("status") or {}
    worker = data.get("worker")
    about = status.get("revision") == revision["metadata"]["name"]  # an older status speaks of another revision
    found = {each.get("type"): each for each in status.get("conditions") or ()} if about else {}
    ready, stalled = found.get(ConditionType.READY.value) or {}, found.get(ConditionType.STALLED.value) or {}
    settled = ready.get("status") == "True"
    return Member(
        image=str(worker.get("image")) if isinstance(worker, Mapping) else "",
        moved=bool(data.get("movedFrom")),
        settled=settled,
        serves=settled and ready.get("reason") == Reason.ROLLED_OUT,
        stalled=str(stalled.get("reason")) if stalled.get("status") == "True" else None,
    )


def turn(fleet: Mapping[Key, Member], *, key: Key, image: str, admitted: Collection[Key], limits: Limits) -> str | None:
    """Why `key` may not move to `image` yet, in words; None when it may. `admitted`: moves that nothing shows yet.

    The first to move goes alone: until one serves with the image, it may be one that no node can pull or run. The words
    stay the same while others move: thousands may wait with them in their status.
    """
    moved = {each: member for each, member in fleet.items() if member.image == image and member.moved}
    failed = [f"{_name(each)} ({member.stalled})" for each, member in sorted(moved.items()) if member.stalled]
    if len(failed) >= limits.failures:
        return f"no more ModelServes move to {image}: it fails in {_told(failed[: limits.failures])}"
    on_their_way = {each for each, member in moved.items() if not member.settled} | (set(admitted) - moved.keys())
    proven = any(member.serves and member.image == image for member in fleet.values())
    if len(on_their_way - {key}) < (limits.budget if proven else 1):
        return None
    return f"{limits.budget} at a time move to {image}" if proven else f"one moves to {image} before all others"


def _name(key: Key) -> str:
    return f"{key.namespace}/{key.name}"


def _told(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
