"""Seconds of tests/soak/sessions.py (ten by `make test-long`): two ranks, a small pool, a small host tier, half of it
refused on one rank, copies that do not end; every answer is that of an engine without a cache, and no byte is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_length import share

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(900)  # it goes through all its parts on a slow machine, too
def test_sessions_over_two_ranks_and_host_memory() -> None:
    done = subprocess.run(
        [sys.executable, "tests/soak/sessions.py", "--seconds", str(share(10))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "operator:worker"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "never: ['stored']" in done.stdout
    assert "never: ['loaded']" in done.stdout
