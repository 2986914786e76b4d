"""What one long decode costs 31 short ones, on the GPU or, with --model, on the CPU too.

    python tests/bench long_beside_short --variant 31B [--long 16384] [--short 200] [--count 31]

Prints the milliseconds of a decode step of the short requests alone, of the long one alone and of all together, and the
ratio of the last to the sum of the others, which is to be at most 1.5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from bench.engine.replica import Bench, launch_random
from modelserve.engine_args import EngineArgs
from modelserve_worker.request import Request
from modelserve_worker.startup.replica import launch


def step_ms(bench: Bench, requests: list[Request], steps: int) -> float:
    """Median milliseconds of a step in which every request decodes."""
    for request in requests:
        bench.scheduler.add(request)
    times: list[float] = []
    while bench.engine.has_work:
        began = time.perf_counter()
        outputs = bench.engine.step()
        if len(outputs) == len(requests) and not any(output.finish_reason for output in outputs):
            times.append(time.perf_counter() - began)
    assert len(times) >= steps, f"only {len(times)} steps had every request"
    return 1e3 * statistics.median(times[-steps:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--variant", help="published geometry with random weights, on a GPU")
    which.add_argument("--model", type=Path, help="a checkpoint, on the CPU")
    parser.add_argument("--long", type=int, default=16384)
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--count", type=int, default=31)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    limits: dict[str, Any] = {"max_model_len": options.long + 4 * options.steps, "max_num_batched_tokens": 2048}
    if options.variant:
        replica, args = launch_random(options.variant, device="cuda", **limits)
    else:
        args = EngineArgs(model=str(options.model), device="cpu", cpu_memory_bytes=4 << 30, **limits)
        replica = launch(args)
    try:
        bench = Bench(replica, args)
        output = 3 * options.steps
        bench.run([bench.request(options.short, 8)])
        short, long, both = (
            step_ms(bench, [bench.request(options.short, output) for _ in range(count)] + extra, options.steps)
            for count, extra in (
                (options.count, []),
                (0, [bench.request(options.long, output)]),
                # The long one comes first, so that all decode together for a while.
                (options.count, [bench.request(options.long, output)]),
            )
        )
    finally:
        replica.runner.shutdown()
    print(
        f"{options.variant or options.model.name}: {options.count} x {options.short} tokens {short:.2f} ms, "
        f"1 x {options.long} {long:.2f} ms, together {both:.2f} ms: {both / (short + long):.2f} of the sum"
    )
