"""Requests while they hold a slot and pages: their counters as arrays over the slots, the rest an object each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from modelserve.model.architecture import LayerKind
from modelserve.sizing.speculation import STEP_DRAFTS, Speculation
from modelserve_worker.batch import (
    BY_LENGTH,
    IN_FLIGHT,
    NOTHING_ASKED,
    AdmittedRequest,
    Asked,
    Int32Array,
    SampledTokens,
    ScheduledBatch,
    row_places,
)
from modelserve_worker.embedded_spans import NO_SPANS, SpanRows
from modelserve_worker.request import CacheTrial, Request, TokenConstraint
from modelserve_worker.scheduling.adapter_slots import NO_SLOT
from modelserve_worker.scheduling.drafting import Drafting
from modelserve_worker.scheduling.pages.arena import PageArena
from modelserve_worker.scheduling.pages.page_table import PageTable
from modelserve_worker.scheduling.prefix.trail import Trail
from modelserve_worker.scheduling.prompt_spans import has_embedded_rows, span_rows
from modelserve_worker.scheduling.stopping import Stopping

_NOTHING = np.zeros(0, dtype=np.int32)


class Segments(NamedTuple):
    """Columns of a step's table, as `ScheduledBatch` has them, and how many tokens are drawn of each segment."""

    slots: Int32Array
    starts: Int32Array
    lengths: Int32Array
    token_ids: Int32Array
    drawn: Int32Array
    given: Int32Array
    targets: Int32Array
    generated: int
    spans: SpanRows
    trial: CacheTrial | None = None


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request on the device, from admission to its end or preemption, in one slot."""

    request: Request
    slot: int
    table: PageTable
    stopping: Stopping
    shares_rows: bool = False  # with requests of its cache namespace
    ended: bool = False  # what it still has in flight is discarded
    trail: Trail = field(default_factory=Trail)

    def admitted(self) -> AdmittedRequest:
        """What the device learns of it when its first tokens are scheduled."""
        request = self.request
        return AdmittedRequest(
            self.slot, request.request_id, request.sampling, request.prompt_token_ids, tuple(request.output_token_ids),
            self.stopping.banned_token_ids, request.cache_namespace if self.shares_rows else None,
            request.predicted_token_ids, request.spans,
        )  # fmt: skip

    def token_ids(self, start: int, end: int) -> Int32Array:
        """Known tokens of positions [start, end)."""
        request = self.request
        prompt = len(request.prompt_token_ids)
        known = np.asarray(request.prompt_token_ids[start:end], dtype=np.int32)
        if end <= prompt:
            return known
        sampled = request.output_token_ids[max(0, start - prompt) : end - prompt]
        return np.concatenate((known, np.array(sampled, dtype=np.int32)))


class SlotCounters:
    """Counters of every running request, by slot, so that a step of any size costs a few array operations.

    Drafts in flight count as accepted until the answer says how many were: `known`, `in_flight` and `computed` are
    upper bounds, exact while nothing is in flight. A slot is written when it is given away; what it holds after its
    request ended is read only to end its last step.
    """

    def __init__(self, slots: int, *, exact: bool = False) -> None:
        self.exact = exact  # whether rows of prompts and rows behind them are computed apart
        self.running: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)  # false from its end or preemption on
        self.prompt = np.zeros(slots, dtype=np.int32)  # prompt tokens
        self.known = np.zeros(slots, dtype=np.int32)  # prompt and sampled tokens, those in flight included
        self.in_flight = np.zeros(slots, dtype=np.int32)  # sampled, not yet seen
        self.computed = np.zeros(slots, dtype=np.int32)  # positions scheduled so far
        self.most_cached = np.zeros(slots, dtype=np.int32)  # positions that are ever computed
        self.covered = np.zeros(slots, dtype=np.int32)  # tokens that its pages are reserved for
        self.last_token = np.zeros(slots, dtype=np.int32)  # the last known token that is not in flight
        self.held_bytes = np.zeros(slots, dtype=np.int64)  # pool bytes of its pages
        self.last_step = np.zeros(slots, dtype=np.int64)  # newest step it is in; -1: none yet
        self.constrained: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)  # its tokens are masked
        self.dear: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)  # by masks that take long, of its latest step
        self.scored: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)  # its prompt's log probabilities are asked for
        self.spanned: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)  # rows of its prompt begin from embeddings
        self.adapter = np.full(slots, NO_SLOT, dtype=np.int32)  # slot of its adapter
        self.slice = np.zeros(slots, dtype=np.int32)  # most rows of a step, of a trial's

    def enter(self, running: RunningRequest, most_cached_tokens: int, computed: int) -> None:
        """Admit a request, whose pages are reserved, behind the positions that others have `computed`."""
        slot, request = running.slot, running.request
        self.running[slot] = True
        self.prompt[slot] = len(request.prompt_token_ids)
        self.known[slot] = request.num_tokens
        self.in_flight[slot] = 0
        self.computed[slot] = computed
        self.most_cached[slot] = most_cached_tokens
        self.last_token[slot] = (request.output_token_ids or request.prompt_token_ids)[-1]
        self.last_step[slot] = -1
        self.constrained[slot] = request.constraint is not None
        self.dear[slot] = False
        self.spanned[slot] = bool(request.spans)
        self.slice[slot] = request.num_tokens if request.trial is None else request.trial.slice_tokens
        # With the first token they went out.
        self.scored[slot] = request.sampling.prompt_logprobs is not None and not request.output_token_ids
        self.note_pages(running)

    def note_pages(self, running: RunningRequest) -> None:
        """Its table has reserved more pages."""
        self.covered[running.slot] = running.table.covered_tokens
        self.held_bytes[running.slot] = running.table.held_bytes

    def remaining(self, slots: Int32Array) -> Int32Array:
        """Positions that can be scheduled now; 0 once the last token is in flight."""
        left: Int32Array = np.minimum(self.known[slots], self.most_cached[slots]) - self.computed[slots]
        return left

    def room_for_drafts(self, slots: Int32Array) -> Int32Array:
        """Positions behind their last tokens that are ever computed, none where masks behind drafts are dear."""
        room: Int32Array = np.where(self.dear[slots], 0, self.most_cached[slots] - self.known[slots])
        return room

    def least_computed(self, slot: int) -> int:
        """Positions that are computed if no draft in flight is accepted. Asked while at most one step is in flight."""
        return int(self.computed[slot] - max(self.in_flight[slot] - 1, 0))

    def in_prompt(self, slots: Int32Array) -> NDArray[np.bool_]:
        """Whose next row is one of its prompt."""
        in_prompt: NDArray[np.bool_] = self.computed[slots] < self.prompt[slots]
        return in_prompt

    def by_kind(self, slots: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Of `slots`, those that decode, with one row to compute, and those that have more: prompts, and what is
        computed again. Where rows are to be `exact`, the last one of a prompt is no decode."""
        remaining = self.remaining(slots)
        decoding = remaining == 1
        if self.exact:
            decoding &= ~self.in_prompt(slots)
        return slots[decoding], slots[~decoding & (remaining > 0)]

    def prompt_rows(self, slots: Int32Array, *, most_drafts: int) -> Int32Array:
        """Rows that each may have in a step, all that remain. Where they are to be `exact`, those up to the end of the
        prompt; behind it as many as a decode may have, since they are computed as they were then."""
        remaining: Int32Array = np.minimum(self.remaining(slots), self.slice[slots])
        if not self.exact:
            return remaining
        left = self.prompt[slots] - self.computed[slots]
        rows: Int32Array = np.minimum(remaining, np.where(left > 0, left, 1 + most_drafts)).astype(np.int32)
        return rows

    def advance(self, slots: Int32Array, ends: Int32Array, drawn: Int32Array, step: int) -> None:
        """`step` computes the positions below `ends`, and draws so many tokens of each."""
        self.computed[slots] = ends
        # The drafts among the rows of a segment were not known before; the token behind the last was not either.
        self.known[slots] += drawn
        self.in_flight[slots] += drawn
        self.last_step[slots] = step

    def answer(self, slots: Int32Array, drawn: Int32Array, counts: Int32Array) -> None:
        """Of the tokens that a step drew for each, `counts` were accepted."""
        self.in_flight[slots] -= drawn
        self.known[slots] -= drawn - counts
        self.computed[slots] -= drawn - counts


