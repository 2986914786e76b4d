"""Log probabilities of prompt tokens, from the hidden states of the chunks that prefill computes anyway.

A chunk of a request that asked is scored in blocks of PROMPT_SCORE_ROWS rows, so a long chunk needs no more memory than
a block. A row's score depends on its own logits alone: chunks, neighbours and preemption change it only as they change
the hidden states, within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelserve.sizing.activation import PROMPT_SCORE_ROWS
from modelserve_worker.batch import AdmittedRequest, Int32Array, ScheduledBatch
from modelserve_worker.execution.launched_step import to_host
from modelserve_worker.kernels.sampling import softcapped
from modelserve_worker.request import PromptLogprobs


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
    """Keeps the prompts of the slots whose requests asked, and scores their chunks."""

    def __init__(self, *, softcap: float | None, device: torch.device) -> None:
        self._softcap = softcap
        self._device = device
        self._prompts: dict[int, tuple[Int32Array, int]] = {}  # by slot: tokens, and alternatives to report

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        for request in admitted:
            self._prompts.pop(request.slot, None)
            if request.sampling.prompt_logprobs is not None:
                prompt = np.array(request.prompt_token_ids, dtype=np.int32)
                self._prompts[request.slot] = (prompt, request.sampling.prompt_logprobs)

    def scores(self, batch: ScheduledBatch) -> bool:
        """Whether the step has rows to score."""
        return bool(self._prompts) and any(True for _ in self._chunks(batch))

    def score(self, batch: ScheduledBatch, logits: Callable[[slice], Tensor]) -> list[ScoredChunk]:
        """Scores of the tokens that follow the rows of a step; `logits` gives raw ones of some rows [N, vocab]."""
        if not self._prompts:
            return []
        return [self._chunk(*chunk, logits) for chunk in self._chunks(batch)]

    def _chunks(self, batch: ScheduledBatch) -> Iterator[tuple[int, int, int, Int32Array, int]]:
        """Slot, position of the first scored token, first row, scored tokens and alternatives to report."""
        ends = np.cumsum(batch.lengths)
        columns = (batch.slots, batch.starts, batch.lengths, ends - batch.lengths)
        for slot, start, length, row in zip(*(column.tolist() for column in columns), strict=True):
            if slot in self._prompts:
                prompt, alternatives = self._prompts[slot]
                targets = prompt[start + 1 : start + 1 + length]
                if len(targets):
                    yield slot, start + 1, row, targets, alternatives

    def _chunk(
        self,
        slot: int,
        first: int,
        row: int,
        targets: Int32Array,
        alternatives: int,
        logits: Callable[[slice], Tensor],
    ) -> ScoredChunk:
        wanted = torch.from_numpy(targets.astype(np.int64))
        if self._device.type == "cuda":
            wanted = wanted.pin_memory().to(self._device, non_blocking=True)
        blocks = [
            self._block(logits(slice(row + at, row + at + len(block))), block, alternatives)
            for at in range(0, len(targets), PROMPT_SCORE_ROWS)
            for block in [wanted[at : at + PROMPT_SCORE_ROWS]]
        ]
        return ScoredChunk(slot, first, *(to_host(torch.cat(column)) for column in zip(*blocks, strict=True)))

    def _block(self, logits: Tensor, targets: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logprobs = softcapped(logits, self._softcap).log_softmax(dim=-1)
        chosen = logprobs.gather(1, targets[:, None])
        ranks = (logprobs > chosen).sum(dim=-1, dtype=torch.int32) + 1
        top = logprobs.topk(alternatives, dim=-1)
        return chosen[:, 0], ranks, top.indices.int(), top.values
