"""Anonymous host memory of a worker's processes while it loads and serves, from which pods' requests are made.

    python tests/bench host_memory [--variant E2B] [--layers 6]
        [--device cpu|cuda] [--tensor-parallel 1] [--requests 64] [--prompt-tokens 2000]

Random weights of a published size cut to some layers, with a tokenizer of the published vocabulary, are written to a
temporary folder, served by a worker of its own, and asked many long questions at once. Printed are the peaks of
RssAnon, RssFile and RssShmem by process, and of all at once with the compilers that they start, in MiB. File pages of
the mapped weights can be reclaimed; the others cannot. On the CPU weights and pool are anonymous too: `beside` leaves
the weights out, and what is left while loading is what a GPU's host needs, but for CUDA itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench import random_checkpoint

MIB = 1 << 20
FIELDS = ("RssAnon", "RssFile", "RssShmem")
POOL_HEADROOM = 6 << 30


class Sampler(threading.Thread):
    """Peaks by phase, process and field, in bytes; `phase` may be set at any time."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.phase = "loading"
        self.peaks: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(FIELDS, 0))
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            for pid, name in [(self.root, "front end"), *self._engines(self.root)]:
                self._see(name, _status(pid))
            everyone = [_status(pid) for pid in _descendants(self.root)]
            self._see("all, compilers", {field: sum(each.get(field, 0) for each in everyone) for field in FIELDS})

    def _see(self, name: str, sizes: dict[str, int]) -> None:
        seen = self.peaks[self.phase, name]
        for field, size in sizes.items():
            seen[field] = max(seen[field], size)

    def _engines(self, pid: int, depth: int = 0) -> list[tuple[int, str]]:
        found = []
        for child in _children(pid):
            if "spawn_main" in _command(child):
                found += [(child, "engine" if depth == 0 else "further rank"), *self._engines(child, depth + 1)]
        return found


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(FIELDS)}


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    """The process and all that it started, at one moment: what compiles kernels, too."""
    return [pid, *(each for child in _children(pid) for each in _descendants(child))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with its first `layers` layers alone, none of which shares a cache."""
    text = config.get("text_config", config)
    text |= {
        "num_hidden_layers": layers, "layer_types": text["layer_types"][:layers], "num_kv_shared_layers": 0,
    }  # fmt: skip
    return config


def write_tokenizer(directory: Path, *, vocab_size: int) -> int:
    """Give the tokenizer as many pieces as the published one and, as each is every split of a word, more merges (the
    published one has 515 thousand); returns their number.
    """
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    model = document["model"]
    vocabulary: dict[str, int] = {piece: i for piece, i in model["vocab"].items() if not piece.startswith("\u0120")}
    merges = [tuple(pair) for pair in model["merges"]]
    words = (
        "".join(letters) for size in (2, 3, 4) for letters in itertools.product(string.ascii_lowercase, repeat=size)
    )
    free = iter(sorted(set(range(vocab_size)) - set(vocabulary.values())))
    for word, token_id in zip((word for word in words if word not in vocabulary), free, strict=False):
        vocabulary[word] = token_id
        splits = ((word[:at], word[at:]) for at in range(1, len(word)))
        merges += [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
    model |= {"vocab": vocabulary, "merges": [list(pair) for pair in merges]}
    path.write_text(json.dumps(document), encoding="utf-8")
    return len(merges)


def serve(directory: Path, options: argparse.Namespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "modelserve_worker", "serve", "--model", str(directory), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--device", options.device, "--served-model-name", "m", "--max-model-len", "4096"]
    command += ["--max-num-seqs", str(options.requests), "--tensor-parallel-size", str(options.tensor_parallel)]
    if options.device == "cpu":
        weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        command += ["--cpu-memory-bytes", str(weights + POOL_HEADROOM)]
    worker = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL)
    sampler = Sampler(worker.pid)
    sampler.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=3600) as client:
            _wait_ready(client, worker)
            sampler.phase = "ready"
            time.sleep(1)
            sampler.phase = "serving"
            report = client.get("/v1/plan").json()
            with ThreadPoolExecutor(options.requests) as pool:
                list(pool.map(lambda seed: _ask(client, seed, options), range(options.requests)))
    finally:
        sampler.ended.set()
        sampler.join()
        worker.terminate()
        worker.wait()
    _print(sampler, report, on_cpu=options.device == "cpu")


def _wait_ready(client: httpx.Client, worker: subprocess.Popen[bytes]) -> None:
    while True:
        if worker.poll() is not None:
            raise SystemExit(f"the worker ended with exit code {worker.returncode}")
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def _ask(client: httpx.Client, seed: int, options: argparse.Namespace) -> None:
    prompt = [1000 + (seed * 7919 + i * 104_729) % 200_000 for i in range(options.prompt_tokens)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "logprobs": 5, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for _ in answer.iter_lines():
            pass


def _print(sampler: Sampler, report: dict[str, Any], *, on_cpu: bool) -> None:
    allocated = report["allocated"]
    print(json.dumps({name: allocated[name] for name in ("weightsBytes", "kvPoolBytes")}))
    print(f"{'phase':10}{'process':14}" + "".join(f"{field:>10}" for field in FIELDS) + f"{'beside':>10}")
    for (phase, process), peak in sampler.peaks.items():
        own = allocated["weightsBytes"] if on_cpu and process != "front end" else 0
        figures = [*(peak[field] for field in FIELDS), max(0, peak["RssAnon"] - own)]
        print(f"{phase:10}{process:14}" + "".join(f"{figure / MIB:10.0f}" for figure in figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="E2B")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelserve-host-memory-") as name:
        directory = Path(name)
        config = cut(random_checkpoint.read_config(options.variant), options.layers)
        size = random_checkpoint.write_files(directory, config, device="cpu", processes=1)
        merges = write_tokenizer(directory, vocab_size=config.get("text_config", config)["vocab_size"])
        print(f"{options.variant} with {options.layers} layers: {size / MIB:.0f} MiB of weights, {merges} merges")
        serve(directory, options)
