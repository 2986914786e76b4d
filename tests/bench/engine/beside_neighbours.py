"""Whether a seeded answer's bits depend on who runs beside it.

    python tests/bench beside_neighbours --model DIR

Ten seeded requests are answered one at a time, then together beside twenty others, by one engine on the CPU; prints how
many have the same tokens, how many the same log-probabilities bit for bit, and the largest difference of one.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

from modelserve.engine_args import EngineArgs
from modelserve_worker.engine.engine import Engine
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.startup.replica import LaunchedReplica, launch

SEEDED, NEIGHBOURS, TOKENS = 10, 20, 40
Answer = list[tuple[int, float]]


def seeded() -> list[Request]:
    rng = random.Random(5)
    sampling = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 1}
    return [
        Request(f"seeded{i}", tuple(rng.randrange(300, 2000) for _ in range(20 + 3 * i)), SamplingParams(i, **sampling))
        for i in range(SEEDED)
    ]


def neighbours() -> list[Request]:
    sampling = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    return [Request(f"other{i}", tuple(range(300, 310 + 7 * i)), sampling) for i in range(NEIGHBOURS)]


def answers(replica: LaunchedReplica, args: EngineArgs, requests: list[Request]) -> dict[str, Answer]:
    limits = SchedulerLimits(
        args.max_num_batched_tokens, args.max_num_seqs, replica.max_model_len, (), args.max_num_mixed_tokens
    )
    scheduler = Scheduler(limits, replica.geometry, replica.pool_bytes)
    engine = Engine(scheduler, replica.runner)
    for request in requests:
        scheduler.add(request)
    told: dict[str, Answer] = {}
    while engine.has_work:
        for output in engine.step():
            scores = [each.logprob for each in output.logprobs]
            told.setdefault(output.request_id, []).extend(zip(output.token_ids, scores, strict=False))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    args = EngineArgs(
        model=str(options.model), dtype=options.dtype, device="cpu", cpu_memory_bytes=3 << 30, max_model_len=1024,
        max_num_batched_tokens=512,
    )  # fmt: skip
    replica = launch(args)
    alone: dict[str, Answer] = {}
    for request in seeded():
        alone |= answers(replica, args, [request])
    beside = answers(replica, args, [*neighbours(), *seeded()])
    replica.runner.shutdown()
    pairs = [(alone[name], beside[name]) for name in alone]
    tokens = sum([t for t, _ in a] == [t for t, _ in b] for a, b in pairs)
    most = max(abs(x[1] - y[1]) for a, b in pairs for x, y in zip(a, b, strict=True) if x[0] == y[0])
    print(
        f"{options.model.name}, {options.dtype}, {options.threads} threads: of {SEEDED} answers {tokens} have the same"
    )
    print(f"tokens and {sum(a == b for a, b in pairs)} the same bits; log-probabilities differ by at most {most:.2g}")
