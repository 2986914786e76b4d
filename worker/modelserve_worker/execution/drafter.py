"""The door of a drafter: what proposes, on the device, the tokens that may follow; and what it may read there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from modelserve.architecture import LayerKind
from modelserve_worker.batch import AdmittedRequest
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


class Drafter(Protocol):
    """Proposes `num_tokens` tokens at a time. With several ranks each has one, and all propose the same."""

    num_tokens: int

    def attach(self, reader_of: ReaderOf) -> None:
        """The target's caches are there, or have been replaced: readers and graphs of those before are gone."""

    def capture(self, pool: Any) -> None:
        """Capture what can be, with temporaries in the pool of the target's graphs. All its kernels have run."""

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots."""
        ...

    def propose(self, slots: Tensor, tokens: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """int32 [S, num_tokens], ids of the vocabulary: what may follow `tokens` at `positions` of the requests in
        `slots`, each int32 [S]. `hidden` [S, H]: what the target computed, after its final norm, of the rows that the
        tokens were drawn from, one position before. All rows up to there are stored. Ordered on the current stream;
        waits for nothing."""
        ...
