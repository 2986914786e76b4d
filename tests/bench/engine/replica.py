"""A replica with random weights of the published geometry, and the synchronous engine loop over it."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.random_checkpoint import assistant_config, read_config
from modelserve.engine_args import EngineArgs
from modelserve_worker.engine.engine import Engine
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.startup.replica import LaunchedReplica, launch


def launch_random(
    variant: str, weights: str | None = None, *, assistant: bool = False, **settings: Any
) -> tuple[LaunchedReplica, EngineArgs]:
    """A replica of the variant, in bfloat16 or quantised as `weights` says, with its settings."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(read_config(variant, weights)))
        drafter = Path(directory) / "drafter"
        if assistant:
            drafter.mkdir()
            (drafter / "config.json").write_text(json.dumps(assistant_config(variant)))
            settings["drafter"] = str(drafter)
        args = EngineArgs(model=directory, load_format="dummy", **settings)
        return launch(args), args


class Bench:
    """A launched replica behind the synchronous engine loop; requests are random token ids and ignore EOS."""

    def __init__(self, replica: LaunchedReplica, args: EngineArgs) -> None:
        limits = SchedulerLimits(
            args.max_num_batched_tokens, args.max_num_seqs, replica.max_model_len, (), args.max_num_mixed_tokens
        )
        self.scheduler = Scheduler(limits, replica.geometry, replica.pool_bytes, adapter_slots=args.max_loras)
        self.engine = Engine(self.scheduler, replica.runner)
        self.vocab = replica.architecture.vocab_size
        self.random = random.Random(1)
        self.count = 0

    def request(self, prompt: int, output: int, **sampling_options: float) -> Request:
        self.count += 1
        ids = tuple(self.random.randrange(3, self.vocab) for _ in range(prompt))
        options: dict[str, Any] = {"seed": self.count, "max_tokens": output, "ignore_eos": True, **sampling_options}
        sampling = SamplingParams(**options)
        return Request(f"r{self.count}", ids, sampling)

    def run(self, requests: list[Request]) -> tuple[dict[str, list[float]], int]:
        """Seconds from the start at which each request got its tokens, and the preemptions."""
        before = self.scheduler.stats().preemptions_total
        arrivals: dict[str, list[float]] = {r.request_id: [] for r in requests}
        began = time.perf_counter()
        for request in requests:
            self.scheduler.add(request)
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error
                arrivals[output.request_id] += [time.perf_counter() - began] * len(output.token_ids)
        assert self.scheduler.stats().held_bytes == 0
        return arrivals, self.scheduler.stats().preemptions_total - before

    def first_tokens(self, requests: list[Request]) -> int:
        """Run steps, and return how many, until each of these has its first token."""
        for request in requests:
            self.scheduler.add(request)
        unanswered, steps = {request.request_id for request in requests}, 0
        while unanswered:
            unanswered -= {output.request_id for output in self.engine.step()}
            steps += 1
        return steps
