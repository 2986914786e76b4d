"""Keeps one in-memory copy of every watched object, as it was when last heard of.

Fed by the first LIST, by watch events and by the answers to our own writes (so that a reconcile sees what the previous
one wrote). Only `gather` reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import MODEL_SERVE, ResourceKind

Body = Mapping[str, Any]
ObjectKey = tuple[str, str]  # namespace ("" for cluster-scoped), name


def key_of(body: Body) -> ObjectKey:
    metadata = body["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


def version_of(body: Body) -> int:
    """resourceVersion as a number; the API server's versions of one kind grow."""
    text = str(body["metadata"].get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0


class Store:
    """Objects by kind, namespace and name, and children by the name label of their ModelServe."""

    def __init__(self) -> None:
        self._objects: dict[ResourceKind, dict[ObjectKey, Body]] = defaultdict(dict)
        self._children: dict[tuple[ResourceKind, ObjectKey], set[ObjectKey]] = defaultdict(set)
        self._changes: dict[ResourceKind, int] = defaultdict(int)

    def put(self, kind: ResourceKind, body: Body) -> bool:
        """Keep `body` unless the same object is already known at this or a later version. Says whether it was kept."""
        key = key_of(body)
        known = self._objects[kind].get(key)
        if known is not None and known["metadata"].get("uid") == body["metadata"].get("uid"):
            if version_of(known) >= version_of(body) > 0:
                return False
            self._unlink(kind, known)
        self._objects[kind][key] = _trimmed(kind, body)
        self._changes[kind] += 1
        if owner := labels.label_of(body, labels.NAME):
            self._children[kind, (key[0], owner)].add(key)
        return True

    def remove(self, kind: ResourceKind, body: Body) -> None:
        """Forget an object; a namesake with another uid (made since) is kept."""
        key = key_of(body)
        known = self._objects[kind].get(key)
        if known is None or known["metadata"].get("uid") != body["metadata"].get("uid"):
            return
        self._unlink(kind, known)
        del self._objects[kind][key]
        self._changes[kind] += 1

    def changes(self, *kinds: ResourceKind) -> tuple[int, ...]:
        """How often objects of these kinds have changed: what was made of them is right while it is the same."""
        return tuple(self._changes[kind] for kind in kinds)

    def get(self, kind: ResourceKind, namespace: str, name: str) -> Body | None:
        return self._objects[kind].get((namespace, name))

    def all(self, kind: ResourceKind) -> Iterator[Body]:
        yield from tuple(self._objects[kind].values())

    def children(self, kind: ResourceKind, *, namespace: str, owner: str) -> tuple[Body, ...]:
        """Objects labelled as children of the ModelServe `owner`, in order of their names."""
        return tuple(self._objects[kind][key] for key in sorted(self._children.get((kind, (namespace, owner)), ())))

    def _unlink(self, kind: ResourceKind, body: Body) -> None:
        key = key_of(body)
        if owner := labels.label_of(body, labels.NAME):
            children = self._children[kind, (key[0], owner)]
            children.discard(key)
            if not children:
                del self._children[kind, (key[0], owner)]


def digested(status: Body) -> dict[str, Any]:
    """A status with its large parts as digests: nobody reads them back, only whether they are the same matters.

    Of the calibration its speeds stay: they are shown until they have clearly moved.
    """
    found = {key: labels.short_hash(value) if key in _LARGE else value for key, value in status.items()}
    if speed := shown_speed(status):
        found["shownSpeed"] = speed
    return found


def shown_speed(status: Body) -> list[dict[str, Any]]:
    """Speeds in the calibration of a status, whole or digested."""
    calibration = status.get("calibration")
    found: list[dict[str, Any]] = status.get("shownSpeed") or []
    return calibration.get("speed") or [] if isinstance(calibration, Mapping) else found


def approver(model_serve: Body) -> str:
    """Field manager that last wrote the spec, or an approval; empty where the API server did not say."""
    return str(model_serve["metadata"].get("approver") or "")


def _approver(metadata: Body) -> str:
    """Of the writers of the spec and of the approving annotation, the last one."""
    written = [each for each in metadata.get("managedFields") or () if not each.get("subresource")]
    writers = [(str(each.get("time") or ""), str(each.get("manager") or "")) for each in written if _wrote_spec(each)]
    return max(writers, default=("", ""))[1]


def _wrote_spec(entry: Body) -> bool:
    fields = entry.get("fieldsV1") or {}
    annotations = (fields.get("f:metadata") or {}).get("f:annotations") or {}
    return "f:spec" in fields or f"f:{labels.APPROVE_PLAN}" in annotations


_LARGE = frozenset({"plan", "proposedPlan", "calibration"})
_UNREAD_METADATA = frozenset({"managedFields", "selfLink"})
_UNREAD_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"


def _trimmed(kind: ResourceKind, body: Body) -> Body:
    """Without what nothing here reads: it is the larger part of most objects, and there may be thousands."""
    metadata = {key: value for key, value in body["metadata"].items() if key not in _UNREAD_METADATA}
    if _UNREAD_ANNOTATION in (metadata.get("annotations") or {}):
        kept = {key: value for key, value in metadata["annotations"].items() if key != _UNREAD_ANNOTATION}
        metadata["annotations"] = kept
    if kind is MODEL_SERVE and (wrote := _approver(body["metadata"])):
        metadata["approver"] = wrote
    trimmed = {**body, "metadata": metadata}
    if kind is MODEL_SERVE and body.get("status"):
        trimmed["status"] = digested(body["status"])
    return trimmed
