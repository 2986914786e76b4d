"""The only writer. Every write follows a diff, is counted, and its answer goes into the store."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, get_args

import yaml

from modelserve_operator import labels
from modelserve_operator.cluster import diff
from modelserve_operator.cluster.kinds import CONTROLLER_REVISION, EVENT, MODEL_CACHE, MODEL_SERVE, POD, ResourceKind
from modelserve_operator.cluster.kube import Kube, KubeError
from modelserve_operator.cluster.store import Store, digested, key_of
from modelserve_operator.observed.snapshot import Transition
from modelserve_operator.process import metrics
from modelserve_operator.process.work_queue import Key
from modelserve_operator.reasons import ConditionType, Reason
from modelserve_operator.writing import drift
from modelserve_operator.writing.admitted import AdmittedChanges
from modelserve_operator.writing.drift import DriftContestedError, Heals
from modelserve_operator.writing.status_contest import StatusContests

logger = logging.getLogger(__name__)
Body = Mapping[str, Any]


CORRECTION_TRIES = 5
UNPROCESSABLE = 422
_CONDITIONS = frozenset(kind.value for kind in ConditionType)


class NameTakenError(Exception):
    """An object that we would create exists and is not ours."""

    def __init__(self, kind: ResourceKind, namespace: str, name: str) -> None:
        super().__init__(f"{kind.kind} {namespace}/{name} exists and is not ours; delete or rename one of them")


class UnfitError(Exception):
    """What somebody else added to a child of ours does not go together with what we set."""

    def __init__(self, kind: ResourceKind, name: str, error: KubeError) -> None:
        super().__init__(
            f"{kind.kind} {name} cannot be put right: a field that somebody else added does not go together with ours "
            f"({error}). Take it away, or delete the {kind.kind}: it is made again"
        )


class PredecessorError(Exception):
    """A child of a deleted ModelServe of the same name is still there; the garbage collector will take it."""


WriteError = PredecessorError | NameTakenError | DriftContestedError | UnfitError | KubeError  # of children
WRITE_ERRORS: tuple[type[WriteError], ...] = get_args(WriteError)


class StatusOvertakenError(Exception):
    """The ModelServe has changed since its status was worked out."""


class Applier:
    """Server-side apply of children, the status, deletes, and Kubernetes Events."""

    def __init__(self, kube: Kube, store: Store, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._kube = kube
        self._store = store
        self._clock = clock
        self._heals = Heals()
        self._admitted = AdmittedChanges()
        self._statuses = StatusContests()
        self._asked: dict[Key, str | None] = {}
        self._last: dict[Key, dict[str, str]] = defaultdict(dict)  # per ModelServe: uid -> hash of what we last applied

    async def apply(self, kind: ResourceKind, body: Body) -> None:
        """Create the child or change it to `body`, unless it is so already. What others add to fields that are ours
        alone goes, until it has come back too often; what admission makes of our own write stays, and is said once.

        Raises NameTakenError, PredecessorError, DriftContestedError, UnfitError, KubeError.
        """
        desired = diff.with_applied_hash(body)
        namespace, name = key_of(body)
        live = await self._live(kind, namespace, name)
        if live is None:
            live = await self._write(kind, desired)
        _check_owner(kind, live, body)
        uid, wrong = live["metadata"]["uid"], drift.deviations(kind, live, desired)
        drifted = self._is_what_we_want(live, desired)  # what we last wrote, so somebody else made the difference
        admitted = self._admitted.accounts_for(kind, live, wrong)
        if not wrong or (drifted and admitted):
            self._store.put(kind, live)
            self._heals.quiet(uid, self._clock())
            return
        fields = ", ".join(wrong)
        again = self._heals.exhausted(kind, uid, self._clock()) if drifted else None
        if again is not None:
            raise DriftContestedError(kind, name, fields, again=again)
        try:
            if not drifted:
                live = await self._write(kind, desired)
            live = await self._correct(kind, live, desired)
            if not diff.covers(live, desired):
                live = await self._write(kind, desired)
        except KubeError as error:
            if error.status != UNPROCESSABLE:
                raise
            live = await self._made_to_fit(kind, live, desired, error)
        if left := drift.deviations(kind, live, desired):
            await self._tolerate(kind, live, left)
        if drifted and left != wrong:
            self._heals.count(kind, name, uid, self._clock(), fields=fields)

    async def _made_to_fit(self, kind: ResourceKind, live: Body, desired: Body, error: KubeError) -> Body:
        """The object exists, so it is not what we want that is invalid, but that beside what somebody else added. Where
        it stands in fields of ours it goes first. Raises UnfitError when that does not help.
        """
        wrong = drift.corrections(kind, live, desired)
        if not wrong:
            raise UnfitError(kind, key_of(live)[1], error) from error
        try:
            await self.patch(kind, live, [each.operation() for each in wrong])
            return await self._write(kind, desired)
        except KubeError as second:
            if second.status != UNPROCESSABLE:
                raise
            raise UnfitError(kind, key_of(live)[1], second) from second

    async def _tolerate(self, kind: ResourceKind, live: Body, left: Mapping[str, Any]) -> None:
        """Admission answers our own write with something else: it stays, is remembered on the child, and said once.

        Nobody but admission can be in the answer to a write, and who writes again wins nothing but new pods.
        """
        digest = labels.short_hash(left)
        if labels.annotation_of(live, labels.ADMITTED) == digest:
            self._admitted.note(live, digest)
            return
        pointer = labels.ADMITTED.replace("~", "~0").replace("/", "~1")
        await self.patch(kind, live, [{"op": "add", "path": f"/metadata/annotations/{pointer}", "value": digest}])
        self._admitted.note(live, digest)  # where the child has changed meanwhile, the next pass comes here again
        namespace, name = key_of(live)
        owners = {each["kind"]: each for each in live["metadata"]["ownerReferences"]}
        (about,) = (kind for kind in (MODEL_SERVE, MODEL_CACHE) if kind.kind in owners)
        owner = owners[about.kind]
        metadata = {"namespace": namespace, "name": owner["name"], "uid": owner["uid"]}
        message = f"Admission changes {kind.kind} {name} as it is written; that stays: {', '.join(sorted(left))}."
        await self.announce({"metadata": metadata}, Transition(Reason.CHANGED_BY_ADMISSION, message, False), kind=about)

    async def _live(self, kind: ResourceKind, namespace: str, name: str) -> Body | None:
        known = self._store.get(kind, namespace, name)
        return known if known is not None else await self._kube.get(kind, namespace=namespace, name=name)

    async def render(self, kind: ResourceKind, body: Body) -> None:
        """Have an immutable child whose `data`, YAML documents, say what those of `body` do: one that somebody made
        otherwise is replaced, until that has happened too often. Its metadata is left as it is.

        Raises NameTakenError, PredecessorError, DriftContestedError, KubeError.
        """
        namespace, name = key_of(body)
        live = await self._live(kind, namespace, name)
        if live is not None:
            _check_owner(kind, live, body)
            wrong = [key for key, text in body["data"].items() if not _says((live.get("data") or {}).get(key), text)]
            identity, fields = f"{kind.kind} {namespace}/{name}", ", ".join(wrong)  # the next one has another uid
            if not wrong:
                self._store.put(kind, live)
                self._heals.quiet(identity, self._clock())
                return
            again = self._heals.exhausted(kind, identity, self._clock())
            if again is not None:
                raise DriftContestedError(kind, name, fields, again=again)
            await self.delete(kind, live)
            await self._write(kind, diff.with_applied_hash(body))
            logger.warning("replaced %s: %s", identity, fields)
            self._heals.count(kind, name, identity, self._clock(), fields=fields)
            return
        await self._write(kind, diff.with_applied_hash(body))

    async def annotate(self, kind: ResourceKind, live: Body, key: str, value: str) -> None:
        """Set an annotation of a child. Raises KubeError 409 when it changed meanwhile."""
        annotations = {**(live["metadata"].get("annotations") or {}), key: value}
        await self.patch(kind, live, [{"op": "add", "path": "/metadata/annotations", "value": annotations}])

    async def renumber(self, live: Body, number: int) -> None:
        """Make a ControllerRevision the one that was committed last. Raises KubeError 409 when it changed meanwhile."""
        await self.patch(CONTROLLER_REVISION, live, [{"op": "add", "path": "/revision", "value": number}])

    def _is_what_we_want(self, live: Body, desired: Body) -> bool:
        """Whether we last applied just this; somebody may have taken our annotation away."""
        wanted = labels.annotation_of(desired, labels.APPLIED_HASH)
        remembered = self._last[_owner(live)].get(live["metadata"]["uid"])
        return wanted in (remembered, labels.annotation_of(live, labels.APPLIED_HASH))

    def forget(self, key: Key) -> None:
        """A ModelServe is gone."""
        self._last.pop(key, None)
        self._admitted.forget(key)
        self._asked.pop(key, None)
        self._statuses.forget(key)

    def note_retry(self, key: Key, asked: str | None) -> None:
        """The user's annotation that asks for another try: when it changes, no contest is over for its children."""
        if self._asked.setdefault(key, asked) != asked:
            self._asked[key] = asked
            for uid in self._last.get(key, ()):
                self._heals.forget(uid)

    async def _write(self, kind: ResourceKind, desired: Body) -> Body:
        stored = await self._kube.apply(kind, desired)
        self._store.put(kind, stored)
        self._last[_owner(stored)][stored["metadata"]["uid"]] = labels.annotation_of(desired, labels.APPLIED_HASH) or ""
        metrics.WRITES.labels("apply", kind.kind).inc()
        logger.info("applied %s %s/%s", kind.kind, *key_of(desired))
        return stored

    async def adopt(self, kind: ResourceKind, orphan: Body, owner: Body) -> None:
        """Make a child that has no owner any more a child of `owner`, an owner reference. Raises KubeError."""
        operation = {"op": "add", "path": "/metadata/ownerReferences", "value": [owner]}
        await self.patch(kind, orphan, [operation])
        logger.info("adopted %s %s/%s", kind.kind, *key_of(orphan))

    async def _correct(self, kind: ResourceKind, live: Body, desired: Body) -> Body:
        """Put fields right that are ours alone. A controller that writes to it meanwhile is no reason to wait."""
        for tries_left in reversed(range(CORRECTION_TRIES)):
            wrong = drift.corrections(kind, live, desired)
            if not wrong:
                return live
            try:
                stored = await self.patch(kind, live, [each.operation() for each in wrong])
            except KubeError as error:
                now = self._store.get(kind, *key_of(live))
                if error.status != 409 or now is None or not tries_left:
                    raise
                live = now
            else:
                fields = ", ".join(each.field for each in wrong)
                logger.warning("put right %s %s/%s: %s", kind.kind, *key_of(live), fields)
                return stored
        return live

    async def patch(
        self, kind: ResourceKind, live: Body, operations: list[dict[str, Any]], *, subresource: str | None = None
    ) -> Body:
        """Patch the object in the very state it was seen in. Raises KubeError 409 when it has changed since."""
        namespace, name = key_of(live)
        version = live["metadata"]["resourceVersion"]
        seen = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
        try:
            stored = await self._kube.json_patch(
                kind, namespace=namespace, name=name, operations=[seen, *operations], subresource=subresource
            )
        except KubeError as error:
            if error.status not in (409, 422):
                raise
            now = await self._kube.get(kind, namespace=namespace, name=name)
            if now is not None and now["metadata"]["resourceVersion"] == version:
                raise
            if now is not None:
                self._store.put(kind, now)
            raise KubeError(409, f"{kind.kind} {namespace}/{name} has changed meanwhile") from error
        self._store.put(kind, stored)
        metrics.WRITES.labels("patch", f"{kind.kind}/{subresource}" if subresource else kind.kind).inc()
        return stored

    async def prefer_to_delete(self, namespace: str, name: str) -> None:
        """Have a pod go first when its Deployment shrinks. Raises KubeError."""
        pod = self._store.get(POD, namespace, name)
        if pod is None or labels.annotation_of(pod, labels.DELETION_COST) is not None:
            return
        await self.reannotate(Key(namespace, name), {labels.DELETION_COST: "-1"})

    async def reannotate(self, pod_of: Key, changes: Mapping[str, str | None]) -> None:
        """Set annotations of a pod (namespace, name), or remove those that are None. Raises KubeError."""
        pod = self._store.get(POD, *pod_of)
        if pod is None:
            return
        kept = {key: value for key, value in (pod["metadata"].get("annotations") or {}).items() if key not in changes}
        annotations = {**kept, **{key: value for key, value in changes.items() if value is not None}}
        await self.patch(POD, pod, [{"op": "add", "path": "/metadata/annotations", "value": annotations}])

    async def apply_shared(self, kind: ResourceKind, body: Body) -> Body:
        """Apply an object that no ModelServe owns, unless it is so already; returns it as it is stored.

        Raises KubeError, and NameTakenError when it exists without our label.
        """
        namespace, name = key_of(body)
        live = await self._kube.get(kind, namespace=namespace, name=name)
        if live is not None and labels.label_of(live, labels.MANAGED_BY) != labels.FIELD_MANAGER:
            raise NameTakenError(kind, namespace, name)
        desired = diff.with_applied_hash(body)
        if live is not None and diff.covers(live, desired):
            return live
        stored = await self._kube.apply(kind, desired)
        metrics.WRITES.labels("apply", kind.kind).inc()
        logger.info("applied %s %s/%s", kind.kind, namespace, name)
        return stored

    async def delete(self, kind: ResourceKind, body: Body) -> None:
        """Delete a child in the background, unless it is being deleted already."""
        if body["metadata"].get("deletionTimestamp"):
            return
        namespace, name = key_of(body)
        await self._kube.delete(kind, namespace=namespace, name=name, uid=body["metadata"]["uid"])
        self._store.remove(kind, body)
        self._last[_owner(body)].pop(body["metadata"]["uid"], None)
        self._admitted.forget(_owner(body), body["metadata"]["uid"])
        metrics.WRITES.labels("delete", kind.kind).inc()
        logger.info("deleted %s %s/%s", kind.kind, namespace, name)

    async def apply_status(self, model_serve: Body, status: Body) -> bool:
        """Replace the status by this one when it differs; says whether it was written. Conditions of types that are
        not ours stay.

        It is written to the very state that it was made from: raises StatusOvertakenError when the object has changed
        since, StatusContestedError while somebody else writes it too and it is not our turn, and KubeError.
        """
        live = model_serve.get("status") or {}
        foreign = [each for each in live.get("conditions") or () if each.get("type") not in _CONDITIONS]
        whole = {**status, "conditions": [*status["conditions"], *foreign]}
        if live == digested(whole):
            return False
        key, now = Key(*key_of(model_serve)), self._clock()
        self._statuses.turn(key, live, now)
        try:
            operation = {"op": "add", "path": "/status", "value": whole}
            await self.patch(MODEL_SERVE, model_serve, [operation], subresource="status")
        except KubeError as error:
            if error.status == 404:  # deleted: its own event brings us back
                return False
            if error.status == 409:
                raise StatusOvertakenError(str(error)) from error
            raise
        self._statuses.wrote(key, digested(whole), over=live, now=now)
        return True

    async def announce(self, about: Body, transition: Transition, *, kind: ResourceKind = MODEL_SERVE) -> None:
        """Record a change of state as a Kubernetes Event. Events are best effort: a refusal is logged, not retried."""
        metadata = about["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": kind.api_version,
                "kind": kind.kind,
                **{key: metadata[key] for key in ("namespace", "name", "uid")},
            },
            "type": "Warning" if transition.warning else "Normal",
            "reason": transition.reason,
            "message": transition.message[:1024],
            "source": {"component": labels.FIELD_MANAGER},
            "reportingComponent": labels.GROUP,
            "reportingInstance": labels.FIELD_MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._kube.create(EVENT, event)
            metrics.WRITES.labels("create", "Event").inc()
        except KubeError as error:
            logger.warning("event %s of %s was not recorded: %s", transition.reason, metadata["name"], error)


