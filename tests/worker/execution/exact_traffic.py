"""Requests whose answers are compared to the bit: what each of them said, under any traffic, chunk size and drafter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from true_drafter import TrueDrafter

from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.engine.engine import Engine
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import PromptLogprobs, Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.mixed_pace import MixedPace
from modelserve_worker.scheduling.running import RunningRequest
from modelserve_worker.scheduling.scheduler import Scheduler


@dataclass
class Said:
    """Of one request, with floats that `==` compares to the bit: no log probability is a NaN or a zero."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # TokenLogprobs
    prompt: list[Any] = field(default_factory=list)
    cached: int = 0
    preempted: int = 0


def requests(
    count: int, *, longest_prompt: int, most_tokens: int, vocab_size: int, seed: int = 0, alike: int = 3
) -> list[Request]:
    """Prompts of 1 to `longest_prompt` tokens, one in `alike` of which begin alike; greedy and random answers."""
    rng = random.Random(seed)
    common = [rng.randrange(3, vocab_size) for _ in range(longest_prompt)]
    made = []
    for number in range(count):
        length = rng.choice((1, 2, 17, longest_prompt - 1, longest_prompt, rng.randint(1, longest_prompt)))
        own = [rng.randrange(3, vocab_size) for _ in range(length)]
        shared = common[: length * 15 // 16] if number % alike == 0 else []
        sampling = SamplingParams(
            seed=number, max_tokens=rng.randint(2, most_tokens), temperature=float(number % 2), logprobs=3,
            prompt_logprobs=2 if number % 5 == 1 else None, ignore_eos=True,
            presence_penalty=0.5 if number % 7 == 3 else 0.0, top_k=20 if number % 4 == 1 else 0,
        )  # fmt: skip
        made.append(Request(f"r{number}", tuple(shared + own[len(shared) :]), sampling))
    return made


@dataclass(frozen=True)
class Exactly:
    """An engine over one model; each run has a pool of its own."""

    model: Gemma4ForCausalLM
    geometry: CacheGeometry
    longest: int
    sequences: int
    device: torch.device
    table: KernelTable | None = None  # of its attention, where not the model's
    room: float | None = None  # longest requests that the pool is for, where not more than run at once

    def run(
        self,
        wanted: Sequence[Request],
        *,
        chunk: int,
        order: int | None = None,
        prefix_caching: bool = False,
        preempted_every: int = 0,
        drafter: TrueDrafter | None = None,
        ahead: bool = False,
        stamps: bool = False,
        captured: bool = False,
        pace: MixedPace | None = None,
    ) -> dict[str, Said]:
        """All of `wanted` to their ends. `order` None: they come at once, else over time in an order of this seed.
        `preempted_every` so many steps the youngest is preempted, as when the pool is out."""
        room = self.sequences + 8 if self.room is None else self.room
        pool = int(room * self.geometry.held_bytes(self.longest)) // 128 * 128
        cache = KVCache(self.geometry, pool, device=self.device, debug_stamps=stamps)
        cache.arena.fill_(0xFF)
        runner = GPUModelRunner(
            self.model, cache, max_num_batched_tokens=chunk, max_num_seqs=self.sequences, max_model_len=self.longest,
            drafter=drafter, table=self.table,
        )  # fmt: skip
        if captured:
            runner.capture_graphs()
        runner.launches_ahead |= ahead
        exact = self.model.operations.exact
        limits = SchedulerLimits(
            chunk, self.sequences, self.longest, (), captured_rows=runner.captured_rows, exact=exact
        )
        engine = Engine(
            Scheduler(
                limits,
                self.geometry,
                pool,
                draft_tokens=runner.draft_tokens,
                prefix_caching=prefix_caching,
                mixed_pace=pace,
            ),
            runner,
        )
        said = {request.request_id: Said() for request in wanted}
        preempt = engine.scheduler._preempt

        def counted(running: RunningRequest, *, sound: bool = True) -> None:
            said[running.request.request_id].preempted += 1
            preempt(running, sound=sound)

        engine.scheduler._preempt = counted  # type: ignore[method-assign]
        rng, waiting = random.Random(order), list(wanted)
        if order is not None:
            rng.shuffle(waiting)
        while waiting or engine.has_work:
            while waiting and (order is None or rng.random() < 0.5):
                engine.add(waiting.pop(0))
            for output in engine.step():
                assert output.error is None, output.error
                one = said[output.request_id]
                one.tokens += output.token_ids
                one.logprobs += output.logprobs
                if output.prompt_logprobs is not None:
                    one.prompt = rows_of(output.prompt_logprobs)
            running = list(engine.scheduler._running.by_id.values())
            if preempted_every and len(running) > 1 and engine.steps_done % preempted_every == 0:
                engine.scheduler._preempt(running[-1])
        engine.scheduler.check_integrity()
        for request in wanted:
            said[request.request_id].cached = request.cached_tokens
        assert preempted_every == 0 or engine.scheduler.stats().preemptions_total > 0
        return said


def rows_of(scores: PromptLogprobs) -> list[Any]:
    return [column.tolist() for column in (scores.logprobs, scores.ranks, scores.top_tokens, scores.top_logprobs)]


def differing(said: Mapping[str, Said], alone: Mapping[str, Said]) -> list[str]:
    """Names of the requests that did not say the same, or with other bits."""
    return [
        name
        for name, one in alone.items()
        if (one.tokens, one.logprobs, one.prompt)
        != (said[name].tokens, said[name].logprobs, said[name].prompt)
    ]  # fmt: skip
