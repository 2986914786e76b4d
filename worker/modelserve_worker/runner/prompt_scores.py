"""Log probabilities of given tokens, a prompt's, from the hidden states of the chunks that prefill computes anyway.

Rows are scored in blocks of PROMPT_SCORE_ROWS, so a long chunk needs no more memory than a block. A row's score depends
on its own logits alone: chunks, neighbours and preemption change it only as they change the hidden states, within
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelserve.sizing.activation import PROMPT_SCORE_ROWS
from modelserve_worker.batch import AdmittedRequest, Int32Array, ScheduledBatch
from modelserve_worker.kernels.sampling.sampling import likeliest, softcapped
from modelserve_worker.request import PromptLogprobs
from modelserve_worker.runner.launched_step import to_host
from modelserve_worker.step.staging import upload


@dataclass(frozen=True)
class ScoredChunk:
    """Scores of prompt positions [first, first + N) on their way to the host."""

    slot: int
    first: int
    logprobs: Tensor  # float32 [N]
    ranks: Tensor  # int32 [N]
    top_tokens: Tensor  # int32 [N, k]
    top_logprobs: Tensor  # float32 [N, k]

    def scores(self) -> PromptLogprobs:
        """Once the device has passed the step."""
        columns = (self.logprobs, self.ranks, self.top_tokens, self.top_logprobs)
        return PromptLogprobs(*(column.numpy() for column in columns))


class PromptScorer:
    """Scores the rows of a step whose next token is given."""

    def __init__(self, *, softcap: float | None, device: torch.device) -> None:
        self._softcap = softcap
        self._device = device
        self._alternatives: dict[int, int] = {}  # to report, by slot

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        for request in admitted:
            self._alternatives[request.slot] = request.sampling.prompt_logprobs or 0

    def score(self, batch: ScheduledBatch, lengths: Int32Array, logits: Callable[[slice], Tensor]) -> list[ScoredChunk]:
        """Of a step with given tokens. `logits` gives raw ones [N, vocab] of some rows, which lie back to back,
        `lengths` of each segment."""
        wanted = upload(batch.targets.astype(np.int64), self._device)
        firsts, ends = np.cumsum(lengths) - batch.sampled, np.cumsum(batch.given)
        positions = batch.starts + batch.lengths - batch.sampled + 1
        return [
            self._chunk(
                int(batch.slots[i]), int(positions[i]), int(firsts[i]), wanted[ends[i] - count : ends[i]], logits
            )
            for i, count in enumerate(batch.given.tolist())
            if count
        ]

    def _chunk(
        self, slot: int, position: int, row: int, targets: Tensor, logits: Callable[[slice], Tensor]
    ) -> ScoredChunk:
        blocks = [
            self._block(logits(slice(row + at, row + at + len(block))), block, self._alternatives[slot])
            for at in range(0, len(targets), PROMPT_SCORE_ROWS)
            for block in [targets[at : at + PROMPT_SCORE_ROWS]]
        ]
        return ScoredChunk(slot, position, *(to_host(torch.cat(column)) for column in zip(*blocks, strict=True)))

    def _block(self, logits: Tensor, targets: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logprobs = softcapped(logits, self._softcap).log_softmax(dim=-1)
        chosen = logprobs.gather(1, targets[:, None])
        ranks = (logprobs > chosen).sum(dim=-1, dtype=torch.int32) + 1
        values, tokens = likeliest(logprobs, alternatives)
        return chosen[:, 0], ranks, tokens.int(), values
