"""Learns what admission makes of our own writes to children from the answers to them, not from what anybody may write.

The annotation on a child outlives the process, but whoever may edit the child can compute it. So it is believed of a
Deployment alone, when a process sees it for the first time: putting its template right again would replace pods.
Of other children an answer is asked for anew, which ends nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import DEPLOYMENT, ResourceKind
from modelserve_operator.process.work_queue import Key

Body = Mapping[str, Any]


class AdmittedChanges:
    """By ModelServe and uid of the child: the digest of what admission changes, empty where it changes nothing."""

    def __init__(self) -> None:
        self._known: dict[Key, dict[str, str]] = defaultdict(dict)

    def accounts_for(self, kind: ResourceKind, live: Body, wrong: Mapping[str, Any]) -> bool:
        """Whether what is not as we want it is admission's doing. The child is known from then on."""
        known, uid = self._known[_owner(live)], live["metadata"]["uid"]
        noted = (labels.annotation_of(live, labels.ADMITTED) or "") if kind is DEPLOYMENT and wrong else ""
        remembered = known.setdefault(uid, noted)
        return bool(wrong) and remembered == labels.short_hash(wrong)

    def note(self, live: Body, digest: str) -> None:
        """The answer to our own write differs from it in this."""
        self._known[_owner(live)][live["metadata"]["uid"]] = digest

    def forget(self, key: Key, uid: str | None = None) -> None:
        """A ModelServe is gone, or one child of it."""
        if uid is None:
            self._known.pop(key, None)
        else:
            self._known[key].pop(uid, None)


def _owner(child: Body) -> Key:
    return Key(child["metadata"]["namespace"], labels.label_of(child, labels.NAME) or "")
