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
from modelserve.hardware import CATALOGUE
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry

LAST = 24  # steps that are timed, of an answer of twice as many behind the last prompt
PRODUCT = "NVIDIA-H200"


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


def expected(architecture: ModelArchitecture, requests: int, context: float) -> float:
    """Milliseconds of such a step as plans have it."""
    layout = KVCacheLayout.least(architecture)
    geometry = cache_geometry(architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    rank = RankSpeed(architecture, CATALOGUE[PRODUCT], geometry, tensor_parallel=1, weight_format=None)
    return 1e3 * rank.step(decodes=requests, context=context).seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--steps", nargs="+", required=True)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    add_deadline(parser)
    options = parser.parse_args()
    options.mixed = [CHUNK]
    facts = published_model(f"hf://google/gemma-4-{options.variant}-it")
    assert facts is not None
    rows: list[str] = []
    with within(options.deadline) as time_left:
        bench, _ = started(options)
        print(f"{options.variant} ready after {time_left.seconds:.1f} s", flush=True)
        for step in options.steps:
            requests, prompt = map(int, step.split("/"))
            found, context = measured(bench, requests, prompt)
            planned = expected(facts.architecture, requests, context)
            rows.append(
                f"{options.variant} {requests} decodes behind {context:,.0f} tokens: {found:.2f} ms, expected "
                f"{planned:.2f} ({100 * (planned / found - 1):+.1f} %)"
            )
            print(rows[-1], f"({time_left.seconds:.0f} s)", flush=True)
    print("\n".join(["", *rows]))
    return time_left.code()
