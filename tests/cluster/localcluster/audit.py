"""What a user asked of the API server, from its audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from localcluster.settings import Layout

READS = ("get", "list", "watch")
_BEGINNINGS = (("list", "ResponseComplete"), ("watch", "ResponseStarted"))  # of a watch the end is told as well


def requests(layout: Layout, user: str) -> Iterator[dict[str, Any]]:
    """Entries of one user, in the order in which the API server got the requests."""
    return (entry for entry in _entries(layout) if entry["user"]["username"] == user)


def _entries(layout: Layout) -> Iterator[dict[str, Any]]:
    """All that are complete: the API server may be in the middle of a line. What it has just answered may be missing.

    Lines are written behind the answers, by as many threads as there are requests: their own order says little.
    """
    complete, _, _ = layout.audit_log.read_text().rpartition("\n")
    yield from sorted(map(json.loads, complete.splitlines()), key=lambda entry: entry["requestReceivedTimestamp"])


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


def asked_before_answers(
    layout: Layout, path: str, *, edited_by: str, answered_by: str, since: datetime
) -> list[list[str]]:
    """Of each edit (or deletion) of the object at `path` since then: what the other user asked about objects of its
    kind before it wrote to that one. Nothing, where it heard of the edit by a watch that was open; else a LIST or a new
    watch. An edit that nobody has answered yet is left out.
    """
    resource = path.split("/")[-2]
    answers: list[list[str]] = []
    asked: list[str] | None = None  # since an edit that is not answered
    for entry in _entries(layout):
        if datetime.fromisoformat(entry["stageTimestamp"]) < since:
            continue
        user, verb = entry["user"]["username"], entry["verb"]
        succeeded = entry.get("responseStatus", {}).get("code", 500) < 300
        written = verb not in READS and succeeded and entry["requestURI"].partition("?")[0] == path
        if written and user == edited_by:
            asked = [] if asked is None else asked
        elif user == answered_by and asked is not None:
            if written:
                answers.append(asked)
                asked = None
            elif (entry.get("objectRef") or {}).get("resource") == resource and (verb, entry["stage"]) in _BEGINNINGS:
                asked.append(f"{verb} {entry['requestURI']}")
    return answers
