"""What a user asked of the API server, from its audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from localcluster.settings import Layout

READS = ("get", "list", "watch")


def requests(layout: Layout, user: str) -> Iterator[dict[str, Any]]:
    """Entries of one user, in order."""
    for line in layout.audit_log.read_text().splitlines():
        entry: dict[str, Any] = json.loads(line)
        if entry["user"]["username"] == user:
            yield entry


def rules_used(layout: Layout, user: str) -> set[tuple[str, str, str, str]]:
    """(namespace, group, resource/subresource, verb) of every request for a resource; namespace "" for all of them."""
    used = set()
    for entry in requests(layout, user):
        reference = entry.get("objectRef")
        if reference is not None and "resource" in reference:
            parts = (reference["resource"], reference.get("subresource"))
            resource = "/".join(part for part in parts if part)
            used.add((reference.get("namespace", ""), reference.get("apiGroup", ""), resource, entry["verb"]))
    return used


def answers_s(layout: Layout, path: str, *, edited_by: str, answered_by: str, since: datetime) -> list[float]:
    """Of each edit (or deletion) of the object at `path` since then: seconds until the other user wrote to it.

    An edit that nobody has answered yet is left out.
    """
    answers: list[float] = []
    edited: datetime | None = None
    for entry in map(json.loads, layout.audit_log.read_text().splitlines()):
        written = entry["verb"] not in READS and entry.get("responseStatus", {}).get("code", 500) < 300
        at = datetime.fromisoformat(entry["stageTimestamp"])
        if not written or entry["requestURI"].partition("?")[0] != path or at < since:
            continue
        if entry["user"]["username"] == edited_by:
            edited = edited or at
        elif entry["user"]["username"] == answered_by and edited is not None:
            answers.append((at - edited).total_seconds())
            edited = None
    return answers
