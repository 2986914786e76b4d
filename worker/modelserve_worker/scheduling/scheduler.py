"""Continuous batching over one page arena: who computes which tokens in the next step.

Order of a step. Every running request with one token to compute (a decode) comes first; what is left of the step is
shared among the prefills, those admitted in this step included, so that short prompts pass long ones and the oldest
always gets half (prefill.py). At most as many requests run as a step has tokens; so while one of them prefills, the
others leave it at least one token of every step, and while some prefill, no decode waits: neither starves the other.

Size of a step. Without decodes it is `max_num_batched_tokens`, or a few mixed steps while a prompt needs several.
Beside decodes prefills fill `max_num_mixed_tokens`, on a CPU what a set time computes (mixed_pace.py), so that a token
never waits long for its next, and so that decodes ride along: a step of 512 rows reads the weights once for all of them
and costs little more than its share of the prefill alone, where a decode by itself costs a reading of the weights. The
more of a request's tokens come in mixed steps, the fewer steps remain that only decode. Rows of an image have to be in
one step, whatever is beside them (whole_spans.py). Behind a long context rows attend to more, and a step has fewer of
them, as many as a captured step. Steps follow what waits, in the front end too (held_back.py): half as long while few
prompts do, up to three times as long where a crowd does (modelserve/planning/speed/mixed_steps.py).

Admission is first come first served, as many as slots and memory take at once, whatever the step has tokens for. When
the head of the queue does not fit, those behind it wait too, however small: the bytes that running requests give back
gather for it, and as every running request ends, it gets in. Were smaller ones let past, they could take those bytes
forever. Who waits for rows from host memory stands beside the queue, and then first in it again.

Pages. Admission reserves what all known tokens hold, and leaves free what the running requests will take next
(admission.py). A prefill therefore never asks for pages, and a decode grows page by page. When the pool is out, the
youngest other request is preempted: its pages return after its last step in flight, its token in flight is discarded,
and it goes to the front of the queue to be recomputed from prompt and output, behind what is left of its rows: where
a request begins, and what it leaves to others, is prefix_reuse.py's. A request never preempts an older one; if it is
the youngest itself, it keeps its pages and waits. The oldest running request can thus always take what it needs, and
alone it fits (validate), so some request always progresses.

Drafts. A decode takes along what a drafter on the device proposes to follow it, as many as pay (drafting.py), as far as
the step has rows and memory has pages that nobody has to give up. How many are accepted is in the answer. A drafter
whose proposals take time makes those that the step before asked for.

Overlap. Step n + 1 may be scheduled before the result of step n is known. A token that step n samples is then
IN_FLIGHT. Of its drafts all are assumed to be accepted: pages are planned for that, the device starts where its request
is, and the answer takes back what was assumed too much. The end of a request by length is known ahead, and no step is
scheduled past it, nor one that might be while drafts are in flight; a stop or an abort is found one step late, and the
token of the step in flight is discarded. Slot and pages return after the last step in flight.

Failure. A failed step ends its requests with what they wrote, and leaves the device's block tables unknown until the
next one names every entry again. Where pages were to move or be copied, others are recomputed. Nothing cached is
believed where any page may hold anything: where one was to have another number, or a step behind has written wherever
old tables pointed. Logits without numbers end their request alike; what it only read is looked at (page_checks.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import NOT_A_NUMBER, Int32Array, SampledTokens, ScheduledBatch, commit_first_tokens
from modelserve_worker.request import FinishReason, PromptLogprobs, Request, RequestOutput, TokenLogprobs
from modelserve_worker.scheduling.adapter_slots import AdapterSlotTable
from modelserve_worker.scheduling.admission import Admission, SchedulerLimits
from modelserve_worker.scheduling.cache_events import CacheEvents
from modelserve_worker.scheduling.costs.mixed_pace import MixedPace
from modelserve_worker.scheduling.costs.step_costs import StepCosts
from modelserve_worker.scheduling.drafting import AskedDrafters, Drafting
from modelserve_worker.scheduling.held_back import HeldBack
from modelserve_worker.scheduling.pages.arena import PageArena
from modelserve_worker.scheduling.pages.page_table import PageTable
from modelserve_worker.scheduling.prefill import prefill_shares
from modelserve_worker.scheduling.prefix_reuse import PrefixReuse
from modelserve_worker.scheduling.request_queue import RequestQueue
from modelserve_worker.scheduling.running import RunningRequest, RunningRequests
from modelserve_worker.scheduling.stats import EngineStats, StepEvents, Totals
from modelserve_worker.scheduling.step_in_flight import StepInFlight
from modelserve_worker.scheduling.stopping import Stopping
from modelserve_worker.scheduling.tiers.tier import TierOf
from modelserve_worker.scheduling.whole_spans import WholeSpans

MAX_STEPS_IN_FLIGHT = 2
_NOBODY = np.zeros(0, dtype=np.int32)


class Scheduler:
    """Schedules requests on one pool of `pool_bytes` bytes per rank. One thread calls it; any may call `validate`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        geometry: CacheGeometry,
        pool_bytes: int,
        *,
        draft_tokens: int = 0,
        asked_drafts: AskedDrafters = (),
        step_costs: StepCosts | None = None,
        mixed_pace: MixedPace | None = None,
        prefix_caching: bool = False,
        tiers: Iterable[TierOf] = (),
        looks_up: bool = False,
        events: CacheEvents | None = None,
        adapter_slots: int = 0,
    ) -> None:
        """`draft_tokens`: how many are proposed at a time, by `asked_drafts` where a step asks; with `step_costs`
        what pays. A draft must not write over a row that it reads, nor one that its request reads if it is wrong.
        `tiers`, `looks_up`, `events`: see PrefixReuse."""
        most = commit_first_tokens(geometry) if geometry.sliding_page.layers else 1 + draft_tokens
        assert draft_tokens < most, f"{draft_tokens} drafts write over rows in a window of {geometry.window}"
        self.limits, self.mixed_pace = limits, mixed_pace
        self.drafting = Drafting(draft_tokens, limits.max_num_seqs, step_costs, asked=asked_drafts)
        self.arena = PageArena(geometry, pool_bytes)
        self.prefixes = PrefixReuse(
            self.arena, geometry, limits, keeps_pages=prefix_caching, tiers=tiers, looks_up=looks_up, events=events
        )
        self._geometry, self._admission = geometry, Admission(limits, geometry, pool_bytes)
        self._queue, self.held_back, self.adapters = RequestQueue(), HeldBack(), AdapterSlotTable(adapter_slots)
        self._running = RunningRequests(limits.max_num_seqs, exact=limits.exact)
        self._spans = WholeSpans(self._running, limits.max_num_batched_tokens, limits.encoding_cost)
        self._counters = self._running.counters
        self.constraints = partial(self._running.constraints, drafting=self.drafting)
        self._in_flight: deque[StepInFlight] = deque()
        self._tables_unknown = False  # a step failed: the next one names every entry
        self._step, self._totals, self._events = 0, Totals(), StepEvents()

    @property
    def has_requests(self) -> bool:
        return len(self._queue) + len(self._running) > 0

    def validate(self, request: Request) -> None:
        """Raise InvalidInput, with the arithmetic, if the request could never run, even alone."""
        self._admission.validate(request)
        self.adapters.check(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidInput, and has changed nothing, if it could never run or its id is in use."""
        self.validate(request)
        if request.request_id in self._running.by_id or request.request_id in self._queue:
            raise InvalidInput(f"request id {request.request_id!r} is in use; choose another", field="request_id")
        self._queue.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; None if it is unknown or has ended. Its pages return with its last step in flight."""
        if running := self._running.by_id.get(request_id):
            return self._finish(running, FinishReason.ABORT)
        if self._queue.remove(request_id):
            self.prefixes.gone(request_id)
            self.adapters.forget(request_id)
            return RequestOutput(request_id, (), FinishReason.ABORT)
        return None

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can be computed before a result comes or a request is added."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "a third step would outrun the device"
        self.prefixes.settle()
        self._queue.fetched(self.prefixes.take_ready() + self.adapters.take_waiting())
        counters, slots = self._counters, self._running.slots()
        decodes, prefills = counters.by_kind(slots)
        decoding = len(decodes) > 0
        decodes, all_grew = self._grow_decodes(self._running.with_masks(decodes))
        if len(prefills):
            prefills = prefills[counters.running[prefills]]  # a decode may have preempted it
        if all_grew and (admitted := self._admit()):
            prefills = np.concatenate((prefills, np.array(admitted, dtype=np.int32)))
        if not len(decodes) and not len(prefills):
            return self._batch(_NOBODY, _NOBODY, _NOBODY, _NOBODY) if self.prefixes.has_errands else None
        decodes, spare = self._spans.seat(decodes, prefills)
        drafts = self._running.drafts(decodes, drafting=self.drafting, spare=spare, arena=self.arena)
        rows = len(decodes) + int(drafts.sum())
        # Behind one that waits for memory, those that are held back would wait, too.
        shares, budget = prefill_shares(
            self.limits, self.mixed_pace, counters, prefills, decodes, rows=rows, decoding=decoding,
            most_drafts=self.drafting.most, held_back=0 if self._queue.first else self.held_back.rows,
        )  # fmt: skip
        self.prefixes.cut(self._running.holders(prefills), counters.computed[prefills], shares)
        self._spans.keep(prefills, shares, rows=rows, budget=budget, decoding=decoding)
        self._running.leave_room(shares, rows, self.drafting)
        return self._batch(decodes, drafts, prefills[shares > 0], shares[shares > 0])

    def update(self, sampled: SampledTokens) -> list[RequestOutput]:
        """Take the result of the oldest step in flight."""
        record = self._next_in_flight(sampled.step)
        self.prefixes.checked(sampled.step, sampled.unsound)
        counters, slots = self._counters, record.sampling
        single = not len(sampled.counts)
        counts = np.ones_like(slots) if single else sampled.counts
        assert len(slots) == len(counts), f"tokens came of {len(counts)} requests, not of {len(slots)}"
        self._running.keep_prompt_logprobs(sampled)
        counters.answer(slots, record.drawn, counts)
        if self.drafting.most:
            self.drafting.answer(slots, record.drawn, counts, sampled, asked=record.asked)
            self.adapters.count_drafts(self._running.adapters(slots), record.drawn, counts)
        counters.last_token[slots] = sampled.token_ids if single else sampled.token_ids[np.cumsum(counts) - 1]
        outputs, token_ids, end = [], sampled.token_ids.tolist(), 0
        for index, (running, count) in enumerate(zip(self._running.holders(slots), counts.tolist(), strict=True)):
            first, end = end, end + count
            if running.ended:
                continue
            known = running.request.output_token_ids
            if single and known and not sampled.logprobs and running.stopping.goes_on(token_ids[first]):
                known.append(token_ids[first])
                self._totals.generation_tokens_total += 1
                outputs.append(RequestOutput(running.request.request_id, (token_ids[first],)))
                continue
            logprobs = [sampled.logprobs[i] for i in range(first, end) if i in sampled.logprobs]
            outputs += self._take(running, token_ids[first:end], logprobs, drafts=int(record.drawn[index]) - 1)
        self._running.return_pages(record.step)
        return outputs

    def _take(
        self, running: RunningRequest, token_ids: list[int], logprobs: list[TokenLogprobs], *, drafts: int
    ) -> list[RequestOutput]:
        """Give a request its new tokens, as far as they are its own; what it says to whoever waits."""
        request, verdict = running.request, running.stopping.take(token_ids)
        first = not request.output_token_ids
        if NOT_A_NUMBER in token_ids[verdict.count :]:
            self.prefixes.distrust(running, read=True)
        token_ids = token_ids[: verdict.count]
        if first and token_ids:
            self._totals.begin_answer(request)
        self._totals.generation_tokens_total += len(token_ids)
        request.output_token_ids += token_ids
        scores = PromptLogprobs.joined(request.prompt_logprobs) if first and request.prompt_logprobs else None
        if verdict.reason is not None:
            self._leave(running, verdict.reason)
        return verdict.outputs(request.request_id, token_ids, logprobs[: len(token_ids)], scores, drafts)

    def fail(self, step: int, error: str) -> list[RequestOutput]:
        """The oldest step in flight failed: end its requests with `error`."""
        record = self._next_in_flight(step)
        self._totals.failed_steps_total += 1
        self._tables_unknown = True
        self.adapters.resend()
        anywhere = record.renumbers or bool(self._in_flight)
        for running in (holders := self._running.holders(record.slots)):
            self.prefixes.distrust(running)
        outputs = [self._finish(running, FinishReason.ERROR, error=error) for running in holders if not running.ended]
        self.prefixes.step_failed(step)
        for running in reversed(list(self._running.by_id.values()) if anywhere or record.moves_pages else []):
            self._preempt(running, sound=False)
        if anywhere:
            self.prefixes.clear()
        self._running.return_pages(record.step)
        return outputs

    def stats(self) -> EngineStats:
        counts: dict[str, Any] = {**self.arena.counts(), **self.drafting.counts(), **self.prefixes.counts()}
        counts |= {**self.adapters.counts(), **asdict(self._totals)}
        return EngineStats(**counts, num_running=len(self._running), num_waiting=len(self._queue))

    def take_events(self) -> StepEvents:
        """What happened since the last call."""
        events, self._events = self._events, StepEvents()
        return events

    def check_integrity(self) -> None:
        """Raise AssertionError unless the arena is sound, every held byte belongs to one request, and counts agree."""
        self.arena.check_integrity()
        sizes = {kind: self._geometry.page(kind).page_bytes for kind in LayerKind}
        self._running.check_integrity(self.arena.held_bytes, sizes)
        self.prefixes.check_integrity()

    def _grow_decodes(self, slots: Int32Array) -> tuple[Int32Array, bool]:
        """Reserve the next token's page where one is due. Those that can run now, and whether that is all of them."""
        counters = self._counters
        due = slots[counters.computed[slots] >= counters.covered[slots]]
        if not len(due):
            return slots, True
        all_grew = True
        for running in self._running.holders(due):
            if not running.ended:  # else preempted by an older one in this loop
                all_grew &= self._grow(running)
        grown = counters.running[slots] & (counters.computed[slots] < counters.covered[slots])
        return slots[grown], all_grew

    def _grow(self, running: RunningRequest) -> bool:
        """Reserve the pages of its next token, preempting younger requests if it must. False: it waits for pages."""
        counters = self._counters
        start = int(counters.computed[running.slot])
        end = start + 1
        while (need := running.table.bytes_to_reserve(end)) > self.arena.available_bytes:
            slots = self._running.slots()
            remaining = counters.remaining(slots)
            returning = int(counters.held_bytes[slots[remaining == 0]].sum())
            returning += sum(other.table.held_bytes for other in self._running.retiring)
            (youngest,) = self._running.holders(slots[remaining > 0][-1:])
            if need <= self.arena.available_bytes + returning or youngest is running:
                return False
            self._preempt(youngest)
        running.table.reserve(end)
        running.table.write(start, end, least=counters.least_computed(running.slot))
        counters.note_pages(running)
        return True

    def _admit(self) -> list[int]:
        """Give slots and pages to waiting requests while the first of them fits; the slots, in order."""
        admitted: list[int] = []
        counters, admission = self._counters, self._admission
        self.prefixes.prepare(0 if self._queue.first is None else admission.committed_bytes(self._queue.first))
        while (request := self._queue.first) and len(self._running) < self.limits.max_running:
            if not self.adapters.seat(request):
                self._queue.put_aside(request)
                continue
            slot = self._running.free_slot
            hit = self.prefixes.find(request)
            needed = admission.committed_bytes(request) - self.prefixes.shared_bytes(hit)
            free = self.arena.available_bytes - self.prefixes.arriving_bytes - needed
            if slot is None or free < 0:
                break
            slots = self._running.slots()
            growth = admission.growth_bytes(
                counters.known[slots], counters.most_cached[slots], counters.held_bytes[slots]
            )
            if growth > free or self.prefixes.holds_back(request, hit, needed):
                break
            if self.prefixes.fetch(request, hit):
                self._queue.put_aside(request)
                continue
            self._queue.remove(request.request_id)
            table = PageTable(self.arena, self._geometry, slot, keeping=(shares_rows := self.prefixes.keeps_pages))
            most_cached = self.limits.most_cached_tokens(request)
            stopping = Stopping(request, self.limits.stop_token_ids(request), most_cached + 1)
            running = RunningRequest(request, slot, table, stopping, shares_rows)
            self._running.enter(running, most_cached, self.prefixes.begin(running, hit))
            self.drafting.enter(slot)
            counters.adapter[slot] = self.adapters.enter(request)
            if not request.admitted:
                request.admitted = True
                self.held_back.admitted(len(request.prompt_token_ids), request.cached_tokens)
                self._events.admitted.append((request.request_id, time.monotonic(), request.cached_tokens))
            admitted.append(slot)
        return admitted

    def _preempt(self, running: RunningRequest, *, sound: bool = True) -> None:
        """What it has computed is left to it, where memory lasts, unless it is not known to be `sound`."""
        self._end(running, sound=sound)
        self._totals.preemptions_total += 1
        self._queue.put_first(running.request)

    def _batch(
        self, decodes: Int32Array, drafts: Int32Array, prefills: Int32Array, shares: Int32Array
    ) -> ScheduledBatch:
        """Fix the page numbers; no page is reserved between here and the launch."""
        counters = self._counters
        segments = self._running.segments(decodes, drafts, prefills, shares, most_drafts=self.drafting.most)
        slots, starts, drawn, given = segments.slots, segments.starts, segments.drawn, segments.given
        ends, first = starts + segments.lengths, counters.last_step[slots] < 0
        spare_slots = self.prefixes.write(self._running, slots, starts, ends, decodes=len(decodes))
        if self._tables_unknown:
            self._tables_unknown = False
            for running in self._running.by_id.values():
                running.table.resend()
        self._step += 1
        sampling = drawn > 0
        asked = self._running.drafts_to_ask(slots[sampling], drawn[sampling], drafting=self.drafting)
        errands = self.prefixes.take_errands(self._step, moves_pages=bool(moves := self.arena.take_moves()))
        batch = ScheduledBatch(
            step=self._step, slots=slots, starts=starts, lengths=segments.lengths,
            sampled=drawn + given if len(given) else drawn, given=given, targets=segments.targets,
            output_counts=counters.known[slots] - counters.prompt[slots], token_ids=segments.token_ids,
            admitted=tuple(running.admitted() for running in self._running.holders(slots[first])),
            page_moves=moves, global_updates=self.arena.take_updates(LayerKind.GLOBAL),
            sliding_updates=self.arena.take_updates(LayerKind.SLIDING),
            constrained=np.flatnonzero(counters.constrained[slots[sampling]]).astype(np.int32), asked=asked,
            spare_slots=spare_slots, generated=segments.generated, spans=segments.spans, trial=segments.trial,
            **errands._asdict(), **self.adapters.of_step(counters.adapter[slots])._asdict(),
        )  # fmt: skip
        # A decode's row is the token that was sampled before; the first token of an answer has no row yet.
        first_tokens = np.count_nonzero(counters.known[slots[sampling]] == counters.prompt[slots[sampling]])
        if len(slots):
            self._events.step_tokens.append(len(segments.token_ids) + int(first_tokens))
        counters.advance(slots, ends, drawn, self._step)
        self.prefixes.computed(self._running, slots, ends, sampling, decodes=len(decodes))
        self._in_flight.append(
            StepInFlight(self._step, bool(moves), self.arena.renumbered, slots, slots[sampling], drawn[sampling], asked)
        )
        return batch

    def _next_in_flight(self, step: int) -> StepInFlight:
        record = self._in_flight.popleft()
        assert record.step == step, f"step {step} answered before step {record.step}"
        return record

    def _finish(self, running: RunningRequest, reason: FinishReason, *, error: str | None = None) -> RequestOutput:
        self._leave(running, reason)
        return RequestOutput(running.request.request_id, (), reason, error=error)

    def _leave(self, running: RunningRequest, reason: FinishReason) -> None:
        """The request has ended, and may leave its rows to others where they are sound."""
        self._end(running, sound=reason is not FinishReason.ERROR)
        self.prefixes.gone(running.request.request_id)

    def _end(self, running: RunningRequest, *, sound: bool) -> None:
        """End a request. Without a step in flight its slot and pages return at once."""
        self.prefixes.ended(running, int(self._counters.computed[running.slot]), sound=sound)
        self._running.end(running)
        self.adapters.leave(running.request)
        last_step = int(self._counters.last_step[running.slot])
        if not self._in_flight or last_step < self._in_flight[0].step:
            self._running.return_pages(last_step)
