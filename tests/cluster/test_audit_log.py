"""What is read from an audit log while the API server writes it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localcluster import audit
from localcluster.settings import ADMIN_USER, OPERATOR_USER, Layout

SERVICES = "/api/v1/namespaces/here/services"
SINCE = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout("test", tmp_path)
    found.logs.mkdir(parents=True)
    return found


def _entry(second: int, user: str, verb: str, uri: str, *, stage: str = "ResponseComplete") -> dict[str, Any]:
    at = f"2026-01-01T00:00:{second:02}.000000Z"
    return {
        "user": {"username": user}, "verb": verb, "requestURI": uri, "stage": stage, "stageTimestamp": at,
        "requestReceivedTimestamp": at, "objectRef": {"resource": "services"}, "responseStatus": {"code": 200},
    }  # fmt: skip


def _write(layout: Layout, *entries: dict[str, Any], unfinished: str = "") -> None:
    layout.audit_log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries) + unfinished)


def _asked(layout: Layout) -> list[list[str]]:
    return audit.asked_before_answers(
        layout, f"{SERVICES}/tiny", edited_by=ADMIN_USER, answered_by=OPERATOR_USER, since=SINCE
    )


EDIT = _entry(1, ADMIN_USER, "patch", f"{SERVICES}/tiny?fieldManager=kubectl")
ANSWER = _entry(5, OPERATOR_USER, "patch", f"{SERVICES}/tiny?force=true")


def test_a_line_that_is_being_written_is_none_yet(layout: Layout) -> None:
    _write(layout, EDIT, unfinished=json.dumps(ANSWER)[:70])
    assert len(list(audit.requests(layout, ADMIN_USER))) == 1
    assert list(audit.requests(layout, OPERATOR_USER)) == []
    assert _asked(layout) == [], "nobody has answered yet"


def test_an_answer_is_told_from_one_that_had_to_be_asked_for(layout: Layout) -> None:
    ends = _entry(3, OPERATOR_USER, "watch", f"{SERVICES}?watch=1")
    _write(layout, EDIT, ends, _entry(4, OPERATOR_USER, "list", "/api/v1/pods") | {"objectRef": None}, ANSWER)
    assert _asked(layout) == [[]]
    for verb, stage in (("list", "ResponseComplete"), ("watch", "ResponseStarted")):
        _write(layout, EDIT, _entry(3, OPERATOR_USER, verb, "/api/v1/services", stage=stage), ANSWER)
        assert _asked(layout) == [[f"{verb} /api/v1/services"]]


def test_requests_are_in_the_order_of_their_arrival_whoever_was_written_down_first(layout: Layout) -> None:
    _write(layout, ANSWER, EDIT)
    assert _asked(layout) == [[]]
