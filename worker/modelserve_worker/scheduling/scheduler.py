"""Continuous batching over one page arena: who computes which tokens in the next step.

Order of a step. Every running request with one token to compute (a decode) comes first; what is left of the step is
shared among the prefills, those admitted in this step included, so that short prompts pass long ones and the oldest
always gets half (prefill.py). At most as many requests run as a step has tokens; so while one of them prefills, the
others leave it at least one token of every step, and while some prefill, no decode waits: neither starves the other.

Size of a step. Without decodes it is `max_num_batched_tokens`, or a few mixed steps while a prompt needs several.
Beside decodes prefills fill `max_num_mixed_tokens`, so that a token never waits long for its next, and so
that decodes ride along: a step of 512 rows reads the weights once for all of them and costs little more than its share
of the prefill alone, where a decode by itself costs a reading of the weights. The more of a request's tokens come in
mixed steps, the fewer steps remain that only decode. Behind a long context rows attend to more, and a step has fewer of
them, as many as a captured step. Where more prompts wait than many such steps take, steps become up to four times as
long (modelserve/planning/prompt_rows.py): the cache of all that decode is read less often for the same prompts.

Admission is first come first served, as many as slots and memory take at once, whether or not the step has tokens left
for them. When the head of the queue does not fit, those behind it wait too, however small: the bytes that running
requests give back gather for it, and as every running request ends, it gets in. Were smaller ones let past, they could
take those bytes forever.

Pages. Admission reserves what all known tokens hold, and leaves free what the running requests will take next
(admission.py). A prefill therefore never asks for pages, and a decode grows page by page. When the pool is out, the
youngest other request is preempted: its pages return after its last step in flight, its token in flight is discarded,
and it goes to the front of the queue to be recomputed from prompt and output. A request never preempts an older one;
if it is the youngest itself, it keeps its pages and waits. The oldest running request can thus always take what it
needs, and alone it fits (validate), so some request always progresses.

Overlap. Step n + 1 may be scheduled before the result of step n is known. A token that step n samples is then
IN_FLIGHT. The end of a request by length is known ahead, and no step is scheduled past it; a stop or an abort is found
one step late, and the token of the step in flight is discarded. Slot and pages return after the last step in flight.

Failure. A failed step ends its requests, and leaves the device's block tables unknown until the next step names every
entry again. Nothing else is lost, unless the step was to move pages, or another was launched behind it and has written
rows wherever those tables pointed: then every other running request is recomputed.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import replace

import numpy as np

from modelserve.architecture import LayerKind
from modelserve.errors import InvalidInput
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import IN_FLIGHT, NOT_A_NUMBER, Int32Array, SampledTokens, ScheduledBatch
from modelserve_worker.request import (
    FinishReason,
    PromptLogprobs,
    Request,
    RequestOutput,
    TokenConstraint,
    TokenLogprobs,
)
from modelserve_worker.scheduling.admission import Admission, SchedulerLimits
from modelserve_worker.scheduling.arena import PageArena
from modelserve_worker.scheduling.page_table import PageTable
from modelserve_worker.scheduling.prefill import share_prefill_tokens, trim_to_captured
from modelserve_worker.scheduling.running import RunningRequest, RunningRequests, StepInFlight
from modelserve_worker.scheduling.stats import EngineStats, StepEvents

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """Schedules requests on one pool of `pool_bytes` bytes per rank. One thread calls it; any may call `validate`."""

    def __init__(self, limits: SchedulerLimits, geometry: CacheGeometry, pool_bytes: int) -> None:
        self.limits = limits
        self.arena = PageArena(geometry, pool_bytes)
        self._geometry = geometry
        self._admission = Admission(limits, geometry, pool_bytes)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running = RunningRequests(limits.max_num_seqs)
        self._counters = self._running.counters
        self._in_flight: deque[StepInFlight] = deque()
        self._events = StepEvents()
        self._tables_unknown = False  # a step failed: the next one names every entry
        self._step = 0
        self._preemptions = self._prompt_tokens = self._generation_tokens = self._failed_steps = 0

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting) or len(self._running) > 0

    def validate(self, request: Request) -> None:
        """Raise InvalidInput, with the arithmetic, if the request could never run, even alone."""
        self._admission.validate(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidInput, and has changed nothing, if it could never run or its id is in use."""
        self.validate(request)
        if request.request_id in self._running.by_id or request.request_id in self._waiting:
            raise InvalidInput(f"request id {request.request_id!r} is in use; choose another", field="request_id")
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; None if it is unknown or has ended. Its pages return with its last step in flight."""
        running = self._running.by_id.get(request_id)
        if running:
            return self._finish(running, FinishReason.ABORT)
        if self._waiting.pop(request_id, None):
            return RequestOutput(request_id, (), FinishReason.ABORT)
        return None

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can be computed before a result comes or a request is added."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "a third step would outrun the device"
        counters, slots = self._counters, self._running.slots()
        remaining = counters.remaining(slots)
        decodes, all_grew = self._grow_decodes(self._running.with_masks(slots[remaining == 1]))
        prefills = slots[remaining > 1]
        if len(prefills):
            prefills = prefills[counters.running[prefills]]  # a decode may have preempted it
        if all_grew:
            admitted = self._admit()
            if admitted:
                prefills = np.concatenate((prefills, np.array(admitted, dtype=np.int32)))
        if not len(decodes) and not len(prefills):
            return None
        remaining, longest = counters.remaining(prefills), int(counters.known[prefills].max(initial=0))
        budget = self.limits.prefill_tokens(len(decodes), remaining, longest)
        shares = share_prefill_tokens(remaining, counters.computed[prefills], budget, self.limits.prompt_cost)
        trim_to_captured(shares, remaining, len(decodes), self.limits.captured_rows)
        return self._batch(decodes, prefills[shares > 0], shares[shares > 0])

    def update(self, sampled: SampledTokens) -> list[RequestOutput]:
        """Take the result of the oldest step in flight."""
        record = self._next_in_flight(sampled.step)
        counters, slots = self._counters, record.sampling
        assert len(slots) == len(sampled.token_ids), f"{len(sampled.token_ids)} tokens came for {len(slots)} requests"
        self._take_prompt_logprobs(sampled)
        counters.in_flight[slots] -= 1
        counters.last_token[slots] = sampled.token_ids
        full = counters.known[slots] - counters.in_flight[slots] > counters.most_cached[slots]
        outputs = []
        for index, (running, token_id, last) in enumerate(
            zip(self._running.stays(slots), sampled.token_ids.tolist(), full.tolist(), strict=True)
        ):
            if running.ended:
                continue
            if token_id == NOT_A_NUMBER:
                outputs.append(self._fail_for_nan(running))
                continue
            request = running.request
            if not request.output_token_ids:
                self._prompt_tokens += len(request.prompt_token_ids)
            self._generation_tokens += 1
            request.output_token_ids.append(token_id)
            logprobs = (sampled.logprobs[index],) if index in sampled.logprobs else ()
            output = self._output(running, token_id, logprobs, last=last)
            if request.prompt_logprobs and len(request.output_token_ids) == 1:
                output = replace(output, prompt_logprobs=PromptLogprobs.joined(request.prompt_logprobs))
            outputs.append(output)
        self._running.return_pages(record.step)
        return outputs

    def constraints(self, batch: ScheduledBatch) -> list[TokenConstraint | None]:
        """Of the constrained rows of a step in flight, in order; None for a request that has ended since."""
        stays = self._running.stays(batch.slots[batch.samples][batch.constrained])
        return [None if running.ended else running.request.constraint for running in stays]

    def fail(self, step: int, error: str) -> list[RequestOutput]:
        """The oldest step in flight failed: end its requests with `error` and discard their pages.

        Other running requests are recomputed if what their pages hold is unknown: when the step was to move pages, or
        when another step is in flight behind it.
        """
        record = self._next_in_flight(step)
        self._failed_steps += 1
        self._tables_unknown = True
        stays = self._running.stays(record.slots)
        outputs = [self._finish(running, FinishReason.ERROR, error=error) for running in stays if not running.ended]
        if record.moves_pages or self._in_flight:
            for running in reversed(list(self._running.by_id.values())):
                self._preempt(running)
        self._running.return_pages(record.step)
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

    def take_events(self) -> StepEvents:
        """What happened since the last call."""
        events, self._events = self._events, StepEvents()
        return events

    def check_integrity(self) -> None:
        """Raise AssertionError unless the arena is sound, every held byte belongs to one request, and counts agree."""
        self.arena.check_integrity()
        self._running.check_integrity(self.arena.held_bytes)

    def _grow_decodes(self, slots: Int32Array) -> tuple[Int32Array, bool]:
        """Reserve the next token's page where one is due. Those that can run now, and whether that is all of them."""
        counters = self._counters
        due = slots[counters.computed[slots] >= counters.covered[slots]]
        if not len(due):
            return slots, True
        all_grew = True
        for running in self._running.stays(due):
            if not running.ended:  # else preempted by an older one in this loop
                all_grew &= self._grow(running)
        grown = counters.running[slots] & (counters.computed[slots] < counters.covered[slots])
        return slots[grown], all_grew

    def _grow(self, running: RunningRequest) -> bool:
        """Reserve the pages of its next token, preempting younger requests if it must. False: it waits for pages."""
        counters = self._counters
        end = int(counters.computed[running.slot]) + 1
        while (need := running.table.bytes_to_reserve(end)) > self.arena.free_bytes:
            slots = self._running.slots()
            remaining = counters.remaining(slots)
            returning = int(counters.held_bytes[slots[remaining == 0]].sum())
            returning += sum(other.table.held_bytes for other in self._running.retiring)
            (youngest,) = self._running.stays(slots[remaining > 0][-1:])
            if need <= self.arena.free_bytes + returning or youngest is running:
                return False
            self._preempt(youngest)
        running.table.reserve(end)
        counters.note_pages(running)
        return True

    def _admit(self) -> list[int]:
        """Give slots and pages to waiting requests while the first of them fits; the slots, in order."""
        admitted: list[int] = []
        counters, admission = self._counters, self._admission
        while self._waiting and len(self._running) < self.limits.max_running:
            slot = self._running.free_slot
            request = next(iter(self._waiting.values()))
            free = self.arena.free_bytes - admission.committed_bytes(request)
            if slot is None or free < 0:
                break
            slots = self._running.slots()
            growth = admission.growth_bytes(
                counters.known[slots], counters.most_cached[slots], counters.held_bytes[slots]
            )
            if growth > free:
                break
            del self._waiting[request.request_id]
            if not request.admitted:
                request.admitted = True
                self._events.admitted.append((request.request_id, time.monotonic()))
            table = PageTable(self.arena, self._geometry, slot)
            table.reserve(request.num_tokens)
            running = RunningRequest(request, slot, table, self.limits.stop_token_ids(request))
            self._running.enter(running, self.limits.most_cached_tokens(request))
            admitted.append(slot)
        return admitted

    def _preempt(self, running: RunningRequest) -> None:
        self._end(running)
        self._preemptions += 1
        self._waiting[running.request.request_id] = running.request
        self._waiting.move_to_end(running.request.request_id, last=False)

    def _batch(self, decodes: Int32Array, prefills: Int32Array, shares: Int32Array) -> ScheduledBatch:
        """Fix the page numbers; no page is reserved between here and the launch."""
        counters = self._counters
        in_flight = counters.in_flight[decodes] > 0
        token_ids = np.where(in_flight, np.int32(IN_FLIGHT), counters.last_token[decodes])
        slots, lengths = decodes, np.ones(len(decodes), dtype=np.int32)
        if len(prefills):
            order = np.argsort(shares > 1, kind="stable")
            prefills, shares = prefills[order], shares[order]
            slots, lengths = np.concatenate((decodes, prefills)), np.concatenate((lengths, shares))
            starts = counters.computed[prefills]
            chunks = zip(self._running.stays(prefills), starts.tolist(), (starts + shares).tolist(), strict=True)
            token_ids = np.concatenate((token_ids, *(running.token_ids(start, end) for running, start, end in chunks)))
        starts = counters.computed[slots]
        ends = starts + lengths
        samples = ends == counters.known[slots]
        first = counters.last_step[slots] < 0
        if self._tables_unknown:
            self._tables_unknown = False
            for running in self._running.by_id.values():
                running.table.resend()
        self._step += 1
        batch = ScheduledBatch(
            step=self._step,
            slots=slots,
            starts=starts,
            lengths=lengths,
            samples=samples,
            output_counts=counters.known[slots] - counters.prompt[slots],
            token_ids=token_ids,
            admitted=tuple(running.admitted() for running in self._running.stays(slots[first])),
            page_moves=self.arena.take_moves(),
            global_updates=self.arena.take_updates(LayerKind.GLOBAL),
            sliding_updates=self.arena.take_updates(LayerKind.SLIDING),
            constrained=np.flatnonzero(counters.constrained[slots[samples]]).astype(np.int32),
        )
        # A decode's row is the token that was sampled before; the first token of an answer has no row yet.
        first_tokens = np.count_nonzero(counters.known[slots[samples]] == counters.prompt[slots[samples]])
        self._events.step_tokens.append(len(token_ids) + int(first_tokens))
        counters.advance(slots, ends, samples, self._step)
        self._in_flight.append(StepInFlight(self._step, bool(batch.page_moves), slots, slots[samples]))
        return batch

    def _next_in_flight(self, step: int) -> StepInFlight:
        record = self._in_flight.popleft()
        assert record.step == step, f"step {step} answered before step {record.step}"
        return record

    def _output(
        self, running: RunningRequest, token_id: int, logprobs: tuple[TokenLogprobs, ...], *, last: bool
    ) -> RequestOutput:
        """What a request's new token, which is its last by length where `last`, says to whoever waits."""
        request, constraint = running.request, running.request.constraint
        if constraint is not None and constraint.error is not None:  # while its mask was computed: any token came
            return self._finish(running, FinishReason.ERROR, error=constraint.error)
        if token_id in running.stop_token_ids and len(request.output_token_ids) > request.sampling.min_tokens:
            return self._finish(running, FinishReason.STOP, token_id, logprobs, stop_token_id=token_id)
        if constraint is not None:
            constraint.consume(token_id)
            if constraint.error is not None:
                return self._finish(running, FinishReason.ERROR, error=constraint.error)
            if constraint.complete:
                return self._finish(running, FinishReason.STOP, token_id, logprobs)
        if last:
            return self._finish(running, FinishReason.LENGTH, token_id, logprobs)
        return RequestOutput(request.request_id, (token_id,), logprobs=logprobs)

    def _take_prompt_logprobs(self, sampled: SampledTokens) -> None:
        """Keep what follows the scores a request has: a recomputed one, or one that has ended, is told again."""
        for slot, (first, scores) in sampled.prompt_logprobs.items():
            (running,) = self._running.stays(np.array([slot], dtype=np.int32))
            kept = running.request.prompt_logprobs
            known = 1 + sum(map(len, kept))  # the first token has no score
            assert first <= known, f"prompt scores of positions {known} to {first} are missing"
            if new := scores[known - first :]:
                kept.append(new)

    def _fail_for_nan(self, running: RunningRequest) -> RequestOutput:
        position = running.request.num_tokens
        return self._finish(
            running,
            FinishReason.ERROR,
            error=f"the logits of this request are not numbers (NaN) at position {position}, so no token can be drawn; "
            "other requests go on. Send it again; if it fails again, the weights are damaged or overflow in their "
            "dtype: compare the checkpoint's files with their source",
        )

    def _finish(
        self,
        running: RunningRequest,
        reason: FinishReason,
        token_id: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        stop_token_id: int | None = None,
        error: str | Exception | None = None,
    ) -> RequestOutput:
        self._end(running)
        return RequestOutput(
            running.request.request_id,
            () if token_id is None else (token_id,),
            reason,
            stop_token_id,
            None if error is None else str(error),
            error.field if isinstance(error, InvalidInput) else None,
            logprobs,
        )

    def _end(self, running: RunningRequest) -> None:
        """End a stay. Without a step in flight its slot and pages return at once."""
        self._running.end(running)
        last_step = int(self._counters.last_step[running.slot])
        if not self._in_flight or last_step < self._in_flight[0].step:
            self._running.return_pages(last_step)
