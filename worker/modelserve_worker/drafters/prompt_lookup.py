"""A drafter without a model: proposes what followed the same tokens earlier in the request, or in its prediction.

It works on the device, on the tokens that a step has just accepted. On the host it would know them one step late, and a
step launched ahead could verify nothing that is behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve_worker.batch import AdmittedRequest, Asked
from modelserve_worker.drafters.drafter import Accepted, Drafter, Proposal, TargetCaches
from modelserve_worker.kernels.sampling.prompt_lookup import LookupBackend, PlainLookup
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.staging import pinned


class PromptLookup(Drafter):
    """Keeps all tokens of every slot: int32 [max_num_seqs, max_model_len]."""

    def __init__(
        self,
        *,
        num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        backend: LookupBackend | None = None,
    ) -> None:
        """`backend` left out: plain PyTorch's."""
        self.num_tokens = num_tokens
        self._backend = backend or PlainLookup()
        self._history = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self._host = np.zeros((2, max_num_seqs), dtype=np.int32)  # tokens of the prompt, and of the prediction
        self._lengths = torch.zeros(2, max_num_seqs, dtype=torch.int32, device=device)

    def attach(self, caches: TargetCaches) -> None:
        """It reads no cache."""

    def capture(self, pool: Any) -> None:
        """It launches three kernels."""

    def store(self, step: Step) -> None:
        """It keeps tokens alone."""

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        if not admitted:
            return
        for request in admitted:
            prompt, row = len(request.prompt_token_ids), self._history[request.slot]
            predicted = np.asarray(request.predicted_token_ids, dtype=np.int32)[: len(row) - prompt]
            self._host[:, request.slot] = prompt, len(predicted)
            if len(predicted):
                row[len(row) - len(predicted) :].copy_(self._sent(predicted), non_blocking=True)
            # Over it: an answer from before a preemption may have grown into its prediction.
            known = np.array([*request.prompt_token_ids, *request.output_token_ids], dtype=np.int32)[: len(row)]
            row[: len(known)].copy_(self._sent(known), non_blocking=True)
        self._lengths.copy_(self._sent(self._host.copy()), non_blocking=True)

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:  # noqa: ARG002 - three kernels
        slots, positions = accepted.slots, accepted.positions
        self._backend.remember(self._history, slots, accepted.sampled, accepted.firsts, accepted.counts, positions)
        prompts, predicted = self._lengths
        return Proposal(*self._backend.look_up(self._history, slots, positions, prompts, predicted, self.num_tokens))

    def _sent(self, values: NDArray[np.int32]) -> Tensor:
        return pinned(torch.from_numpy(values), self._history.device)
