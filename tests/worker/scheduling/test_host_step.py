"""The benchmark of the host's part of a step runs without a GPU and ends with its total."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_ends_with_the_total_milliseconds() -> None:
    program = [sys.executable, "tests/benchmarks/host_step.py", "--requests", "3", "--context", "200", "--steps", "5"]
    done = subprocess.run(
        program, cwd=ROOT, env={"PYTHONPATH": "operator:worker"}, capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["schedule", "pack", "update", "stats", "total"]
    assert float(lines[-1]) > 0
