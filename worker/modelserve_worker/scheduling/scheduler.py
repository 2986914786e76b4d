"""Continuous batching over one page arena: who computes which tokens in the next step.

Order of a step. Every running request with one token to compute (a decode) comes first, then prefill chunks of running
requests, then admissions, first come first served, within `max_num_batched_tokens`. At most as many requests run as a
step has tokens; so while one of them prefills, the others leave it at least one token of every step, and while some
prefill, no decode waits: neither starves the other.

Pages. Admission reserves what all known tokens hold, and leaves free what the running requests will take next
(admission.py). A prefill therefore never asks for pages, and a decode grows page by page. When the pool is out, the
youngest other request is preempted: its pages return after its last step in flight, its token in flight is discarded,
and it goes to the front of the queue to be recomputed from prompt and output. A request never preempts an older one;
if it is the youngest itself, it keeps its pages and waits. The oldest running request can thus always take what it
needs, and alone it fits (validate), so some request always progresses.

Overlap. Step n + 1 may be scheduled before the result of step n is known. A token that step n samples is then
IN_FLIGHT. The end of a request by length is known ahead, and no step is scheduled past it; a stop or an abort is found
one step late, and the token of the step in flight is discarded. Slot and pages return after the last step in flight.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque

from modelserve.architecture import LayerKind
from modelserve.errors import InvalidInput
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.request import FinishReason, Request, RequestOutput, SampledToken
from modelserve_worker.scheduling.admission import Admission, SchedulerLimits
from modelserve_worker.scheduling.arena import PageArena
from modelserve_worker.scheduling.page_table import PageTable
from modelserve_worker.scheduling.running import RunningRequest, StepInFlight
from modelserve_worker.scheduling.stats import EngineStats

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """Schedules requests on one pool of `pool_bytes` bytes per rank. One thread calls it; any may call `validate`."""

    def __init__(self, limits: SchedulerLimits, geometry: CacheGeometry, pool_bytes: int) -> None:
        self.limits = limits
        self.arena = PageArena(geometry, pool_bytes)
        self._geometry = geometry
        self._admission = Admission(limits, geometry, pool_bytes)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, RunningRequest] = {}  # oldest first
        self._retiring: list[RunningRequest] = []  # ended, with a step in flight
        self._in_flight: deque[StepInFlight] = deque()
        self._free_slots = list(range(limits.max_num_seqs))  # a heap
        self._step = 0
        self._preemptions = self._prompt_tokens = self._generation_tokens = self._failed_steps = 0

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def validate(self, request: Request) -> None:
        """Raise InvalidInput, with the arithmetic, if the request could never run, even alone."""
        self._admission.validate(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidInput if it could never run or its id is in use."""
        self.validate(request)
        if request.request_id in self._running or request.request_id in self._waiting:
            raise InvalidInput(f"request id {request.request_id!r} is in use; choose another", field="request_id")
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; None if it is unknown or has ended. Its pages return with its last step in flight."""
        running = self._running.get(request_id)
        if running:
            return self._finish(running, FinishReason.ABORT)
        if self._waiting.pop(request_id, None):
            return RequestOutput(request_id, (), FinishReason.ABORT)
        return None

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can be computed before a result comes or a request is added."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "a third step would outrun the device"
        budget = self.limits.max_num_batched_tokens
        work: list[tuple[RunningRequest, int]] = []
        decodes = [running for running in self._running.values() if running.remaining == 1]
        short = False
        for running in decodes:
            if running.ended:  # preempted by an older one in this loop
                continue
            if self._grow(running):
                work.append((running, 1))
                budget -= 1
            else:
                short = True
        for running in self._running.values():
            if running.remaining > 1 and budget:
                tokens = min(running.remaining, budget)
                work.append((running, tokens))
                budget -= tokens
        while budget and not short and (admitted := self._admit()):
            tokens = min(admitted.remaining, budget)
            work.append((admitted, tokens))
            budget -= tokens
        return self._batch(work) if work else None

    def update(self, sampled: SampledTokens) -> list[RequestOutput]:
        """Take the result of the oldest step in flight."""
        record = self._next_in_flight(sampled.step)
        outputs = []
        for running in record.sampling:
            if not running.ended:
                running.tokens_in_flight -= 1
                outputs.append(self._accept(running, sampled.tokens[running.request.request_id]))
        self._return_pages(record.step)
        return outputs

    def fail(self, step: int, error: str) -> list[RequestOutput]:
        """The oldest step in flight failed: end its requests with `error` and discard their pages.

        If it was to move pages, what the moved pages hold is unknown: every other running request is recomputed.
        """
        record = self._next_in_flight(step)
        self._failed_steps += 1
        outputs = [
            self._finish(running, FinishReason.ERROR, error=error) for running in record.requests if not running.ended
        ]
        if record.moves_pages:
            for running in reversed(list(self._running.values())):
                self._preempt(running)
        self._return_pages(record.step)
        return outputs

    def stats(self) -> EngineStats:
        arena = self.arena
        used = {kind: arena.held_pages(kind) for kind in LayerKind}
        sizes = {kind: self._geometry.page(kind).page_bytes for kind in LayerKind}
        total = {kind: used[kind] + (arena.free_bytes // sizes[kind] if sizes[kind] else 0) for kind in LayerKind}
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            global_pages_used=used[LayerKind.GLOBAL],
            global_pages_total=total[LayerKind.GLOBAL],
            sliding_pages_used=used[LayerKind.SLIDING],
            sliding_pages_total=total[LayerKind.SLIDING],
            pool_bytes=arena.pool_bytes,
            held_bytes=arena.held_bytes,
            page_moves_total=arena.moves_made,
            preemptions_total=self._preemptions,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            failed_steps_total=self._failed_steps,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the arena is sound and every held byte belongs to exactly one request's table."""
        self.arena.check_integrity()
        tables = [running.table for running in (*self._running.values(), *self._retiring)]
        held = sum(table.held_bytes for table in tables)
        assert held == self.arena.held_bytes, f"tables hold {held} bytes, the arena {self.arena.held_bytes}"

    def _admit(self) -> RunningRequest | None:
        """Start the first waiting request if a slot and its bytes are free."""
        if not self._waiting or not self._free_slots or len(self._running) >= self.limits.max_running:
            return None
        request = next(iter(self._waiting.values()))
        committed = self._admission.committed_bytes
        growth = sum(
            max(0, committed(running.request, running.num_tokens) - running.table.held_bytes)
            for running in self._running.values()
        )
        if committed(request, request.num_tokens) + growth > self.arena.free_bytes:
            return None
        del self._waiting[request.request_id]
        table = PageTable(self.arena, self._geometry)
        table.reserve(request.num_tokens)
        running = RunningRequest(
            request, heapq.heappop(self._free_slots), table, self.limits.most_cached_tokens(request)
        )
        self._running[request.request_id] = running
        return running

    def _grow(self, running: RunningRequest) -> bool:
        """Reserve the pages of its next token, preempting younger requests if it must. False: it waits for pages."""
        end = running.request.num_computed_tokens + 1
        while (need := running.table.bytes_to_reserve(end)) > self.arena.free_bytes:
            last_token_in_flight = [other for other in self._running.values() if not other.remaining]
            returning = sum(other.table.held_bytes for other in (*self._retiring, *last_token_in_flight))
            youngest = next(other for other in reversed(self._running.values()) if other.remaining)
            if need <= self.arena.free_bytes + returning or youngest is running:
                return False
            self._preempt(youngest)
        running.table.reserve(end)
        return True

    def _preempt(self, running: RunningRequest) -> None:
        self._end(running)
        running.request.num_computed_tokens = 0
        self._preemptions += 1
        self._waiting[running.request.request_id] = running.request
        self._waiting.move_to_end(running.request.request_id, last=False)

    def _batch(self, work: list[tuple[RunningRequest, int]]) -> ScheduledBatch:
        """Fix the page numbers; no page is reserved between here and the launch."""
        self._step += 1
        moves = self.arena.take_moves()
        record = StepInFlight(self._step, moves_pages=bool(moves))
        work.sort(key=lambda item: item[1] > 1)
        requests = tuple(running.scheduled(self._step, tokens) for running, tokens in work)
        record.requests = [running for running, _ in work]
        record.sampling = [running for (running, _), one in zip(work, requests, strict=True) if one.samples]
        self._in_flight.append(record)
        return ScheduledBatch(self._step, requests, moves)

    def _next_in_flight(self, step: int) -> StepInFlight:
        record = self._in_flight.popleft()
        assert record.step == step, f"step {step} answered before step {record.step}"
        return record

    def _accept(self, running: RunningRequest, token: SampledToken) -> RequestOutput:
        """Append a sampled token and end the request if it was its last."""
        request, sampling = running.request, running.request.sampling
        if not request.output_token_ids:
            self._prompt_tokens += len(request.prompt_token_ids)
        self._generation_tokens += 1
        request.output_token_ids.append(token.token_id)
        stops = token.token_id in sampling.stop_token_ids or (
            token.token_id in self.limits.eos_token_ids and not sampling.ignore_eos
        )
        if stops and len(request.output_token_ids) > sampling.min_tokens:
            return self._finish(running, FinishReason.STOP, token)
        if request.num_tokens > running.most_cached_tokens:
            return self._finish(running, FinishReason.LENGTH, token)
        return RequestOutput(request.request_id, (token,))

    def _finish(
        self,
        running: RunningRequest,
        reason: FinishReason,
        token: SampledToken | None = None,
        *,
        error: str | None = None,
    ) -> RequestOutput:
        self._end(running)
        return RequestOutput(
            running.request.request_id,
            (token,) if token else (),
            reason,
            token.token_id if token and reason is FinishReason.STOP else None,
            error,
        )

    def _end(self, running: RunningRequest) -> None:
        running.ended = True
        del self._running[running.request.request_id]
        self._retiring.append(running)
        if not self._in_flight or running.last_step < self._in_flight[0].step:
            self._return_pages(running.last_step)

    def _return_pages(self, step: int) -> None:
        """Take back slot and pages of ended requests whose last step was `step` or earlier."""
        for running in [running for running in self._retiring if running.last_step <= step]:
            self._retiring.remove(running)
            running.table.release()
            heapq.heappush(self._free_slots, running.slot)
