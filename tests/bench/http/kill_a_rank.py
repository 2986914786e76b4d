"""What kill -9 of a rank does while requests stream: who hears of it and when, and whether a fresh worker serves again.

    python tests/bench kill_a_rank --variant E4B [--tensor-parallel-size 2] [worker flags]

Prints seconds from the signal to the end of each open stream, to an unhealthy /health and to the worker's end, with the
error that clients saw; then starts the worker again, as its container would, and asks once. Exit status 1 when a stream
went on or hung for 5 s, ended without an error, or the second worker did not answer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench.http.serve_and_bench import WorkerProcess
from bench.random_checkpoint import read_config, write_model

STREAMS = 8
LIMIT_S = 5.0


def completion(url: str, *, max_tokens: int, stream: bool) -> urllib.request.Request:
    body = {"model": "gemma", "prompt": [7, 8, 9, 10], "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    return urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


class Stream(threading.Thread):
    """One streamed answer: its lines, how it ended, and when."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.lines, self.failure = url, [], ""
        self.ended_s = 0.0
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(completion(self.url, max_tokens=8000, stream=True), timeout=60) as response:
                for line in response:
                    if line.strip():
                        self.lines.append(line.decode().strip())
        except (OSError, urllib.error.URLError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        self.ended_s = time.monotonic()


def rank_process(group: int) -> int:
    """Of rank 1: the child of the engine's process that multiprocessing spawned, named by its command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(state[2]) == group and "spawn_main" in command:
            found.append((int(state[1]), int(folder.name)))
    parents = {pid for _, pid in found}
    (rank,) = [pid for parent, pid in found if parent in parents] or [max(pid for _, pid in found)]
    return rank


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def killed(worker: WorkerProcess) -> list[str]:
    """Kill rank 1 under load; what was wrong with the consequences."""
    streams = [Stream(worker.url) for _ in range(STREAMS)]
    while not all(len(stream.lines) > 20 for stream in streams):
        time.sleep(0.05)
    pid = rank_process(worker._process.pid)
    os.kill(pid, signal.SIGKILL)
    began, unhealthy = time.monotonic(), None
    while time.monotonic() - began < 30 and worker._process.poll() is None:
        if unhealthy is None and not healthy(worker.url):
            unhealthy = time.monotonic() - began
        time.sleep(0.02)
    ended = time.monotonic() - began
    for stream in streams:
        stream.join(1.0)
    waits = [stream.ended_s - began if stream.ended_s else float("inf") for stream in streams]
    last = [" ".join(stream.lines[-2:])[-600:] for stream in streams]
    errors = {(text if "error" in text else "") or stream.failure for text, stream in zip(last, streams, strict=True)}
    print(f"killed rank process {pid}: {STREAMS} streams ended after {min(waits):.2f} to {max(waits):.2f} s")
    print(f"unhealthy after {unhealthy} s; the worker ended with {worker._process.poll()} after {ended:.2f} s")
    print("clients saw:", *errors, sep="\n  ")
    faults = [f"a stream ended {max(waits):.1f} s after the kill"] if max(waits) > LIMIT_S else []
    typed = all("rank" in text and "error" in text for text in last)
    return faults + ([] if typed else ["a stream ended without an error that names the rank"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--tensor-parallel-size", default="2")
    options, flags = parser.parse_known_args()
    flags += ["--tensor-parallel-size", options.tensor_parallel_size, "--served-model-name", "gemma"]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        write_model(checkpoint, read_config(options.variant))
        worker = WorkerProcess(checkpoint, flags, log=Path(folder) / "first.log")
        print(f"ready after {worker.wait_until_ready(120):.1f} s", flush=True)
        faults = killed(worker)
        if faults:
            print(worker.log_end())
        again = WorkerProcess(checkpoint, flags, log=Path(folder) / "second.log")
        print(f"ready again after {again.wait_until_ready(120):.1f} s", flush=True)
        with urllib.request.urlopen(completion(again.url, max_tokens=8, stream=False), timeout=30) as response:
            answer = json.loads(response.read())
        print("answers again:", answer["usage"])
        fault = again.end()
    faults += [fault] if fault else []
    print("\n".join(faults) or "every check passed")
    return int(bool(faults))
