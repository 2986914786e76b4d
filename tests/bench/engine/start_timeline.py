"""What the seconds of a start go into: its phases, and the kernels that it compiled itself or waited for.

    python tests/bench start_timeline --variant 31B [--starts 2] [--no-ahead] [--max-num-seqs 384]

Each start is an engine's process of its own with random weights that the GPU makes (no checkpoint is read, which takes
time); the first one has an empty kernel cache, those after it what that one left. `--no-ahead`: nothing is compiled
beside the loading of weights. Prints when each phase ended, in seconds from the process's start, and what was compiled
in the engine's process meanwhile.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN_S = time.time()
TOLD = ("ahead", "while serving")  # of what the engine's process writes


class Timeline:
    """Moments of this process, and what compilers took in it since the last one."""

    def __init__(self) -> None:
        self.compiled: list[tuple[float, str]] = []
        self._told = 0

    def mark(self, name: str) -> None:
        """Print that `name` has ended."""
        new, self._told = self.compiled[self._told :], len(self.compiled)
        inside = f"  {len(new)} compiled here in {sum(seconds for seconds, _ in new):.1f} s" if new else ""
        print(f"    {time.time() - BEGAN_S:6.1f} s  {name}{inside}", flush=True)

    def timed(self, function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        """The function, whose calls are noted as compilations."""

        def run(*values: Any, **named: Any) -> Any:
            began = time.time()
            result = function(*values, **named)
            self.compiled.append((time.time() - began, name(*values)))
            return result

        return run

    def hook(self) -> None:
        """Note compilations of Triton, of its launchers and of NVRTC, and the ends of phases."""
        import torch
        import triton
        from triton.runtime import build

        from modelserve_worker.kernels.compiling import cuda_kernel
        from modelserve_worker.startup import rank as startup

        def listener(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                self.compiled.append((times.total / 1e6, src.fn.__name__))

        self.mark("modules")
        triton.knobs.compilation.listener = listener
        build._build = self.timed(build._build, lambda name, *_: f"launcher {name}")
        cuda_kernel.compiled = self.timed(cuda_kernel.compiled, lambda source: source.file)
        end = startup.Phases.end

        def ended(phases: Any, name: str) -> None:
            torch.cuda.synchronize()
            end(phases, name)
            self.mark(name)

        startup.Phases.end = ended  # type: ignore[method-assign]


def one_start(options: argparse.Namespace) -> None:
    """In a process of its own: build an engine, and leave."""
    from modelserve.engine_args import EngineArgs
    from modelserve_worker.engine_startup import build_engine
    from modelserve_worker.startup import kernels_ahead

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    timeline, starts = Timeline(), kernels_ahead.start_kernels_ahead

    def start(args: EngineArgs) -> Path | None:
        lock = starts(args) if options.ahead else None
        timeline.hook()
        return lock

    kernels_ahead.start_kernels_ahead = start
    args = EngineArgs(
        model=options.one, load_format="dummy", device="cuda", max_model_len=16384, max_num_batched_tokens=8192,
        max_num_seqs=options.max_num_seqs,
    )  # fmt: skip
    build_engine(args, lambda *_: None)
    timeline.mark("engine built")
    longest = sorted(timeline.compiled, reverse=True)[:8]
    if longest:
        print("    longest:", ", ".join(f"{name} {seconds:.2f}" for seconds, name in longest), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="31B")
    parser.add_argument("--weights", help="quantised random weights, such as int4_g32")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--ahead", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        one_start(options)
        return
    from bench.entries import command
    from bench.random_checkpoint import read_config

    with tempfile.TemporaryDirectory(prefix="start-timeline-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(read_config(options.variant, options.weights)))
        environment = os.environ | {"TRITON_CACHE_DIR": f"{folder}/cache", "MODELSERVE_KERNELS_DIR": f"{folder}/none"}
        for start in range(options.starts):
            beside = "compiled ahead" if options.ahead else "compiled when launched"
            cache = "filled cache" if start else f"empty cache, {beside}"
            print(f"{options.variant}, {options.max_num_seqs} requests a step, {cache}", flush=True)
            one = command("start_timeline", *sys.argv[1:], "--one", folder)
            done = subprocess.run(one, env=environment, stderr=subprocess.PIPE, text=True, check=False)
            lines = done.stderr.splitlines()
            told = lines[-8:] if done.returncode else [each for each in lines if any(word in each for word in TOLD)]
            print(*(f"    {line}" for line in told), sep="\n", flush=True)
