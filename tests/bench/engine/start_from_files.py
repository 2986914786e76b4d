"""Seconds from the start of a worker to its first answer, with weights from files in memory, on a real GPU.

    python tests/bench start_from_files --variant 31B [--processes 8] [--ahead]

Writes a checkpoint of published geometry and random weights (31B: 61 GB in shards of 2 GB) into --folder, which is in
memory by default: the machine needs its size twice. Starts the worker with an empty kernel cache and then again with
what that start compiled; --ahead compiles the kernels first with `modelserve-worker kernels`, so that the first start
finds them. Prints for each start the seconds to ready, what the worker says of its phases, and how many kernels were
compiled; last the seconds to ready, cold and warm. Removes the files. Exit status 1 when a start took longer than
--limit or an answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.http.serve_and_bench import WorkerProcess
from bench.random_checkpoint import write_checkpoint

READY_LIMIT_S = 600.0
PHASES = re.compile(r"(loaded .*|rank \d+ started: .*|ready after .*|.*compiled .* while serving.*)")


def compiled(cache: Path) -> int:
    """Kernels in a cache folder."""
    return len(list(cache.glob("*/__grp__*.json")))


def answer(url: str) -> str:
    """What the worker writes after a few tokens, greedily."""
    body = {"model": "random", "prompt": [2, 5, 7, 11], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["text"])


def start(name: str, checkpoint: Path, flags: list[str], *, cache: Path, log: Path) -> tuple[float, str]:
    """(seconds to ready, an answer) of one worker, which is ended again."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    before = compiled(cache)
    own = ["--load-format", "auto", "--served-model-name", "random"]
    with WorkerProcess(checkpoint, [*own, *flags], log=log) as worker:
        seconds = worker.wait_until_ready(READY_LIMIT_S)
        said = answer(worker.url)
        fault = worker.end()
    if fault is not None:
        raise SystemExit(fault)
    print(f"{name}: ready after {seconds:.1f} s, {compiled(cache) - before} kernels compiled")
    for line in log.read_text(errors="replace").splitlines():
        if found := PHASES.search(line):
            print(f"    {found[1]}")
    return seconds, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="31B")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--device", default="cuda", help="that makes the weights and serves them (cuda or cpu)")
    parser.add_argument("--processes", type=int, default=8, help="that write shards")
    parser.add_argument("--target", default="sm_90", help="of --ahead")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--limit", type=float, default=30.0, help="most seconds to ready")
    options, flags = parser.parse_known_args()
    flags += ["--device", options.device]
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="start-from-files-") as files,
        tempfile.TemporaryDirectory(prefix="start-from-files-") as scratch,
    ):
        checkpoint, caches = Path(files), Path(scratch)
        began = time.monotonic()
        size = write_checkpoint(checkpoint, variant=options.variant, device=options.device, processes=options.processes)
        print(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - began:.0f} s")
        if options.ahead:
            shipped = caches / "shipped"
            command = [sys.executable, "-m", "modelserve_worker", "kernels", "--model", str(checkpoint)]
            subprocess.run([*command, "--output", str(shipped), "--target", options.target, *flags], check=True)
            os.environ["MODELSERVE_KERNELS_DIR"] = str(shipped)
        runs = [
            start(name, checkpoint, flags, cache=caches / "cache", log=caches / f"{name}.log")
            for name in ("cold", "warm")
        ]
    (cold, first), (warm, second) = runs
    print(f"cold {cold:.1f} s, warm {warm:.1f} s")
    if first != second:
        print(f"the answers differ: {first!r}, {second!r}")
    return int(max(cold, warm) > options.limit or first != second)
