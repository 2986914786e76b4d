"""What the scheduler hands to the model runner for one step, and what comes back. Torch-free and picklable.

A step is a table of segments, some consecutive positions of one request each: arrays over them, never an object per
request. What a request *is* (its sampling parameters, its known tokens) travels once, when it is given a slot; its
pages travel as updates of the device's block tables.

Rules of one step, in order:
1. `admitted` requests take their slots, and their first position may lie behind rows that another request computed;
   then `page_moves` are copied in the order given (whole pages, on the device's stream); then `table_updates` are
   written into the block tables. Steps launched before still see the old tables, because all of it is ordered on one
   stream.
2. Block tables. Entry i of a slot's global table is the page of positions [64 i, 64 i + 64). Entry i of its sliding
   table is the page of every logical sliding page l (positions [32 l, 32 l + 32)) with l mod R = i, where
   R = CacheGeometry.sliding_table_entries: any window of W rows touches at most R logical pages, so the entry is
   unambiguous. Behind the global pages of the longest context a global table has the ring of a drafter's window layers
   (modelserve/sizing/draft_pages.py).
3. Every layer attends, then writes. Global layers may write the step's rows first, since a global page is never reused
   within a step. Sliding layers read positions [start - W + 1, start) from pages and the step's own rows from the
   step's projections; after its attention (for a KV producer: after the attention of the last layer that shares it) a
   sliding layer writes the rows that outlive the step, from `stored_from` on. A written row may overwrite an expired
   one of the same request. A step of at most `commit_first_tokens` tokens of a request overwrites no row that it reads,
   so there the order does not matter.
   A chunk's rows before its own window that a prefix cache wants, from `spare_from` on, are written in the same way
   through the sliding table of another slot, `spare_slots`, that nobody holds in this step.
   A drafter's rows are written behind everything that the step reads of them before: those of full layers all, those
   of window layers from `draft_stored_from` on. What it drafts behind the step reads them from pages.
4. A segment may end with drafts, tokens that are proposed and not known. A token is drawn of its last known row and of
   each draft's, as it would be if all drafts before were right; random numbers are keyed by position, so the first
   draft that is not the token drawn before it ends what counts. What its row and later ones wrote to the cache lies
   behind the request's end and is written again before it is read.
5. The last `sampled` rows of a segment have logits. A token is drawn of each, but of the first `given` of them, whose
   next token is known: that one is scored (a prompt's log probabilities). Where a step has `constrained` requests,
   sampling waits for their token masks (`PendingStep.constrain`): which tokens may follow depends on the token that
   the step before sampled, which the host has not seen when this one is launched.
6. Rows of `spans` begin from embeddings that came with their request. The segments that have any stand behind those of
   few rows, and none of these parts is cut where its rows see each other (embedded_spans.py).
7. `adapter_placings` come before any row of the step, behind those of steps before: a slot is given to another adapter
   once nobody in flight reads it.
8. `stores` and `loads` are copied behind the `page_moves` of their step and beside what it computes, each in the order
   of the steps that brought them. What they read has been written by earlier steps. They end at any time
   (`ModelRunner.host_progress`); no step reads what is being loaded, and one that writes or moves it says so
   (`loads_awaited`). `checks` look at pages behind the moves, too, before the step writes. A step that only copies or
   checks has no segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from modelserve.model.architecture import LayerKind
from modelserve.sizing.draft_pages import DraftPages
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.embedded_spans import NO_SPANS, EmbeddedSpan, SpanRows
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import CacheTrial, PromptLogprobs, SamplingParams, TokenLogprobs

IN_FLIGHT = -1  # in ScheduledBatch.token_ids: the token this slot sampled last, on the device; -1 - j: its j-th draft
NOT_A_NUMBER = -1  # in SampledTokens.token_ids: the logits of this request held a NaN, nothing was sampled

NOT_IN_A_RING = -1

BY_LENGTH = -1  # in ScheduledBatch.generated: segments of few rows are attended to as decodes, whatever they are

Int32Array = NDArray[np.int32]
Positions = TypeVar("Positions", int, Int32Array)


def _nothing() -> Int32Array:
    return np.zeros(0, dtype=np.int32)


def commit_first_tokens(geometry: CacheGeometry) -> int:
    """Most tokens of one request and step whose sliding rows may be written before they are attended.

    Row p overwrites row p - R * page. The oldest row that a step of n tokens reads is start - W + 1, the newest it
    writes start + n - 1, so nothing that is read is lost while n <= R * page - W + 1.
    """
    page = geometry.sliding_page.page_tokens
    return geometry.sliding_table_entries * page - geometry.window + 1


def stored_from(geometry: CacheGeometry, end: Positions) -> Positions:
    """First position whose sliding rows a chunk stores in the pages of its slot, by its end; of one or of many.

    The window of its last row, whose attention reads it from pages where others are not computed, and what else is in
    the first of these pages, so that every page holds all its rows.
    """
    first, page = end - geometry.window, geometry.sliding_page.page_tokens
    return first * (first > 0) // page * page


def spare_from(geometry: CacheGeometry, end: Positions) -> Positions:
    """First position whose sliding rows a chunk with a spare slot stores in that one's pages, up to `stored_from`.

    With them a request may resume at the chunk's end and at each of the positions of a global page before it. Never
    more pages than a table has entries.
    """
    page, most = geometry.sliding_page.page_tokens, geometry.sliding_table_entries
    first = end - (geometry.window + geometry.global_page.page_tokens - 1)
    first = first * (first > 0) // page * page
    beyond = stored_from(geometry, end) - most * page - first  # rows that find no entry
    return first + beyond * (beyond > 0)


def draft_stored_from(draft: DraftPages, end: Positions) -> Positions:
    """First position whose rows of a drafter's window layers a chunk stores in its ring, by its end; of one or of many.

    No two of them have one place, and none takes that of a row which is still needed.
    """
    first = end - draft.kept_tokens
    return first * (first > 0)


@dataclass(frozen=True, slots=True)
class PageMove:
    """Copy page `source` onto the free page `destination` of the same kind, all layers."""

    kind: LayerKind
    source: int
    destination: int


class HostCopy(NamedTuple):
    """Copy page `page` to `place` in host memory (host_pages.py), or back, all layers."""

    kind: LayerKind
    page: int
    place: int


class PageCheck(NamedTuple):
    """Say whether one of `rows` rows of page `page` is not finite, in any layer of its kind: of the first ones. Of a
    page in a drafter's ring: of those from `ring_row` on, and behind the page's last one from its first one on."""

    kind: LayerKind
    page: int
    rows: int
    ring_row: int = NOT_IN_A_RING


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """Entries of one kind's block table to write: table[slots[i], indices[i]] = pages[i]; each int32 [N].

    No (slot, index) comes twice. Entries that no update ever named hold anything and are never read.
    """

    slots: Int32Array
    indices: Int32Array
    pages: Int32Array


NO_UPDATES = TableUpdates(_nothing(), _nothing(), _nothing())


class AdapterPlacing(NamedTuple):
    """Copy the adapter of this digest, which is read from `directory` where it is not in host memory, into a slot."""

    slot: int
    digest: str
    directory: str


class AskedDrafter(NamedTuple):
    """A drafter that proposes only where a step asks for it, as that takes time."""

    most: int  # tokens at a time
    at_once: bool = False  # all of them take the time of one


class Asked(NamedTuple):
    """What a step is to make behind itself: so many drafts of each request, by one of the drafters that are asked."""

    drafts: int
    drafter: int = 0


NOTHING_ASKED = Asked(0)


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that was given a slot, for the first time or again after preemption. Sent at each admission."""

    slot: int
    request_id: str
    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # sampled before it was preempted; the penalty state is rebuilt from both
    banned_token_ids: tuple[int, ...] = ()  # not to be drawn before `sampling.min_tokens` tokens
    shares_rows_as: str | None = None  # requests of one name read each other's rows where their tokens are the same
    predicted_token_ids: Sequence[int] = ()  # of the answer, as its client, or others' answers, have it
    spans: tuple[EmbeddedSpan, ...] = ()  # of the prompt: what `ScheduledBatch.spans` has numbers of


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step of R segments and T tokens: segments of few rows first, then prefill chunks, each in order."""

    step: int
    slots: Int32Array  # [R] row of the device's per-request state, fixed while it runs; none comes twice
    starts: Int32Array  # [R] position of the first row
    lengths: Int32Array  # [R] rows, at least 1; segment i computes positions [starts[i], starts[i] + lengths[i])
    sampled: Int32Array  # [R] how many of the last rows have logits
    output_counts: Int32Array  # [R] tokens sampled before this step's, those in flight and before preemptions included
    token_ids: Int32Array  # [T] segments back to back; below 0, on the device: IN_FLIGHT, and drafts
    admitted: tuple[AdmittedRequest, ...]
    page_moves: tuple[PageMove, ...]
    global_updates: TableUpdates
    sliding_updates: TableUpdates
    given: Int32Array = field(default_factory=_nothing)  # [R] how many of the sampled rows are scored; empty: none
    targets: Int32Array = field(default_factory=_nothing)  # [sum of given] the tokens that follow those rows
    constrained: Int32Array = field(default_factory=_nothing)  # which of the requests that draw, by their order
    spare_slots: Int32Array = field(default_factory=_nothing)  # [R], -1 where there is none; [0] where nobody has one
    stores: tuple[HostCopy, ...] = ()  # to host memory, and
    loads: tuple[HostCopy, ...] = ()  # from there
    loads_awaited: int = 0  # those of steps up to this one have ended before this step touches any page
    checks: tuple[PageCheck, ...] = ()  # behind the `page_moves`, of what earlier steps have written
    generated: int = BY_LENGTH  # profile exact: so many segments, the first ones, are of rows behind the prompt
    asked: Asked = NOTHING_ASKED  # of a drafter that makes none unasked
    spans: SpanRows = NO_SPANS  # rows that begin from embeddings; their tokens are placeholders
    trial: CacheTrial | None = None  # of the one request that it has
    adapters: Int32Array = field(default_factory=_nothing)  # [R] slots of adapters, -1: none; empty: nobody has one
    adapter_placings: tuple[AdapterPlacing, ...] = ()  # before the step's rows
    adapters_gone: tuple[str, ...] = ()  # digests that host memory need not have any more, behind the placings

    @property
    def num_requests(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def drawn(self) -> Int32Array:
        """How many of each segment's last rows get a token [R]."""
        return self.sampled - self.given if len(self.given) else self.sampled

    @property
    def kept(self) -> Int32Array:
        """How many of each segment's last rows somebody reads once all rows are in the cache [R]."""
        return np.maximum(self.sampled, 1)

    def decodes(self, most_rows: int) -> int:
        """How many segments, the first ones, are attended to as decodes, which have at most `most_rows` rows and none
        that begin from embeddings."""
        if self.generated != BY_LENGTH:
            return self.generated
        longer = np.flatnonzero(self.lengths > most_rows)
        first = int(longer[0]) if len(longer) else self.num_requests
        return min(first, int(self.spans.segments[0])) if len(self.spans.segments) else first

    def last_visible(self) -> Int32Array:
        """The last position that each row sees in sliding layers, [T]."""
        segments, offsets = row_places(self.lengths)
        visible = self.starts[segments] + offsets
        firsts = np.cumsum(self.lengths) - self.lengths - self.starts  # of each segment: the row of position 0
        for segment, _, start, length, last in self.spans.rows():
            if last >= 0:
                first = int(firsts[segment]) + start
                visible[first : first + length] = last
        return visible

    def narrowed(self) -> ScheduledBatch:
        """The `kept` rows as a step of their own, all of whose rows have been stored."""
        kept = self.kept
        ends, (_, offsets) = np.cumsum(self.lengths), row_places(kept)
        return replace(
            self, starts=self.starts + self.lengths - kept, lengths=kept,
            token_ids=self.token_ids[np.repeat(ends - kept, kept) + offsets],
            admitted=(), page_moves=(), global_updates=NO_UPDATES, sliding_updates=NO_UPDATES, spare_slots=_nothing(),
            stores=(), loads=(), loads_awaited=0, checks=(), asked=NOTHING_ASKED, spans=NO_SPANS,
            adapter_placings=(), adapters_gone=(),
        )  # fmt: skip


