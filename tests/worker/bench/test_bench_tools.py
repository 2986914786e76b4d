"""Tools that measure: each is listed with what it answers, and tells its options."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from bench.entries import ROOT, entries

HELP_OF_ALL = """
import sys
sys.path.insert(0, sys.argv[1])
from bench.entries import entries, run
for name in entries():
    try:
        run([name, "--help"])
    except SystemExit as ended:
        assert not ended.code, name
    print("\\f")
"""


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    """What each tool says to --help, of one process that imports them all."""
    command = [sys.executable, "-c", HELP_OF_ALL, str(ROOT / "tests")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return dict(zip(entries(), said.stdout.split("\f\n"), strict=False))


def test_every_tool_is_listed_with_a_sentence() -> None:
    listed = subprocess.run([sys.executable, "tests/bench"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == len(entries()) > 45
    assert [each.name for each in entries().values() if not re.fullmatch(r"[A-Z].{20,}[.?]", each.answers)] == []


def test_every_tool_tells_its_options(options: dict[str, str]) -> None:
    assert [name for name, said in options.items() if not said.startswith(f"usage: {name} ")] == []
