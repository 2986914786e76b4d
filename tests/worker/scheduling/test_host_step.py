"""The benchmark of the host's part of a step runs without a GPU and ends with its total."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--requests", "3", "--context", "200"], ["schedule", "pack", "update", "stats", "total"]),
        (["--prompt", "200"], ["unpack", "add", "schedule", "pack", "update", "report", "total"]),
    ],
)
def test_the_benchmark_ends_with_the_total_milliseconds(flags: list[str], parts: list[str]) -> None:
    program = [sys.executable, "tests/bench", "host_step", "--steps", "5", *flags]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == parts
    assert float(lines[-1]) > 0
