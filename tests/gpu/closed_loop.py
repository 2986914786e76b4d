"""On a GPU: a closed loop of requests through the engine alone, without HTTP, by the size of steps with prompts.

    python tests/gpu/closed_loop.py --variant 26B-A4B --load 8192/150/8/16 --load 512/256/128/256 --mixed 1024 2048 4096

Random weights at the published geometry, captured steps. A load is prompt/answer/streams/requests; all streams begin at
once, and a new request comes when one ends. Prints tokens per second, mean TTFT, gaps between tokens, and what steps
took by how many requests decoded in them and how many rows of prompts they had: medians, from result to result. All
lines of loads come once more at the end, also where --deadline or SIGTERM ends it before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict, deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from deadline import add_deadline, within
from engine_on_gpu import Bench
from random_checkpoint import read_config

from modelserve.engine_args import EngineArgs
from modelserve.planning.step_time import doubling_context
from modelserve_worker.execution.ranks import launch

CHUNK = 8192
ROWS_APART = 512  # of prompts, in the table of steps
DECODES_APART = 16


def served(bench: Bench, prompt: int, answer: int, streams: int, requests: int) -> dict[str, float]:
    """Tokens per second, and TTFT and gaps in ms, of a loop; steps go to `bench.steps`."""
    sent, tokens, asked = {}, defaultdict(list), iter(range(requests))

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
    first = statistics.mean(tokens[name][0] - at for name, at in sent.items())
    return {
        "tok/s": requests * answer / taken, "req/s": requests / taken, "TTFT": 1e3 * first,
        "gap p50": 1e3 * gaps[len(gaps) // 2], "p99": 1e3 * gaps[len(gaps) * 99 // 100],
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
    parser.add_argument("--load", action="append", required=True)
    parser.add_argument("--mixed", type=int, nargs="+", required=True)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--steps", action="store_true", help="print the table of steps")
    add_deadline(parser)
    options = parser.parse_args()
    rows: list[str] = []
    with within(options.deadline) as time_left:
        bench = started(options)
        print(f"{options.variant} ready after {time_left.seconds:.1f} s", flush=True)
        limits = bench.scheduler.limits
        served(bench, 512, 8, 4, 8)  # whatever is made when it is first needed
        steps = note_steps(bench)
        try:
            for load in options.load:
                for mixed in options.mixed:
                    bench.scheduler.limits = replace(limits, max_num_mixed_tokens=mixed)
                    figures = served(bench, *map(int, load.split("/")))
                    shown = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
                    rows.append(f"{options.variant} {load} in steps of {mixed}: {shown}")
                    print(rows[-1], f"({time_left.seconds:.0f} s)", flush=True)
        finally:
            if options.steps:
                print("\n".join(steps_taken(steps)))
    print("\n".join(["", *rows]))
    return time_left.code()


def started(options: argparse.Namespace) -> Bench:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(read_config(options.variant, None)))
        args = EngineArgs(
            model=directory, load_format="dummy", device="cuda", max_model_len=16384, max_num_batched_tokens=CHUNK,
            max_num_seqs=options.max_num_seqs, max_num_mixed_tokens=max(options.mixed),
        )  # fmt: skip
        replica = launch(args)
    bench = Bench(replica, args)
    doubling = doubling_context(
        replica.architecture, replica.geometry.layout, compute_capability=replica.table.compute_capability
    )
    bench.scheduler.limits = replace(
        bench.scheduler.limits, doubling_context=doubling, captured_rows=replica.captured_rows
    )
    return bench


def steps_taken(steps: dict[tuple[int, int], list[float]]) -> list[str]:
    return [
        f"  {decodes} decodes, {rows} rows of prompts: {statistics.median(times):.2f} ms of {len(times)}"
        for (decodes, rows), times in sorted(steps.items())
        if len(times) > 3
    ]


if __name__ == "__main__":
    raise SystemExit(main())
