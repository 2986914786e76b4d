"""The revisions of a ModelServe as its ControllerRevisions have them: what can be read, what cannot, what is not ours.

A ConfigMap is never a revision, whatever its labels say; those of release 0.1.0 are imported once (`imported.py`). What
passes for a revision and is none is refused by name, and left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve_operator import labels
from modelserve_operator.cluster import diff
from modelserve_operator.revisions.revision import Revision, UnreadableRevisionError, revision_of

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A revision that is ours and cannot be read. `blocks`: it runs, or was committed last, so nothing is decided."""

    kind: str
    name: str
    why: str
    number: int = 0
    blocks: bool = False


@dataclass(frozen=True)
class History:
    """`stored`: hashes of the revisions that have a ControllerRevision; the others were imported just now."""

    revisions: tuple[Revision, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    refused: tuple[str, ...] = ()  # sentences about objects that pass for revisions
    stored: frozenset[str] = frozenset()

    @property
    def blocking(self) -> tuple[Unreadable, ...]:
        """Revisions without which nothing may be decided."""
        return tuple(each for each in self.unreadable if each.blocks)

    @property
    def last_number(self) -> int:
        """Number of the last commit; 0 without one."""
        return max((*(each.number for each in self.revisions), *(each.number for each in self.unreadable)), default=0)

    def named(self, name: str) -> Revision | None:
        """The revision NAME-HASH."""
        return next((each for each in self.revisions if name.endswith(f"-{each.hash}")), None)

    def committed_for(self, spec: ModelServeSpec) -> tuple[Revision, ...]:
        """Revisions that were committed for this very spec, each compared under the algorithm of its own hashes."""
        return tuple(each for each in self.revisions if each.inputs is not None and each.inputs == each.inputs.of(spec))

    def committed_for_plan_of(self, spec: ModelServeSpec) -> Revision | None:
        """The last revision whose plan was made from what this spec says of plans, whatever it says of pods."""
        found = (r for r in self.revisions if r.inputs is not None and r.inputs.plan == r.inputs.of(spec).plan)
        return max(found, key=lambda revision: revision.number, default=None)

    def commit_of(self, source: str) -> str:
        """The commit that the last resolved revision of the same address and revision serves; empty: none yet."""
        told = [
            (each.number, commit)
            for each in self.revisions
            for of, commit in ((each.source, each.commit), *each.pinned_drafters)
            if source and of == source and commit
        ]
        return max(told)[1] if told else ""

    def as_last(self, revision: Revision) -> Revision:
        """The revision as the one that was committed last: with the largest number."""
        last = self.last_number
        return revision if revision.number == last > 0 else replace(revision, number=last + 1)

    def surplus(self, *, kept: Iterable[str], limit: int) -> tuple[str, ...]:
        """Hashes of stored revisions beyond the `limit` newest of those that are not `kept` anyway."""
        kept = set(kept)
        others = [each for each in self.revisions if each.hash in self.stored and each.hash not in kept]
        others.sort(key=lambda revision: revision.number, reverse=True)
        return tuple(each.hash for each in others[limit:])


def read_history(model_serve: Body, controller_revisions: Iterable[Body], deployments: Mapping[str, Body]) -> History:
    """Read the ControllerRevisions that carry the labels of this ModelServe. `deployments`: those of it, by hash.

    One without an owner is taken for ours where a Deployment of its name runs just its template: an orphaning delete
    leaves both.
    """
    uid, name = model_serve["metadata"]["uid"], model_serve["metadata"]["name"]
    readable, unreadable, refused = [], [], []
    for body in controller_revisions:
        own = body["metadata"]["name"]
        owned = owned_by(body, uid)
        if not owned and not labels.orphaned(body):
            refused.append(refusal("ControllerRevision", own, "its owner is not this ModelServe"))
            continue
        try:
            revision = revision_of(body)
        except UnreadableRevisionError as error:
            if owned:
                runs = own.removeprefix(f"{name}-") in deployments
                number = int(body.get("revision") or 0)
                unreadable.append(Unreadable("ControllerRevision", own, str(error), number, runs))
            else:
                refused.append(refusal("ControllerRevision", own, f"it has no owner, and {error}"))
            continue
        if owned or _runs(deployments.get(revision.hash), revision):
            readable.append(revision)
        else:
            refused.append(refusal("ControllerRevision", own, "it has no owner, and no Deployment runs it"))
    history = History(tuple(readable), tuple(unreadable), tuple(refused), frozenset(each.hash for each in readable))
    last = history.last_number
    blocked = tuple(replace(each, blocks=each.blocks or each.number == last) for each in history.unreadable)
    return replace(history, unreadable=blocked)


def _runs(deployment: Body | None, revision: Revision) -> bool:
    return deployment is not None and diff.covers(deployment["spec"]["template"], revision.template)


def stray_config_maps(config_maps: Iterable[Body], known: Iterable[str]) -> Iterator[Body]:
    """ConfigMaps with labels and pod template of a revision, as 0.1.0 had them, whose names are not `known`.

    Those with the worker's settings alone are read by nobody.
    """
    known = set(known)
    for body in config_maps:
        labelled = labels.label_of(body, labels.COMPONENT) == labels.REVISION
        if labelled and "template.json" in (body.get("data") or {}) and body["metadata"]["name"] not in known:
            yield body


def refusal(kind: str, name: str, why: str) -> str:
    """A sentence about an object that passes for a revision."""
    return f"{kind} {name} is labelled as a revision and is refused: {why}; it is left as it is."


def owned_by(body: Body, uid: str) -> bool:
    """Whether an object has this owner."""
    return any(reference.get("uid") == uid for reference in body["metadata"].get("ownerReferences") or ())
