"""A tool that measures a worker is ended in the middle: what it had is told, and the worker does not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DONE = "16/4/1/1"


def running(folder: Path) -> list[int]:
    """Processes of the sessions in which one was started over a file of `folder`."""
    sessions, of = set(), {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            named = str(folder).encode() in (process / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if state != "Z":
            of[int(process.name)] = session
            sessions |= {session} if named else set()
    return [pid for pid, session in of.items() if session in sessions and pid != os.getpid()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_worker_ends_with_the_tool_and_figures_so_far_are_told(number: signal.Signals, tmp_path: Path) -> None:
    """In the middle of a load of thousands of tokens; at SIGTERM, as at its own deadline, it prints its table."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / "tests/bench"), "serve_and_bench", "--variant", "tiny", "--device", "cpu"]
    command += ["--cpu-memory-bytes", str(1 << 30), "--point", DONE, "--point", "16/2000/1/9"]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as tool:
        assert tool.stdout is not None
        for line in tool.stdout:
            said.append(line)
            if line.startswith(DONE):
                break
        workers = set(running(tmp_path)) - {tool.pid}
        assert len(workers) > 1, "".join(said)
        tool.send_signal(number)
        said += tool.stdout.readlines()
    while workers & set(running(tmp_path)):
        time.sleep(0.05)
    if number is signal.SIGTERM:
        assert tool.returncode == 124, "".join(said)
        assert "not all was measured: SIGTERM" in said[-1]
        assert sum(line.startswith(DONE) for line in said) == 2, "".join(said)
    else:
        assert tool.returncode == -signal.SIGKILL
