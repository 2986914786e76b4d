"""AdmissionReviews in and out: what of a request a preview is made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelserve.api import KIND
from modelserve_operator import labels

API_VERSION = "admission.k8s.io/v1"
Body = Mapping[str, Any]


class NotAReviewError(Exception):
    """The request's body is no AdmissionReview."""


@dataclass(frozen=True)
class Review:
    """One request of the API server. `after`: the object as it would be, None where it goes; `before`: as it is."""

    uid: str
    after: Body | None
    before: Body | None
    dry_run: bool

    @property
    def concerns_plans(self) -> bool:
        """Whether there is something to preview: a dry run, or a change of what the operator decides by.

        Labels, owners and the like change often, by programs, and change no plan: nobody is told then.
        """
        if self.after is None or self.after["metadata"].get("deletionTimestamp") or not self.after["metadata"]["name"]:
            return False
        return self.dry_run or self.before is None or _decisive(self.before) != _decisive(self.after)


def _decisive(body: Body) -> tuple[Any, ...]:
    return body.get("spec"), labels.annotation_of(body, labels.APPROVE_PLAN)


def review_of(document: Any) -> Review:
    """Read an AdmissionReview. Raises NotAReviewError."""
    request = document.get("request") if isinstance(document, dict) else None
    if not isinstance(request, dict) or document.get("apiVersion") != API_VERSION:
        raise NotAReviewError(f"an AdmissionReview of {API_VERSION} with a request is wanted")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        raise NotAReviewError("request.uid is missing")
    after, before = (_object(request, field) for field in ("object", "oldObject"))
    return Review(uid, after, before, request.get("dryRun") is True)


def _object(request: Body, field: str) -> Body | None:
    """A ModelServe of the request, with the names that a new one may not have yet. Raises NotAReviewError."""
    body = request.get(field)
    if body is None:
        return None
    metadata = body.get("metadata") if isinstance(body, dict) else None
    if not isinstance(metadata, dict) or body.get("kind") != KIND:
        raise NotAReviewError(f"request.{field} is no {KIND}")
    named = {key: str(metadata.get(key) or request.get(key) or "") for key in ("name", "namespace", "uid")}
    named["uid"] = str(metadata.get("uid") or "")
    return {**body, "metadata": {**metadata, **named}}


def answer(uid: str, warnings: Sequence[str]) -> dict[str, Any]:
    """The AdmissionReview in return: allowed, always."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if warnings:
        response["warnings"] = list(warnings)
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
