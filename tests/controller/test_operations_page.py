"""docs/operations.md names every condition, reason and setting that exists, and none that does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelserve.termination import TerminationReason
from modelserve_operator.reasons import ConditionType, Reason
from modelserve_operator.settings import PREFIX, Settings

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"

IN_WORDS = {
    "worker_image",
    "worker_architectures",
    "watch_namespaces",
    "learn_for_all",
    "allowed",
    "startup_taints",
    "leaving_taints",
    "image_pull_secrets",
    "lease_name",
    "lease_holder",
    "build_id",
}


def _tables() -> dict[str, list[list[str]]]:
    """Rows of cells by the heading of the first column; the heading and the rule below it are left out."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", PAGE.read_text(), re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.setdefault(" ".join(rows[0][:2]), []).extend(rows[2:])
    return found


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("condition true means", {kind.value for kind in ConditionType}),
        ("reason of", {reason.value for reason in Reason}),
        ("reason meaning", {reason.value for reason in TerminationReason} | {"WorkerFailed"}),
        ("variable default", {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}),
    ],
)
def test_the_page_is_complete_and_true(table: str, names: set[str]) -> None:
    rows = _tables()[table]
    assert {row[0] for row in rows} == names
    assert len(rows) == len(names)
    assert all(row[1] for row in rows)


def test_the_stated_defaults_are_the_settings() -> None:
    rows = {row[0]: row[1] for row in _tables()["variable default"]}
    for name, field in Settings.model_fields.items():
        stated = rows[f"{PREFIX}{name.upper()}"]
        if name not in IN_WORDS:
            default = field.default
            assert stated == str(int(default) if isinstance(default, float) else default)
