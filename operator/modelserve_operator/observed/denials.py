"""Finds who denied an object in the API server's own words. Pure."""

from __future__ import annotations

from modelserve_operator.reasons import Reason


def denial(message: str) -> Reason:
    """Who denied it, by the API server's own words: a quota, RBAC, or a rule of the cluster (any other admission)."""
    if any(words in message for words in ("exceeded quota", "failed quota", "insufficient quota")):
        return Reason.QUOTA_EXCEEDED
    by_rbac = "cannot " in message and " resource " in message
    if (by_rbac or "is being terminated" in message) and not by_policy(message):
        return Reason.FORBIDDEN
    return Reason.POLICY_DENIED


def by_policy(message: str) -> bool:
    """Whether a rule of the cluster did: a webhook, a policy or Pod Security."""
    return any(
        words in message for words in ("denied the request", "ValidatingAdmissionPolicy", "violates PodSecurity")
    )
