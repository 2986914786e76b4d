"""The worker through HTTP on a real GPU: published geometry, random weights, load from modelserve-bench.

    python tests/bench serve_and_bench --variant 31B --max-model-len 16384 --point 8192/150/1 --point 8192/150/8 \
        --point 2048/512/32 [--kv-cache-dtype int8] [--max-num-batched-tokens 2048] [--beside 126000 --chats 1/60]

A point is input tokens / output tokens / concurrency, and the number of requests where 4 times the concurrency is not
meant. --chats a second / for so many seconds: chats of 200 tokens and 150 answered that arrive at random, while prompts
of --beside tokens are computed one after the other; a line of each load. Flags that are not listed by --help go to the
worker. Prints the seconds to ready, the table of every point as it comes, and last one table of all of them, also where
--deadline or SIGTERM ends it before; its worker ends with it in every case. Needs no network and no installed package.
Exit status 1 when a request failed or the worker did not end within its drain, 124 where time was up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.deadline import add_deadline, die_with_parent, within
from bench.random_checkpoint import read_config, write_model
from modelserve_tools.evaluation.columns import Row, columns

DRAIN_SECONDS = 10
END_SECONDS = 60.0
LOG_LINES = 40
INTERRUPTED, INTERRUPTED_SECONDS = 130, 5.0
MIB = 1 << 20
HEADINGS = (
    "POINT", "OK", "BAD", "REQ/S", "OUT TOK/S", "TTFT MS", "p99", "TPOT MS", "p99", "ITL p50", "p99", "max", "E2E p50",
    "IN TIME", "DRIVER",
)  # fmt: skip


class WorkerProcess:
    """`modelserve-worker serve` with a session of its own, so that none of its processes can be overlooked. A context
    that fails kills it; else `end` asks it to end."""

    def __init__(self, checkpoint: Path, flags: list[str], *, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "modelserve_worker",
            "serve",
            "--model",
            str(checkpoint),
            "--host",
            "127.0.0.1",
        ]
        command += ["--port", str(port), "--load-format", "dummy", "--drain-seconds", str(DRAIN_SECONDS), *flags]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, start_new_session=True, preexec_fn=die_with_parent
            )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:  # nobody waits for answers any more, and whoever comes next needs the memory
            self.kill()

    def wait_until_ready(self, limit_s: float) -> float:
        """Seconds since its start. Raises SystemExit with the end of its log when it ends or takes longer."""
        while not self._ready():
            if self._process.poll() is not None:
                raise SystemExit(f"the worker ended with {self._process.returncode}:\n{self.log_end()}")
            if time.monotonic() - self._began > limit_s:
                raise SystemExit(f"the worker was not ready after {limit_s:g} s:\n{self.log_end()}")
            time.sleep(0.05)
        return time.monotonic() - self._began

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def end(self) -> str | None:
        """Ask it to end. Returns what was wrong with that, and leaves no process of it."""
        began = time.monotonic()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        fault = None
        try:
            code = self._process.wait(END_SECONDS)
            print(f"the worker ended with {code} after {time.monotonic() - began:.1f} s")
            if code != 0:
                fault = f"the worker ended with {code}:\n{self.log_end()}"
            elif self._remains():
                fault = f"processes of the worker are left in session {self._process.pid}"
        except subprocess.TimeoutExpired:
            fault = f"the worker did not end within {END_SECONDS:g} s of SIGTERM:\n{self.log_end()}"
        if self._remains():
            self.kill()
        return fault

    def kill(self) -> None:
        """All of it, and wait until it is gone: its memory of the GPU is free then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._remains()

    def _remains(self) -> bool:
        """Whether a process of the worker's group still runs after a moment; those that nobody reaped yet do not."""
        for _ in range(20):
            if not any(self.is_ours(stat) for stat in Path("/proc").glob("[0-9]*/stat")):
                return False
            time.sleep(0.1)
        return True

    def is_ours(self, stat: Path) -> bool:
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            return False
        return state != "Z" and int(group) == self._process.pid


