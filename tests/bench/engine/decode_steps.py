"""On a GPU: milliseconds of steps in which requests only decode, by how many they are and what is behind them.

    python tests/bench decode_steps --variant E4B --steps 1/8192 8/1500 32/1500 128/640

Random weights at the published geometry, captured steps, the engine without HTTP. A step is requests/tokens of a
prompt; printed is the median from result to result of those in which all decode, the mean tokens behind a row in them,
and what plans expect of such a step. All lines come once more at the end, also where --deadline or SIGTERM ends it
before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter

from bench.deadline import add_deadline, within
from bench.engine.closed_loop import CHUNK, started
from bench.engine.replica import Bench

LAST = 24  # steps that are timed, of an answer of twice as many behind the last prompt


def measured(bench: Bench, requests: int, prompt: int) -> tuple[float, float]:
    """Median milliseconds of a step of decodes, and the mean context of a row in those steps."""
    prompts = -(-requests * prompt // CHUNK)
    added = [bench.request(prompt, 2 * LAST + 2 * prompts) for _ in range(requests)]
    for request in added:
        bench.scheduler.add(request)
    found: list[tuple[float, float]] = []
    tokens: Counter[str] = Counter()
    last = time.perf_counter()
    while bench.engine.has_work:
        outputs = bench.engine.step()
        now = time.perf_counter()
        tokens.update(output.request_id for output in outputs for _ in output.token_ids)
        if len(outputs) == requests and not any(output.finish_reason for output in outputs):
            found.append((1e3 * (now - last), prompt + tokens.total() / requests - 1))
        last = now
    assert len(found) >= LAST, f"all decode in {len(found)} steps alone"
    times, contexts = zip(*found[-LAST:], strict=True)
    return statistics.median(times), statistics.mean(contexts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--steps", nargs="+", required=True)
    parser.add_argument("--weights", help="quantised random weights, such as nvfp4 or nvfp4-without-qkv,o")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    add_deadline(parser)
    options = parser.parse_args()
    options.mixed = [CHUNK]
    rows: list[str] = []
    name = " ".join(filter(None, (options.variant, options.weights)))
    with within(options.deadline) as time_left:
        bench, rank = started(options)
        print(f"{options.variant} ready after {time_left.seconds:.1f} s", flush=True)
        for step in options.steps:
            requests, prompt = map(int, step.split("/"))
            found, context = measured(bench, requests, prompt)
            planned = 1e3 * rank.step(decodes=requests, context=context).seconds
            rows.append(
                f"{name} {requests} decodes behind {context:,.0f} tokens: {found:.2f} ms, expected "
                f"{planned:.2f} ({100 * (planned / found - 1):+.1f} %)"
            )
            print(rows[-1], f"({time_left.seconds:.0f} s)", flush=True)
    print("\n".join(["", *rows]))
    return time_left.code()