class RunningRequests:
    """Who holds the device's slots: running requests, and ended ones that still have a step in flight."""

    def __init__(self, slots: int, *, exact: bool = False) -> None:
        self.counters = SlotCounters(slots, exact=exact)
        self.by_id: dict[str, RunningRequest] = {}  # oldest first
        self.retiring: list[RunningRequest] = []  # ended, with a step in flight
        self._holders: list[RunningRequest | None] = [None] * slots  # running and retiring
        self._free_slots = list(range(slots))  # a heap
        self._order: Int32Array | None = None  # of by_id; None when it has changed

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def free_slot(self) -> int | None:
        """The slot that the next request gets; None while all are taken."""
        return self._free_slots[0] if self._free_slots else None

    @property
    def free_slots(self) -> list[int]:
        """Those that nobody holds."""
        return list(self._free_slots)

    def slots(self) -> Int32Array:
        """Slots of the running requests, oldest first."""
        if self._order is None:
            self._order = np.array([running.slot for running in self.by_id.values()], dtype=np.int32)
        return self._order

    def adapters(self, slots: Int32Array) -> Iterator[str]:
        """Digests of the adapters of those that have these slots; empty where there is none, and of one that has ended
        and waits for its steps."""
        return ("" if each.ended else each.request.adapter for each in self.holders(slots))

    def holders(self, slots: Int32Array) -> list[RunningRequest]:
        """Who holds these slots. A slot is held until its last step is answered, so a step's slots name them."""
        held = [self._holders[slot] for slot in slots.tolist()]
        assert None not in held, f"of slots {slots}, some are free"
        return cast(list[RunningRequest], held)

    def with_masks(self, slots: Int32Array) -> Int32Array:
        """Decodes without those whose dear mask is being computed: they sit out, and nobody waits for it. Others that
        are dear take no drafts along, behind which masks would be computed while all wait."""
        counters = self.counters
        constrained = counters.constrained[slots]
        if not constrained.any():
            return slots
        ready, in_flight = np.ones(len(slots), dtype=np.bool_), counters.in_flight[slots]
        for index, running in zip(np.flatnonzero(constrained), self.holders(slots[constrained]), strict=True):
            constraint = running.request.constraint
            counters.dear[running.slot] = constraint is not None and constraint.dear
            if constraint is not None and constraint.dear:
                ready[index] = not in_flight[index] and constraint.ready()
        return slots[ready]

    def drafts(self, decodes: Int32Array, *, drafting: Drafting, spare: int, arena: PageArena) -> Int32Array:
        """How many drafts each decode takes along: what pays, as far as the step has room for them, `spare` rows; what
        the request may still say; and what pages cover that no other request has to give up."""
        counters = self.counters
        if not drafting.most or not len(decodes):
            return np.zeros_like(decodes)
        context = float(counters.computed[decodes].mean())
        drafts = drafting.choose(decodes, counters.room_for_drafts(decodes), context=context)
        drafts = np.clip(min(spare, STEP_DRAFTS) - (np.cumsum(drafts) - drafts), 0, drafts).astype(np.int32)
        ends = counters.computed[decodes] + 1 + drafts
        due = np.flatnonzero(ends > counters.covered[decodes])
        for running, end in zip(self.holders(decodes[due]), ends[due].tolist(), strict=True):
            if running.table.bytes_to_reserve(end) <= arena.available_bytes:
                running.table.reserve(end)
                start = int(counters.computed[running.slot])
                running.table.write(start, end, least=counters.least_computed(running.slot))
                counters.note_pages(running)
        covered: Int32Array = np.minimum(drafts, counters.covered[decodes] - counters.computed[decodes] - 1)
        return covered

    def leave_room(self, shares: Int32Array, rows: int, drafting: Drafting) -> None:
        """Of prompts that go on by `shares` beside so many `rows` of decodes: those of no more rows than a decode may
        have are computed as one. Where a step has no room for more of such rows they wait for the next, in place."""
        if drafting.most:
            few = np.where(shares <= 1 + drafting.most, shares, 0)
            room = Speculation(drafting.most).step_rows(self.counters.running.size) - rows
            shares[(few > 0) & (np.cumsum(few) > room)] = 0

    def drafts_to_ask(self, slots: Int32Array, drawn: Int32Array, *, drafting: Drafting) -> Asked:
        """How many drafts a step makes behind itself, of requests that it draws so many tokens of, for the next one."""
        if not drafting.most or not len(slots):
            return NOTHING_ASKED
        room = self.counters.room_for_drafts(slots) - drawn
        return drafting.ask(slots, room, context=float(self.counters.computed[slots].mean()))

    def segments(
        self, decodes: Int32Array, drafts: Int32Array, prefills: Int32Array, shares: Int32Array, *, most_drafts: int
    ) -> Segments:
        """Of decodes with their drafts, and of prompts that go on by `shares` rows: those of few rows first, or where
        rows are to be exact those behind a prompt."""
        counters = self.counters
        in_flight = counters.in_flight[decodes] > 0
        token_ids = np.where(in_flight, np.int32(IN_FLIGHT), counters.last_token[decodes])
        slots, lengths, spanned = decodes, 1 + drafts, False
        if most_drafts:
            owners, offsets = row_places(lengths)
            token_ids = np.where(offsets > 0, IN_FLIGHT - offsets, token_ids[owners])
        if len(prefills):
            later = counters.in_prompt(prefills) if counters.exact else shares > 1 + most_drafts
            if spanned := bool(counters.spanned[prefills].any()):
                ends = counters.computed[prefills] + shares
                requests = [each.request for each in self.holders(prefills)]
                later = later | has_embedded_rows(requests, ends - shares, ends)
            order = np.argsort(later, kind="stable")
            prefills, shares = prefills[order], shares[order]
            slots, lengths = np.concatenate((decodes, prefills)), np.concatenate((lengths, shares))
            starts = counters.computed[prefills]
            chunks = zip(self.holders(prefills), starts.tolist(), (starts + shares).tolist(), strict=True)
            token_ids = np.concatenate((token_ids, *(running.token_ids(start, end) for running, start, end in chunks)))
        starts = counters.computed[slots]
        drawn = (starts + lengths == counters.known[slots]).astype(np.int32)
        drawn[: len(decodes)] = 1 + drafts
        given = targets = _NOTHING
        if len(prefills) and counters.scored[prefills].any():
            scored, targets = self.scored(prefills, shares)
            given = np.concatenate((np.zeros(len(decodes), dtype=np.int32), scored))
        generated = int(np.count_nonzero(~counters.in_prompt(slots))) if counters.exact else BY_LENGTH
        spans = NO_SPANS
        if spanned:
            spans = span_rows([each.request for each in self.holders(slots)], starts, starts + lengths)
        trial = self.holders(slots)[0].request.trial if len(slots) == 1 else None
        return Segments(slots, starts, lengths, token_ids, drawn, given, targets, generated, spans, trial)

    def scored(self, prefills: Int32Array, lengths: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Of prompts that go on by `lengths` rows [P]: how many of these, the first ones, have their next token scored,
        and those tokens."""
        counters = self.counters
        left = counters.prompt[prefills] - 1 - counters.computed[prefills]
        given = np.where(counters.scored[prefills], np.minimum(lengths, left), 0).astype(np.int32)
        which = np.flatnonzero(given)
        firsts = counters.computed[prefills] + 1
        chunks = zip(self.holders(prefills[which]), firsts[which].tolist(), given[which].tolist(), strict=True)
        targets = [running.token_ids(first, first + count) for running, first, count in chunks]
        return given, np.concatenate((given[:0], *targets))

    def constraints(
        self, batch: ScheduledBatch, drafting: Drafting
    ) -> list[tuple[TokenConstraint | None, tuple[int, ...]]]:
        """Of the constrained requests of a step in flight, in order: the constraint, None for one that has ended
        since, and the drafts that its segment has. Asked once the step before is answered."""
        drawing = np.flatnonzero(batch.drawn)[batch.constrained]
        rows = zip(self.holders(batch.slots[drawing]), batch.drawn[drawing].tolist(), strict=True)
        return [
            (None if running.ended else running.request.constraint, drafting.drafts_of(running.slot, drawn - 1))
            for running, drawn in rows
        ]

    def keep_prompt_logprobs(self, sampled: SampledTokens) -> None:
        """Keep what follows the scores a request has: a recomputed one, or one that has ended, is told again."""
        for slot, (first, scores) in sampled.prompt_logprobs.items():
            (running,) = self.holders(np.array([slot], dtype=np.int32))
            kept = running.request.prompt_logprobs
            known = 1 + sum(map(len, kept))  # the first token has no score
            assert first <= known, f"prompt scores of positions {known} to {first} are missing"
            if new := scores[known - first :]:
                kept.append(new)

    def enter(self, running: RunningRequest, most_cached_tokens: int, computed: int = 0) -> None:
        """Admit a request to `free_slot`, with its pages reserved, behind the positions that others have `computed`."""
        assert running.slot == self.free_slot, f"slot {running.slot} is not next"
        self._holders[heapq.heappop(self._free_slots)] = running
        self.by_id[running.request.request_id] = running
        self._order = None
        self.counters.enter(running, most_cached_tokens, computed)

    def end(self, running: RunningRequest) -> None:
        """End a request; `return_pages` takes back slot and pages."""
        running.ended = True
        self.counters.running[running.slot] = False
        del self.by_id[running.request.request_id]
        self._order = None
        self.retiring.append(running)

    def return_pages(self, answered: int) -> None:
        """Take back slot and pages of ended requests whose last step was step `answered` or earlier."""
        if not self.retiring:
            return
        last_step = self.counters.last_step
        for running in [running for running in self.retiring if last_step[running.slot] <= answered]:
            self.retiring.remove(running)
            running.table.release()
            self._holders[running.slot] = None
            heapq.heappush(self._free_slots, running.slot)

    def check_integrity(self, held_bytes: int, page_bytes: Mapping[LayerKind, int]) -> None:
        """Raise AssertionError unless the tables hold `held_bytes` in pages of `page_bytes`, each slot has one owner,
        and counters agree."""
        holders = [*self.by_id.values(), *self.retiring]
        pages = {page for running in holders for page in running.table.pages}
        held = sum(page_bytes[page.kind] for page in pages)
        assert held == held_bytes, f"tables hold {held} bytes, the arena {held_bytes}"
        taken = [running.slot for running in holders]
        assert sorted(taken + self._free_slots) == list(range(len(self._holders))), f"slots {taken} are taken"
        counters = self.counters
        for running in holders:
            slot, request = running.slot, running.request
            assert self._holders[slot] is running, f"slot {slot} is another's"
            assert counters.running[slot] == (not running.ended), f"slot {slot}: ended is {running.ended}"
            assert counters.held_bytes[slot] == running.table.held_bytes, f"slot {slot}: held bytes differ"
            if not running.ended:
                seen = counters.known[slot] - counters.in_flight[slot]
                assert seen == request.num_tokens, f"slot {slot}: {seen} known tokens of {request.num_tokens}"
                assert counters.computed[slot] <= counters.covered[slot], f"slot {slot}: computed past its pages"
