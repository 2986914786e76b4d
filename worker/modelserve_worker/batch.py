"""What the scheduler hands to the model runner for one step, and what comes back. Torch-free and picklable.

Rules of one step, in order:
1. `page_moves` are copied in the order given (whole pages, on the device's stream), before anything else reads or
   writes pages.
2. Every layer attends, then writes. Global layers may write the chunk's rows first, since a global page is never reused
   within a step. Sliding layers read the old window through `sliding_read` and the chunk's own rows from the step's
   projections; only after its attention (for a KV producer: after the attention of the last layer that shares it) does
   a sliding layer write the rows that outlive the step through `sliding_write`. The same physical page may appear in
   `sliding_read` for an expired logical page and in `sliding_write` for a new one, of the same request.
3. Requests with `samples` get one token from the logits of their chunk's last position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from modelserve.architecture import LayerKind
from modelserve_worker.request import SampledToken, SamplingParams

IN_FLIGHT = -1  # in ScheduledRequest.token_ids: the token this slot sampled in the step before, still on the device


@dataclass(frozen=True, slots=True)
class PageMove:
    """Copy page `source` onto the free page `destination` of the same kind, all layers."""

    kind: LayerKind
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class SlidingTable:
    """Physical pages of the logical pages `first`, `first`+1, ...; logical page i holds positions [32i, 32i+32)."""

    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: positions [start, start + len(token_ids))."""

    request_id: str
    slot: int  # row of the device's per-request state (last token, penalty counts), fixed while the request runs
    sampling: SamplingParams
    start: int
    token_ids: tuple[int, ...]  # IN_FLIGHT only as the single token of a decode
    global_pages: tuple[int, ...]  # page i holds positions [64i, 64i+64); covers [0, end)
    sliding_read: SlidingTable  # covers [max(0, start - W + 1), start); rows from earlier steps
    sliding_write: SlidingTable  # covers [max(0, end - W + 1), end); rows >= start in it are written by this step
    samples: bool
    num_output_tokens: int  # tokens sampled before this step's (counting one in flight); the key position is start+len
    first_in_slot: bool  # the slot was given to this request (again, after preemption): rebuild its penalty state
    prompt_token_ids: tuple[int, ...] = ()  # set when first_in_slot
    output_token_ids: tuple[int, ...] = ()  # set when first_in_slot

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    step: int
    requests: tuple[ScheduledRequest, ...]  # decodes (one token each) first, then prefill chunks
    page_moves: tuple[PageMove, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    step: int
    tokens: dict[str, SampledToken]  # by request id, for every request with `samples`


class PendingStep(Protocol):
    """A step that was launched. `result` waits for the device and may raise what the step failed with."""

    def done(self) -> bool:
        """True when `result` will not wait: the device is idle, or the step has failed."""
        ...

    def result(self) -> SampledTokens: ...


class ModelRunner(Protocol):
    """The door between the torch-free engine loop and the device."""

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step. On a GPU this returns before the step is done; at most two steps are in flight."""
        ...

    def shutdown(self) -> None:
        """Release the device and end the other ranks."""
        ...
