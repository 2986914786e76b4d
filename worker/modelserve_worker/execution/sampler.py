"""Logits to tokens on the device.

Order, as OpenAI-compatible servers have it: log probabilities are of the raw logits; then logit_bias, min_tokens (EOS
and stop ids masked), repetition, presence and frequency penalties; temperature; min-p; top-k; top-p; one draw. With
temperature 0 (any below 1e-5) the token is the argmax after the penalties. Every filter keeps the most likely token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.sizing.memory import ROWS_PER_SORT
from modelserve_worker.execution.sampling_batch import SamplingBatch, SlotHistory
from modelserve_worker.kernels.counter_random import gumbel_noise

MIN_TEMPERATURE = 1e-5  # below it the draw is the argmax anyway, and the division would overflow
_IN_PROMPT = 1 << 30  # bit of a penalty count that says: the token is in the prompt


@dataclass(frozen=True)
class SampledLogprobs:
    """Of the raw logits: the drawn token's log probability and rank [S], and the n likeliest tokens [S, n]."""

    chosen: Tensor  # float32
    rank: Tensor  # int64, 1 = the likeliest
    top_tokens: Tensor  # int64
    top_logprobs: Tensor  # float32


@dataclass(frozen=True)
class SamplerOutput:
    tokens: Tensor  # int64 [S]; -1 where the logits held a NaN
    logprobs: SampledLogprobs | None


class Sampler:
    """Draws tokens and keeps, per slot, which tokens a request has seen (int32 [max_num_seqs, vocab])."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._never = torch.full((), -torch.inf, device=device)  # a Python scalar would be copied, and waited for

    def reset(self) -> None:
        """Forget what every slot has seen."""
        self._seen.zero_()

    def rebuild(self, history: SlotHistory) -> None:
        """Set a slot's state from scratch: a request is new in it, or back after preemption."""
        row = self._seen[history.slot].zero_()
        row.index_add_(0, self._tokens(history.output_token_ids), self._ones(len(history.output_token_ids)))
        prompt = self._tokens(history.prompt_token_ids)
        row[prompt] = row[prompt] | _IN_PROMPT

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """logits float32 [S, vocab], left unchanged -> one token per row, counted in its slot."""
        adjusted = self._penalised(logits, batch)
        tokens = adjusted.argmax(dim=-1)
        if batch.any_random:
            tokens = torch.where(batch.temperature >= MIN_TEMPERATURE, _draw(adjusted, batch), tokens)
        logprobs = None if batch.most_logprobs is None else _logprobs(logits, tokens, batch.most_logprobs)
        self._seen.index_put_((batch.slots, tokens), self._ones(1), accumulate=True)
        return SamplerOutput(torch.where(logits.isnan().any(dim=-1), -1, tokens), logprobs)

    def _penalised(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        adjusted = logits.index_put((batch.bias_rows, batch.bias_tokens), batch.bias_values, accumulate=True)
        adjusted.index_put_((batch.banned_rows, batch.banned_tokens), self._never)
        if not batch.any_penalty:
            return adjusted
        seen = self._seen[batch.slots]
        factor = torch.where(seen > 0, batch.repetition_penalty[:, None], 1.0)
        adjusted = torch.where(adjusted > 0, adjusted / factor, adjusted * factor)
        counts = (seen & (_IN_PROMPT - 1)).float()
        adjusted -= batch.frequency_penalty[:, None] * counts
        adjusted -= batch.presence_penalty[:, None] * (counts > 0)
        return adjusted

    def _tokens(self, ids: tuple[int, ...]) -> Tensor:
        pin = self._seen.device.type == "cuda"
        return torch.tensor(ids, dtype=torch.int64, pin_memory=pin).to(self._seen.device, non_blocking=True)

    def _ones(self, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.int32, device=self._seen.device)


def _draw(adjusted: Tensor, batch: SamplingBatch) -> Tensor:
    """One token per row from softmax(adjusted / temperature) after truncation; rows at temperature 0 are not used."""
    drawn = []
    for first in range(0, adjusted.shape[0], ROWS_PER_SORT):
        rows = slice(first, first + ROWS_PER_SORT)
        temperature = batch.temperature[rows, None]
        logits = adjusted[rows] / temperature.clamp(min=MIN_TEMPERATURE)
        if batch.any_min_p:
            # p >= min_p * p_max in logarithms; min_p 0 gives -inf and keeps all.
            floor = logits.amax(dim=-1, keepdim=True) + batch.min_p[rows, None].log()
            logits = logits.masked_fill(logits < floor, -torch.inf)
        if batch.any_truncated:
            logits = _truncated(logits, batch.top_k[rows, None], batch.top_p[rows, None])
        drawn.append((logits + gumbel_noise(batch.seeds[rows], batch.positions[rows], logits.shape[1])).argmax(dim=-1))
    return torch.cat(drawn)


def _truncated(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask all but the top_k largest logits (0: all), then all but the smallest likeliest set of mass >= top_p.

    Ties at the edge are cut by token id (the sort is stable), so exactly top_k tokens stay.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = (top_k == 0) | (rank < top_k)
    probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    # top_p 1 is tested by itself: rounding may bring the running mass to 1 before the tail. Rank 0 always stays.
    keep &= (top_p >= 1) | (mass_before < top_p) | (rank == 0)
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(1, order, keep), -torch.inf)


def _logprobs(logits: Tensor, tokens: Tensor, count: int) -> SampledLogprobs:
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    top = logprobs.topk(count, dim=-1)
    return SampledLogprobs(chosen[:, 0], (logprobs > chosen).sum(dim=-1) + 1, top.indices, top.values)
