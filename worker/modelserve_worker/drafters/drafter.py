"""The interface of a drafter, which proposes on the device the tokens that may follow, and of what it reads there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.attention import AttentionBackend


class CacheReader(AttentionBackend, Protocol):
    """Attention of layers that have queries only over rows that the target has stored; it writes none."""

    def begin(self, slots: Tensor, last: Tensor) -> None:
        """Until the next call a row of each layer belongs to the request in its slot and reads what its target reads at
        position `last`: that row, and of sliding layers the window before it. int32 [S]; below 0: padding, of which
        nothing is said. Both are written before the embedding is launched."""
        ...


ReaderOf = Callable[[Sequence[LayerKind]], CacheReader]
"""A reader for layers of these kinds, by their numbers. Each reads the target's last cache of its kind."""


class Accepted(NamedTuple):
    """What a step has made certain, of its S segments that draw; on the device, int32 unless said otherwise."""

    slots: Tensor  # [S]
    tokens: Tensor  # [S]: the last token that counts, of each
    positions: Tensor  # [S]: its position
    counts: Tensor  # [S]: how many tokens count; they follow each other
    firsts: Tensor  # [S]: the first of them among
    sampled: Tensor  # int64 [N]; one below 0 is no token, and the last that counts
    hidden: Tensor  # [S, H]: what the target computed, after its final norm, of the rows `tokens` were drawn from


def accepted_of(
    step: Step, sampled: Tensor, counts: Tensor, hidden: Tensor, slot_tokens: Tensor, slot_positions: Tensor
) -> Accepted:
    """Of a step's draws, of whose `sampled` tokens int64 [N] `counts` int32 [S] count: from the hidden states [T, H] of
    its rows, and what it left of each slot."""
    assert step.draws is not None
    slots, firsts = step.draws.slots, step.draws.firsts
    drawn_from = firsts + counts - 1
    rows = drawn_from if step.sampled_rows is None else step.sampled_rows[drawn_from]
    return Accepted(slots, slot_tokens[slots, 0], slot_positions[slots], counts, firsts, sampled, hidden[rows])


class Proposal(NamedTuple):
    """What may follow, of S segments: a drafter may have less to say than it is asked for."""

    tokens: Tensor  # int32 [S, num_tokens], ids of the vocabulary; behind `counts` any of them
    counts: Tensor  # int32 [S], 0 to num_tokens


class Drafter(Protocol):
    """Proposes up to `num_tokens` tokens at a time. With several ranks each has one, and all propose the same."""

    num_tokens: int
    asked_tokens: int = 0  # of these, what takes a time that is worth asking for
    speaks_unasked: bool = True  # it proposes, or has to hear what was accepted, behind every step

    @property
    def weights_bytes(self) -> int:
        """Of a model of its own."""
        return 0

    def attach(self, reader_of: ReaderOf) -> None:
        """The target's caches are there, or have been replaced: readers and graphs of those before are gone."""

    def capture(self, pool: Any) -> None:
        """Capture what can be, with temporaries in the pool of the target's graphs. All its kernels have run."""

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots. Ordered on the current stream; waits for nothing."""
        ...

    def propose(self, accepted: Accepted, asked: int) -> Proposal:
        """What may follow the last token of each; of what takes time, `asked` tokens. The target has stored all rows
        before it. Ordered on the current stream; waits for nothing."""
        ...


class LongestProposal(Drafter):
    """Several drafters of which the one with most to say is heard, of each request; of equal ones the first."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.num_tokens = max(drafter.num_tokens for drafter in drafters)
        self.asked_tokens = max(drafter.asked_tokens for drafter in drafters)
        self.speaks_unasked = any(drafter.speaks_unasked for drafter in drafters)

    @property
    def weights_bytes(self) -> int:
        return sum(drafter.weights_bytes for drafter in self._drafters)

    def attach(self, reader_of: ReaderOf) -> None:
        for drafter in self._drafters:
            drafter.attach(reader_of)

    def capture(self, pool: Any) -> None:
        for drafter in self._drafters:
            drafter.capture(pool)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        for drafter in self._drafters:
            drafter.admit(admitted)

    def propose(self, accepted: Accepted, asked: int) -> Proposal:
        first, *others = (self._padded(drafter.propose(accepted, asked)) for drafter in self._drafters)
        tokens, counts = first
        for other in others:
            longer = other.counts > counts
            tokens = torch.where(longer[:, None], other.tokens, tokens)
            counts = torch.where(longer, other.counts, counts)
        return Proposal(tokens, counts)

    def _padded(self, proposal: Proposal) -> Proposal:
        missing = self.num_tokens - proposal.tokens.shape[1]
        return Proposal(torch.nn.functional.pad(proposal.tokens, (0, missing)), proposal.counts)