def _owner(child: Body) -> Key:
    return Key(child["metadata"]["namespace"], labels.label_of(child, labels.NAME) or "")


def _says(live: object, wanted: str) -> bool:
    """Whether one YAML text says what the other does: how it is written may differ between releases."""
    if live == wanted or not isinstance(live, str):
        return live == wanted
    try:
        return bool(yaml.safe_load(live) == yaml.safe_load(wanted))
    except yaml.YAMLError:
        return False


def _check_owner(kind: ResourceKind, live: Body, body: Body) -> None:
    """Raises PredecessorError, NameTakenError."""
    namespace, name = key_of(body)
    if _same_owner(live, body):
        return
    if _same_owner(live, body, identity="name"):
        raise PredecessorError(f"{kind.kind} {namespace}/{name} belongs to a deleted ModelServe")
    raise NameTakenError(kind, namespace, name)


def _same_owner(live: Body, desired: Body, *, identity: str = "uid") -> bool:
    """Whether a ModelServe of this uid (or of this name, now or before) owns the live object."""
    wanted = {(reference["kind"], reference[identity]) for reference in desired["metadata"]["ownerReferences"]}
    owners = live["metadata"].get("ownerReferences") or ()
    return any((owner.get("kind"), owner.get(identity)) in wanted for owner in owners)