def row_places(counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Of rows that lie back to back, `counts` [R] of each segment: the segment of each, and its number there."""
    if int(counts.max(initial=0)) <= 1:  # nearly always
        segments = np.flatnonzero(counts).astype(np.int32)
        return segments, np.zeros_like(segments)
    segments = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = (np.cumsum(counts) - counts).astype(np.int32)
    return segments, np.arange(len(segments), dtype=np.int32) - firsts[segments]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Results of one step, for the S requests that draw, in batch order."""

    step: int
    token_ids: Int32Array  # [N] request by request; NOT_A_NUMBER ends that request and no other
    logprobs: dict[int, TokenLogprobs]  # by index into token_ids, for those that asked
    counts: Int32Array = field(default_factory=_nothing)  # [S] tokens of each: accepted drafts and one more; empty: one
    drafts: Int32Array = field(default_factory=_nothing)  # [S, k] what is proposed to follow; empty: nothing
    proposed: Int32Array = field(default_factory=_nothing)  # [S] how many of these; behind them anything
    prompt_logprobs: dict[int, tuple[int, PromptLogprobs]] = field(default_factory=dict)
    """By slot, for those that asked: the position of the first prompt token that the step scored, and its scores."""
    unsound: tuple[int, ...] = ()  # which of the step's `checks` found a row that is not finite, on any rank


class PendingStep(Protocol):
    """A step that was launched. `result` waits for the device and may raise what the step failed with."""

    def constrain(self, masks: Int32Array) -> PendingStep:
        """Launch the sampling of a step with C `constrained` rows, once; the step to take the result of.

        masks int32 [C, ceil(vocab / 32)], a row for each token that they draw; bit i of word w is set where token
        32 w + i may be sampled.
        """
        ...

    def result(self) -> SampledTokens: ...


class FailedStep:
    """A step that could not be launched: it fails in its turn, after the steps launched before it.

    `before_collectives`: every rank of the group failed it in the same way.
    """

    def __init__(self, error: Exception, *, before_collectives: bool = False) -> None:
        self._error = error
        self.before_collectives = before_collectives

    def constrain(self, masks: Int32Array) -> PendingStep:  # noqa: ARG002
        return self

    def result(self) -> SampledTokens:
        raise self._error


class ModelRunner(Protocol):
    """Is what the torch-free engine loop sees of the device."""

    launches_ahead: bool
    """True when `execute` returns before the step is done (a GPU), so that the next step is worth launching early."""

    draft_tokens: int
    """How many drafts a segment may end with, k: what the drafter proposes at a time; 0 without one."""

    asked_drafts: Sequence[AskedDrafter]
    """What proposes these only where a step asks for it."""

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step; at most two are in flight. After a step that failed the block tables are unknown: the next
        batch's updates must name every entry of every slot that it or a later batch uses."""
        ...

    def host_progress(self) -> HostProgress:
        """How far the copies to and from host memory have come; asked where the scheduler sends any. Raises EngineDead
        as `check` does."""
        ...

    def check(self) -> None:
        """Raise EngineDead when the device or a rank is known to be gone. Asked while there is no step."""
        ...

    def shutdown(self) -> None:
        """Release the device and end the other ranks."""
        ...
