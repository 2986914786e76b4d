"""The interface of a drafter, which proposes on the device the tokens that may follow, and of what it reads there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import NOTHING_ASKED, AdmittedRequest, Asked, AskedDrafter
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.attention import AttentionBackend


class DraftLayers(NamedTuple):
    """Of a drafter that keeps K and V of its own, layer by layer."""

    windows: tuple[int | None, ...]  # tokens before a block that it sees; None: all
    causal: tuple[bool, ...]  # whether a row of a block sees those behind it
    scale: float  # of scores


class CacheReader(AttentionBackend, Protocol):
    """Attention of layers that have queries only over rows that the target has stored; it writes none."""

    def begin(self, slots: Tensor, last: Tensor) -> None:
        """Until the next call a row of each layer belongs to the request in its slot and reads what its target reads at
        position `last`: that row, and of sliding layers the window before it. int32 [S]; below 0: padding, of which
        nothing is said. Both are written before the embedding is launched."""
        ...


class DraftRows(Protocol):
    """K and V that a drafter's own layers have of every token of the context, in pages of the target's cache."""

    def store(self, step: Step, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """K and V [T, H, D] of each layer, of a step's rows, where block tables say. Ordered on the current stream."""
        ...

    def begin(self, slots: Tensor, anchors: Tensor) -> None:
        """Until the next call block s belongs to the request in `slots[s]` and begins at position `anchors[s]`, int32
        [S] each; slots below 0 are padding, whose blocks see themselves alone."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S, B, Hq, D], k and v [S, B, H, D] of S blocks of B rows, rotated -> [S, B, Hq * D]. A row sees what is
        stored before its block, of a layer with a window from `anchors - window` on; and of its block all rows, of a
        causal layer those up to itself."""
        ...


class TargetCaches(Protocol):
    """What a drafter may read and keep beside its target, for as long as the target's pool is this one."""

    def cache_reader(self, kinds: Sequence[LayerKind]) -> CacheReader:
        """Of layers of these kinds, by their numbers. Each reads the target's last cache of its kind."""
        ...

    def draft_rows(self, layers: DraftLayers) -> DraftRows:
        """Of a drafter's layers, which the geometry of the pool has been made with."""
        ...


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
    asked: tuple[AskedDrafter, ...] = ()  # what makes some of them where it is asked to
    speaks_unasked: bool = True  # it proposes, or has to hear what was accepted, behind every step

    @property
    def weights_bytes(self) -> int:
        """Of a model of its own."""
        return 0

    def attach(self, caches: TargetCaches) -> None:
        """The target's caches are there, or have been replaced: readers and graphs of those before are gone."""

    def capture(self, pool: Any) -> None:
        """Capture what can be, with temporaries in the pool of the target's graphs. All its kernels have run."""

    def store(self, step: Step) -> None:
        """The target has computed the rows of a step, the last of which may be drafts that turn out wrong: they lie
        behind their request's end, and are stored again before they are read. Captured with the step."""

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots. Ordered on the current stream; waits for nothing."""
        ...

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        """What may follow the last token of each; of what takes time, as many tokens as are asked for. The target has
        stored all rows before it. Ordered on the current stream; waits for nothing."""
        ...


class LongestProposal(Drafter):
    """Several drafters: of those that propose unasked and the one that is asked, the one with most to say is heard, of
    each request; of equal ones the first."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.num_tokens = max(drafter.num_tokens for drafter in drafters)
        self.asked = tuple(each for drafter in drafters for each in drafter.asked)
        self.speaks_unasked = any(drafter.speaks_unasked for drafter in drafters)

    @property
    def weights_bytes(self) -> int:
        return sum(drafter.weights_bytes for drafter in self._drafters)

    def attach(self, caches: TargetCaches) -> None:
        for drafter in self._drafters:
            drafter.attach(caches)

    def store(self, step: Step) -> None:
        for drafter in self._drafters:
            drafter.store(step)

    def capture(self, pool: Any) -> None:
        for drafter in self._drafters:
            drafter.capture(pool)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        for drafter in self._drafters:
            drafter.admit(admitted)

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        first, *others = (self._padded(drafter.propose(accepted, each)) for drafter, each in self._dealt(asked))
        tokens, counts = first
        for other in others:
            longer = other.counts > counts
            tokens = torch.where(longer[:, None], other.tokens, tokens)
            counts = torch.where(longer, other.counts, counts)
        return Proposal(tokens, counts)

    def _dealt(self, asked: Asked) -> Iterator[tuple[Drafter, Asked]]:
        """What of it each is asked for. One that has nothing to say is not run."""
        number = asked.drafter
        for drafter in self._drafters:
            own = 0 <= number < len(drafter.asked)
            if own or drafter.speaks_unasked or not asked.drafts:
                yield drafter, Asked(asked.drafts, number) if own else NOTHING_ASKED
            number -= len(drafter.asked)

    def _padded(self, proposal: Proposal) -> Proposal:
        missing = self.num_tokens - proposal.tokens.shape[1]
        return Proposal(torch.nn.functional.pad(proposal.tokens, (0, missing)), proposal.counts)