def load(url: str, tokens: tuple[str, str], flags: list[str], *, vocab_size: int, json_path: Path) -> list[str]:
    """The command of a load of prompts and answers of so many tokens."""
    return [
        sys.executable, "-m", "modelserve_tools.bench", "--base-url", url, "--temperature", "1",
        "--input-tokens", tokens[0], "--output-tokens", tokens[1], *flags, "--json", str(json_path),
        "--first-token-id", str(min(1000, vocab_size // 2)), "--vocab-size", str(min(255_000, vocab_size)),
    ]  # fmt: skip


def run_load(command: list[str]) -> bool:
    """False when a request failed. Where the tool is ended the load prints what it has first."""
    with subprocess.Popen(command, preexec_fn=die_with_parent) as process:
        try:
            return process.wait() == 0
        except BaseException:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPTED_SECONDS)
            process.kill()
            raise


def point_load(url: str, point: str, *, vocab_size: int, seed: int, json_path: Path) -> list[str]:
    """Another seed for each, so that no prompt comes twice."""
    tokens_in, tokens_out, concurrency, *number = point.split("/")
    flags = ["--concurrency", concurrency, "--seed", str(seed), *(["--num-requests", number[0]] if number else [])]
    return load(url, (tokens_in, tokens_out), flags, vocab_size=vocab_size, json_path=json_path)


def poisson_load(url: str, point: str, *, goodput: str, vocab_size: int, seed: int, json_path: Path) -> list[str]:
    """Requests that arrive at random, one load for each rate; the driver's own tables say what came in time."""
    tokens_in, tokens_out, rates, number = point.split("/")
    flags = ["--rate", rates, "--num-requests", number, "--goodput", goodput, "--seed", str(seed)]
    return load(url, (tokens_in, tokens_out), flags, vocab_size=vocab_size, json_path=json_path)


def runs_one(url: str) -> bool:
    """Whether a request runs."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        return re.search(rb"^vllm:num_requests_running\S* 1", response.read(), re.MULTILINE) is not None


def chats_beside(
    url: str, prompt: int, chats: str, *, vocab_size: int, seed: int, paths: tuple[Path, Path]
) -> list[bool]:
    """Whether each of both loads went well. The long prompts end with the chats: the one that runs then is given up."""
    rate, seconds = chats.split("/")
    most = ["--concurrency", "1", "--num-requests", str(1 + int(float(seconds)) // 2), "--seed", str(seed)]
    number = max(1, round(float(rate) * float(seconds)))
    arriving = ["--rate", rate, "--num-requests", str(number), "--seed", str(seed + 1)]
    with subprocess.Popen(load(url, (str(prompt), "16"), most, vocab_size=vocab_size, json_path=paths[0])) as long:
        while long.poll() is None and not runs_one(url):
            time.sleep(0.1)
        ended = subprocess.run(
            load(url, ("200", "150"), arriving, vocab_size=vocab_size, json_path=paths[1]), check=False
        )
        long.send_signal(signal.SIGINT)
    return [long.returncode in (0, INTERRUPTED), ended.returncode == 0]


def memory_line(url: str) -> str:
    """The pool that was promised beside what the driver leaves for one now: the allocator gives nothing back."""
    with urllib.request.urlopen(f"{url}/v1/plan", timeout=5) as response:
        plan = json.load(response)
    if shutil.which("nvidia-smi") is None:
        return "memory: there is no nvidia-smi to ask"
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        query += ["--id", os.environ["CUDA_VISIBLE_DEVICES"]]
    used = [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]
    rest = max(used[: plan["gpusPerReplica"]]) - plan["allocated"]["kvPoolBytes"] / MIB
    allowed, promised = sum(plan["perGpu"].values()) / MIB, plan["perGpu"]["kvPoolBytes"] / MIB
    return (
        f"memory: everything but the pool {rest:.0f} MiB, so {allowed - rest:.0f} MiB of pool were possible, "
        f"{promised:.0f} promised: {100 * (promised - allowed + rest) / (allowed - rest):+.2f} % of the pool"
    )


def row(point: str, load: dict[str, Any]) -> Row:
    def ms(name: str, figure: str) -> str:
        return f"{load[name][figure]:.2f}" if load[name] else "-"

    good = load.get("goodput")
    return Row((
        point if load["rate"] is None else f"{point} at {load['rate']:g}/s",
        str(load["ok"]), str(load["failed"] + load["wrong_length"] + load["unfinished"]),
        f"{load['requests_per_s']:.3g}", f"{load['output_tokens_per_s']:.1f}",
        ms("ttft_ms", "mean"), ms("ttft_ms", "p99"), ms("tpot_ms", "mean"), ms("tpot_ms", "p99"),
        ms("itl_ms", "p50"), ms("itl_ms", "p99"), ms("itl_ms", "max"), ms("e2e_ms", "p50"),
        "-" if good is None or good["share"] is None else f"{good['share']:.0%}", f"{load['driver_cpu_share']:.0%}",
    ))  # fmt: skip


@dataclass
class Run:
    """The loads that were asked for, one after the other, and what came of them."""

    options: argparse.Namespace
    faults: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def loads(self, url: str, out: Path, *, vocab_size: int) -> None:
        """A load that the tool's end cuts short has what it had by then."""
        options = self.options
        for seed, point in enumerate(options.points):
            path = out / f"point-{seed}-{point.replace('/', '-')}.json"
            with self.told((point, path)):
                self.check(point, run_load(point_load(url, point, vocab_size=vocab_size, seed=seed, json_path=path)))
        for seed, point in enumerate(options.poisson):
            path = out / f"poisson-{seed}.json"
            command = poisson_load(
                url, point, goodput=options.goodput, vocab_size=vocab_size, seed=50 + seed, json_path=path
            )
            with self.told((point, path)):
                self.check(point, run_load(command))
        for seed, chats in enumerate(options.chats):
            names = f"{options.beside}-beside", f"chats-{chats.replace('/', '-')}"
            paths = out / f"{seed}-{names[0]}.json", out / f"{seed}-{names[1]}.json"
            with self.told(*zip(names, paths, strict=True)):
                sound = chats_beside(
                    url, options.beside, chats, vocab_size=vocab_size, seed=100 + 2 * seed, paths=paths
                )
                for name, well in zip(names, sound, strict=True):
                    self.check(name, well)

    def check(self, load: str, sound: bool) -> None:
        self.faults += [] if sound else [f"{load}: requests failed"]

    @contextlib.contextmanager
    def told(self, *loads: tuple[str, Path]) -> Iterator[None]:
        """Rows of these loads, when they have ended."""
        before = len(self.rows)
        try:
            yield
        finally:
            for name, path in loads:
                if path.exists() and path.stat().st_size:
                    self.rows += [row(name, load) for load in json.loads(path.read_text())["loads"]]
            if len(self.rows) > before:
                print("\n".join(columns(HEADINGS, self.rows[before:], text_columns=1)), flush=True)


def point_text(text: str) -> str:
    parts = text.split("/")
    if len(parts) not in (3, 4) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no point; write it as INPUT/OUTPUT/CONCURRENCY[/REQUESTS]")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--variant", required=True)
    parser.add_argument("--weights", help="quantised random weights, such as int4_g32 or fp8_channel; else bfloat16")
    parser.add_argument("--point", type=point_text, action="append", default=[], dest="points")
    parser.add_argument(
        "--poisson", action="append", default=[], metavar="INPUT/OUTPUT/RATE,.../REQUESTS", help="with --goodput"
    )
    parser.add_argument("--goodput", default="ttft:2000,tpot:50", help="what is in time, as modelserve-bench takes it")
    parser.add_argument("--beside", type=int, default=126_000, help="tokens of the prompts beside --chats (126,000)")
    parser.add_argument("--chats", action="append", default=[], metavar="RATE/SECONDS")
    parser.add_argument("--ready-seconds", type=float, default=300.0, help="most seconds to ready (default 300)")
    parser.add_argument("--out", type=Path, help="keep the worker's log and each point's JSON there")
    add_deadline(parser)
    options, worker_flags = parser.parse_known_args()
    config = read_config(options.variant, options.weights)
    run = Run(options)
    with within(options.deadline) as time_left, tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / f"gemma-4-{options.variant}"
        architecture = write_model(checkpoint, config)
        out = options.out or Path(directory)
        out.mkdir(parents=True, exist_ok=True)
        with WorkerProcess(checkpoint, worker_flags, log=out / "worker.log") as worker:
            ready = worker.wait_until_ready(options.ready_seconds)
            print(f"{options.variant} ready after {ready:.1f} s", flush=True)
            run.loads(worker.url, out, vocab_size=architecture.vocab_size)
            print(memory_line(worker.url), flush=True)
            fault = worker.end()
        run.faults += [fault] if fault else []
    model = f"{options.variant} {options.weights or 'bfloat16'}"
    table = columns(HEADINGS, run.rows, text_columns=1)
    print("\n".join([*run.faults, "", f"{model} {' '.join(worker_flags)}", *table]))
    return time_left.code(run.faults)
