"""The door of a drafter: what proposes, on the device, the tokens that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from modelserve_worker.batch import AdmittedRequest


class Drafter(Protocol):
    """Proposes `num_tokens` tokens at a time. With several ranks each has one, and all propose the same."""

    num_tokens: int

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots."""
        ...

    def propose(self, slots: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """int32 [S, num_tokens], ids of the vocabulary: what may follow `tokens` at `positions` of the requests in
        `slots`, each int32 [S]. Ordered on the current stream; waits for nothing."""
        ...
