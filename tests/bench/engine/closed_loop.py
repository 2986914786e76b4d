"""On a GPU: a closed loop of requests through the engine alone, without HTTP, by the size of steps with prompts.

    python tests/bench closed_loop --variant 26B-A4B --load 8192/150/8/16 --load 512/256/128/256 --mixed 1024 2048 4096
    python tests/bench closed_loop --variant 31B --load 512/256/128/256 --mixed 512 --crowd 2 1.4 --max-num-seqs 128

Random weights at the published geometry, captured steps. A load is prompt/answer/streams/requests; all streams begin at
once, and a new request comes when one ends. Steps with prompts have --mixed rows, or with --crowd follow what waits as
an engine has it, where a crowd is what takes so many seconds. Prints tokens per second, TTFT and gaps between tokens,
preemptions, and what steps took by how many requests decoded in them and how many rows of prompts they had: medians,
from result to result. All lines of loads come once more at the end, also where --deadline or SIGTERM ends it before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict, deque
from dataclasses import replace
from itertools import pairwise, product

from bench.deadline import add_deadline, within
from bench.engine.replica import Bench, launch_random
from bench.random_checkpoint import read_config
from modelserve.hardware import CATALOGUE
from modelserve.model.quantization.config import stated_format
from modelserve.planning.speed.mixed_steps import CROWD_SECONDS, crowd_tokens, min_mixed_tokens
from modelserve.planning.speed.step_time import RankSpeed
from modelserve_worker.scheduling.admission import SchedulerLimits

CHUNK = 8192
ROWS_APART = 256  # of prompts, in the table of steps
DECODES_APART = 16


def served(bench: Bench, prompt: int, answer: int, streams: int, requests: int) -> dict[str, float]:
    """Tokens per second, and TTFT and gaps in ms, of a loop."""
    sent, tokens, asked = {}, defaultdict(list), iter(range(requests))
    preempted = bench.scheduler.stats().preemptions_total

    def send() -> None:
        if next(asked, None) is not None:
            request = bench.request(prompt, answer)
            sent[request.request_id] = time.perf_counter()
            bench.scheduler.add(request)

    began = time.perf_counter()
    for _ in range(streams):
        send()
    while bench.engine.has_work:
        outputs = bench.engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens[output.request_id] += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                send()
    taken = time.perf_counter() - began
    gaps = sorted(after - before for times in tokens.values() for before, after in pairwise(times))
    first = sorted(tokens[name][0] - at for name, at in sent.items())
    return {
        "tok/s": requests * answer / taken, "req/s": requests / taken,
        "TTFT": 1e3 * statistics.mean(first), "TTFT p99": 1e3 * first[len(first) * 99 // 100],
        "gap p50": 1e3 * gaps[len(gaps) // 2], "p99": 1e3 * gaps[len(gaps) * 99 // 100], "most": 1e3 * gaps[-1],
        "preempted": bench.scheduler.stats().preemptions_total - preempted,
    }  # fmt: skip


def note_steps(bench: Bench) -> dict[tuple[int, int], list[float]]:
    """Milliseconds by decodes and rows of prompts, rounded up, filled as steps are answered."""
    found, waiting = defaultdict(list), deque()
    schedule, update, last = bench.scheduler.schedule, bench.scheduler.update, [0.0]

    def scheduled():
        batch = schedule()
        if batch is not None:
            decodes = int((batch.lengths == 1).sum())
            rows = int(batch.lengths.sum()) - decodes
            waiting.append((-(-decodes // DECODES_APART) * DECODES_APART, -(-rows // ROWS_APART) * ROWS_APART))
        return batch

    def updated(sampled):
        now = time.perf_counter()
        found[waiting.popleft()].append(1e3 * (now - last[0]))
        last[0] = now
        return update(sampled)

    bench.scheduler.schedule, bench.scheduler.update = scheduled, updated
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--weights", help="quantised random weights, such as nvfp4 or nvfp4-without-qkv,o")
    parser.add_argument("--load", action="append", required=True)
    parser.add_argument("--mixed", type=int, nargs="+", required=True)
    parser.add_argument("--crowd", type=float, nargs="+", metavar="SECONDS", help="steps follow what waits")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--steps", action="store_true", help="print the table of steps")
    add_deadline(parser)
    options = parser.parse_args()
    rows: list[str] = []
    with within(options.deadline) as time_left:
        bench, rank = started(options)
        print(f"{options.variant} ready after {time_left.seconds:.1f} s", flush=True)
        limits = replace(bench.scheduler.limits, doubling_context=rank.doubling_context)
        served(bench, 512, 8, 4, 8)  # whatever is made when it is first needed
        steps = note_steps(bench)
        try:
            for load in options.load:
                for mixed, crowd in product(options.mixed, options.crowd or [None]):
                    bench.scheduler.limits = sized(limits, rank, mixed, crowd)
                    figures = served(bench, *map(int, load.split("/")))
                    shown = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
                    follow = "" if crowd is None else f", a crowd of {crowd:g} s"
                    rows.append(f"{options.variant} {load} in steps of {mixed}{follow}: {shown}")
                    print(rows[-1], f"({time_left.seconds:.0f} s)", flush=True)
        finally:
            if options.steps:
                print("\n".join(steps_taken(steps)))
    print("\n".join(["", *rows]))
    return time_left.code()


def sized(limits: SchedulerLimits, rank: RankSpeed, mixed: int, crowd: float | None) -> SchedulerLimits:
    """Limits of steps of so many rows: all of them, or those that follow what waits."""
    if crowd is None:
        return replace(limits, max_num_mixed_tokens=mixed)
    tokens = crowd_tokens(rank, mixed) * crowd / CROWD_SECONDS
    fewest = min_mixed_tokens(rank, mixed)
    return replace(limits, max_num_mixed_tokens=mixed, min_num_mixed_tokens=fewest, crowd_tokens=tokens)


def started(options: argparse.Namespace) -> tuple[Bench, RankSpeed]:
    """An engine, and what is planned for an H200."""
    replica, args = launch_random(
        options.variant, options.weights, device="cuda", max_model_len=16384, max_num_batched_tokens=CHUNK,
        max_num_seqs=options.max_num_seqs, max_num_mixed_tokens=max(options.mixed),
    )  # fmt: skip
    bench = Bench(replica, args)
    bench.scheduler.limits = replace(bench.scheduler.limits, captured_rows=replica.captured_rows)
    h200, config = CATALOGUE["NVIDIA-H200"], read_config(options.variant, options.weights)
    stated = stated_format(config, replica.architecture)
    return bench, RankSpeed(replica.architecture, h200, replica.geometry, tensor_parallel=1, weight_format=stated)


def steps_taken(steps: dict[tuple[int, int], list[float]]) -> list[str]:
    return [
        f"  {decodes} decodes, {rows} rows of prompts: {statistics.median(times):.2f} ms of {len(times)}"
        for (decodes, rows), times in sorted(steps.items())
        if len(times) > 3
    ]
