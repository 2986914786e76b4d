"""The worker and its engine as processes, a stub for the engine: what clients, kubelet and operator see of faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stub_engine import Fault
from worker_process import MODEL, serving

from localcluster.processes import free_ports
from modelserve import __version__
from modelserve.termination import TERMINAL_EXIT_CODE

BODY: dict[str, Any] = {"model": MODEL.name, "prompt": [2, 3], "ignore_eos": True}
ENDLESS = BODY | {"max_tokens": 800, "stream": True}


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False


def _gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while any(map(_is_running, pids)):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def _events(lines: Iterator[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_a_worker_serves_refuses_and_drains_without_torch(tmp_path: Path) -> None:
    with serving(tmp_path, step_seconds=0.01, with_rank=True) as worker:
        worker.wait_until_ready()
        engine = worker.engine()
        assert engine["pid"] not in (worker.process.pid, os.getpid())
        with worker.http.stream("POST", "/v1/completions", json=ENDLESS | {"max_tokens": 100}) as stream:
            lines = stream.iter_lines()
            next(lines)
            for streams in (False, True):
                refused = worker.http.post("/v1/completions", json=BODY | {"seed": Fault.REFUSED, "stream": streams})
                assert refused.status_code == 400
                assert refused.json()["error"]["message"] == "7 pages are asked for and there are 5"
                assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (
                    "max_tokens", "invalid_value",
                )  # fmt: skip
                broken = worker.http.post("/v1/completions", json=BODY | {"seed": Fault.BROKEN, "stream": streams})
                assert broken.status_code == 500
                assert "ZeroDivisionError" in broken.json()["error"]["message"]
            worker.process.send_signal(signal.SIGTERM)
            assert _events(lines)[-1]["choices"][0]["finish_reason"] == "length"
        worker.http.close()  # idle connections are waited for
        assert worker.process.wait(60) == 0
        assert worker.imported() == "[]"
        _gone(engine["pid"], engine["rank"])
        assert worker.termination.read_text() == ""


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_lost_engine_fails_its_streams_and_ends_the_worker(tmp_path: Path, how: str) -> None:
    with serving(tmp_path, step_seconds=0.01, deadline_s=2.0, with_rank=True) as worker:
        worker.wait_until_ready()
        engine = worker.engine()
        with worker.http.stream("POST", "/v1/completions", json=ENDLESS) as stream:
            lines = stream.iter_lines()
            next(lines)
            if how == "killed":
                os.kill(engine["pid"], signal.SIGKILL)
                told = "was killed by signal 9"
            else:
                unanswered = worker.http.post("/v1/completions", json=ENDLESS | {"seed": Fault.HANG})
                assert (unanswered.status_code, unanswered.json()["error"]["code"]) == (503, "unavailable")
                told = "the device or a rank hangs"
            error = _events(lines)[-1]["error"]
            assert (error["code"], told in error["message"]) == ("unavailable", True), error
            assert worker.http.get("/health").status_code == 503
        assert worker.process.wait(60) == 1
        assert worker.termination.read_text() == "", "a restart may help: nothing that the operator would stop at"
        _gone(engine["pid"], engine["rank"])


def test_a_killed_worker_takes_its_engine_and_ranks_with_it(tmp_path: Path) -> None:
    with serving(tmp_path, step_seconds=0.01, with_rank=True) as worker:
        worker.wait_until_ready()
        engine = worker.engine()
        with worker.http.stream("POST", "/v1/completions", json=ENDLESS) as stream:
            next(stream.iter_lines())
            worker.process.kill()
            _gone(engine["pid"], engine["rank"])


def test_a_start_that_no_restart_can_help_keeps_its_exit_code_and_message(tmp_path: Path) -> None:
    with serving(tmp_path, end="memory") as worker:
        assert worker.process.wait(60) == TERMINAL_EXIT_CODE
        assert json.loads(worker.termination.read_text()) == {
            "reason": "InsufficientMemory", "message": "12 bytes are missing per device", "shortfallBytes": 12,
            "measured": {"context": 7}, "engineVersion": __version__,
        }  # fmt: skip
        assert worker.imported() == "[]"


def test_a_start_that_stalled_keeps_the_message_of_the_engine(tmp_path: Path) -> None:
    """The load watchdog writes the message in the engine's process, and no one may write over it."""
    with serving(tmp_path, end="stalled") as worker:
        worker.termination.write_text("LoadStalled")
        assert worker.process.wait(60) == TERMINAL_EXIT_CODE
        assert worker.termination.read_text() == "LoadStalled"


def test_a_signal_while_loading_ends_the_worker_and_its_engine(tmp_path: Path) -> None:
    with serving(tmp_path, end="never") as worker:
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline
            try:
                assert worker.http.get("/health").json()["status"] == "loading"
                break
            except httpx.TransportError:
                time.sleep(0.05)
        children = [int(pid) for pid in Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
                    .read_text().split()]  # fmt: skip
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(60) == 0
        _gone(*children)


def test_the_benchmark_of_prompts_ends_with_the_cpu_per_prompt() -> None:
    root = Path(__file__).parents[3]
    (port,) = free_ports(1)
    flags = ["--prompt-tokens", "64", "--prompts", "3", "--port", str(port)]
    done = subprocess.run(
        [sys.executable, "tests/bench", "front_end", *flags], cwd=root,
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    *parts, first_event, cpu = done.stdout.splitlines()
    assert [line.split("median")[0].strip() for line in parts] == [
        "count structure", "read JSON", "validate", "make the request", "write the message", "read the message",
        "together",
    ]  # fmt: skip
    assert first_event.startswith("to the first event: median")
    assert float(cpu.rpartition(" ")[2]) > 0


@pytest.mark.parametrize("route", ["completions", "chat", "responses", "messages"])
def test_the_benchmark_of_events_ends_with_the_cpu_per_token(route: str) -> None:
    flags = ["--route", route, "--streams", "3", "--steps", "4", "--steps-at-once", "2"]
    done = subprocess.run(
        [sys.executable, "tests/bench", "stream_events", *flags], cwd=Path(__file__).parents[3],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    told, _, of_an_event = done.stdout.strip().rpartition(", ")
    assert told.startswith(f"{route}: "), done.stdout
    assert of_an_event == "2.00 tokens an event"
    assert done.stderr == ""
