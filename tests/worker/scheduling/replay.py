"""The engine's own queue and scheduler over steps that take what the speed model expects: its time is a sum, not a
clock's."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from architecture_of import architecture_of

from modelserve.hardware import CATALOGUE
from modelserve.planning.speed.mixed_steps import crowd_tokens, min_mixed_tokens
from modelserve.planning.speed.step_time import NO_ROWS, PromptRows, RankSpeed
from modelserve.sizing.cuda_graphs import mixed_graph_sizes
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.engine.fair_queue import FairLimits, FairQueue
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

CHUNK, SEQUENCES = 8192, 64
IDLE_SECONDS = 0.002  # of the device where the next step is scheduled only after a long one: twice the host's step
POOL_BYTES = 65_965 << 20  # of 31B with 128 requests a step; those of other loads hold all that come


@dataclass(frozen=True)
class Arrival:
    at: float  # s
    name: str
    prompt: int  # tokens
    answer: int


class Replay:
    """One H200 that serves arrivals; `sent` and `tokens` have the times in s, by name."""

    def __init__(
        self, variant: str, *, max_num_mixed_tokens: int, dtype: str = "bfloat16", max_num_seqs: int = SEQUENCES
    ) -> None:
        architecture = architecture_of(variant)
        layout = KVCacheLayout.least(architecture)
        geometry = cache_geometry(architecture, dtype=KVCacheDtype(dtype), layout=layout, tensor_parallel_size=1)
        h200 = CATALOGUE["NVIDIA-H200"]
        self.rank = RankSpeed(architecture, h200, geometry, tensor_parallel=1, weight_format=None)
        self.limits = SchedulerLimits(
            max_num_batched_tokens=CHUNK,
            max_num_seqs=max_num_seqs,
            max_model_len=131_072,
            eos_token_ids=(1,),
            max_num_mixed_tokens=max_num_mixed_tokens,
            doubling_context=self.rank.doubling_context,
            captured_rows=mixed_graph_sizes(CHUNK),
            min_num_mixed_tokens=min_mixed_tokens(self.rank, max_num_mixed_tokens),
            crowd_tokens=crowd_tokens(self.rank, max_num_mixed_tokens),
        )
        self.now = 0.0
        self.sent: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = defaultdict(list)
        self._scheduler = Scheduler(self.limits, geometry, POOL_BYTES)
        self._queue = FairQueue(FairLimits(max_num_seqs, CHUNK), clock=lambda: self.now)
        self._in_flight: ScheduledBatch | None = None

    def serve(self, arrivals: Iterable[Arrival], then: Callable[[float], Arrival | None] = lambda _: None) -> None:
        """Until all are answered; `then`, given the time, may send one more whenever one ends."""
        coming = deque(sorted(arrivals, key=lambda arrival: arrival.at))
        while coming or self._has_requests:
            while coming and coming[0].at <= self.now:
                self._send(coming.popleft())
            for _ in range(self._turn()):
                another = then(self.now)
                if another is not None:
                    coming.appendleft(another)
            if coming and not self._has_requests:
                self.now = max(self.now, coming[0].at)

    @property
    def _has_requests(self) -> bool:
        return self._scheduler.has_requests or self._queue.num_waiting > 0

    def _send(self, arrival: Arrival) -> None:
        self.sent[arrival.name] = arrival.at
        sampling = SamplingParams(seed=0, max_tokens=arrival.answer, ignore_eos=True)
        self._queue.add("client", [Request(arrival.name, (5,) * arrival.prompt, sampling, arrival_s=0.0)])

    def _turn(self) -> int:
        """As the engine's loop has it: what comes while a step runs is in none that was scheduled before its end."""
        for request in self._queue.take():
            self._scheduler.add(request)
        self._scheduler.held_back.tell(self._queue.held_back_tokens)
        oldest, self._in_flight = self._in_flight, None
        ended = 0
        if oldest is not None and self.limits.answers_first(oldest):
            ended, oldest = self._take(oldest), None
            self.now += IDLE_SECONDS
        else:
            self._in_flight = self._scheduler.schedule()
        return ended if oldest is None else ended + self._take(oldest)

    def _take(self, step: ScheduledBatch) -> int:
        self.now += self._seconds(step)
        ended = 0
        for output in self._scheduler.update(SampledTokens(step.step, np.full(step.drawn.sum(), 7, np.int32), {})):
            self.tokens[output.request_id].append(self.now)
            self._queue.started(output.request_id)
            if output.finish_reason is not None:
                self._queue.ended(output.request_id)
                ended += 1
        return ended

    def _seconds(self, step: ScheduledBatch) -> float:
        decodes, prompts = step.lengths == 1, NO_ROWS
        for start, rows, ends in zip(
            *(each[~decodes].tolist() for each in (step.starts, step.lengths, step.drawn > 0)), strict=True
        ):
            prompts = added(prompts, PromptRows.chunk(start, rows, window=self.rank.window, ends=ends))
        if prompts.rows:  # the captured step that takes it computes its padding as well
            captured = min(size for size in mixed_graph_sizes(CHUNK) if size >= step.num_tokens)
            prompts = added(prompts, PromptRows(captured - step.num_tokens, 0, 0, 0))
        context = float(step.starts[decodes].mean()) if decodes.any() else 0.0
        return self.rank.step(decodes=int(decodes.sum()), context=context, prompts=prompts).seconds


def added(left: PromptRows, right: PromptRows) -> PromptRows:
    """The rows of both, in one step."""
    pairs = zip(left, right, strict=True)
    return PromptRows(*(one + other for one, other in pairs))
