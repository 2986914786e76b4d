"""Filters and the draw of one token per row, in plain PyTorch: from all logits of a row, the exact path of every
filter, and from a few candidates of it, the reference of `kernels.sampling.sampling_triton`.

Both select by the same total order, larger values first and lower token ids first among equals, and add up probability
in integers, so that neither the order of addition nor the rest of the batch can move the edge of top-p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modelserve.sizing.activation import ROWS_PER_SORT
from modelserve_worker.kernels.sampling.counter_random import gumbel_noise
from modelserve_worker.kernels.sampling.slot_columns import DrawParameters, SlotColumns

MIN_TEMPERATURE = 1e-5  # below it the draw is the argmax anyway, and the division would overflow
WEIGHT_BITS = 40  # a weight is exp(logit - largest) in units of 2^-40; 2^18 of them add up below 2^63
NAN_KEY = 0x7FFFFFFF  # above the key of infinity: a row that holds a NaN keeps it as its best candidate
NOBODY = -(1 << 63) + 1  # below every candidate


@dataclass(frozen=True)
class CandidateRows:
    """The S rows of a step: greedy ones, unfiltered ones, or filtered by a top-k of at most `width` candidates."""

    slots: Tensor  # int32 [S]
    positions: Tensor  # int32 [S], of the sampled tokens
    output_counts: Tensor  # int32 [S], tokens that the row's request has sampled before
    columns: SlotColumns
    width: int  # candidates that the row with most of them needs
    softcap: float | None
    mask_rows: Tensor | None = None  # int32 [S]: a row of `masks`, or -1: any token
    masks: Tensor | None = None  # int32 [C, ceil(vocab / 32)], bit i of word w: token 32 w + i; one is set at least


class SamplingBackend(Protocol):
    """Sampling by candidates: the tokens of a row that can still win, found in shares of its logits apart.

    A candidate is an int64 whose order is the order of selection: a float32 value's bits made monotone (equal for both
    zeros; NAN_KEY for a NaN of the raw logits), then the token id complemented, so that ties fall to the lower id.
    The value is the softcapped logit, -inf where a mask or `min_tokens` forbids the token, by the temperature; in an
    unfiltered row with the token's noise. A row needs 1 candidate when it is greedy or unfiltered, else its top_k; what
    stands in its other places means nothing. Neither parts nor shares change a token. A row that is none of
    CandidateRows' kinds gets a token that means nothing.
    """

    def select(self, logits: Tensor, rows: CandidateRows, *, first_token: int) -> Tensor:
        """Raw logits [S, n], rows contiguous, of tokens from first_token on -> candidates int64 [S, parts, width]."""
        ...

    def merge(self, candidates: Tensor, rows: CandidateRows) -> Tensor:
        """The best of candidates int64 [S, parts, width], contiguous: int64 [S, width]."""
        ...

    def draw(self, candidates: Tensor, rows: CandidateRows) -> Tensor:
        """One token per row of candidates int64 [S, parts, width], contiguous: int64 [S]. -1: the row held a NaN."""
        ...


class PlainSampling:
    """Sampling in plain PyTorch, on any device."""

    def select(self, logits: Tensor, rows: CandidateRows, *, first_token: int) -> Tensor:
        tokens = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
        blocks = torch.split(torch.arange(len(logits), device=logits.device), ROWS_PER_SORT)
        return torch.cat([self._select(logits, rows, block, tokens) for block in blocks]).unsqueeze(1)

    def merge(self, candidates: Tensor, rows: CandidateRows) -> Tensor:
        return _best(candidates.flatten(1), self._parameters(rows), rows.width)

    def draw(self, candidates: Tensor, rows: CandidateRows) -> Tensor:
        parameters = self._parameters(rows)
        final = _best(candidates.flatten(1), parameters, rows.width)
        values, tokens = _values(final), _tokens(final)
        likeliest, broken = tokens[:, 0], final[:, 0] >> 32 == NAN_KEY
        values.masked_fill_(values < _min_p_floor(values, parameters), -torch.inf)
        values.masked_fill_(~_kept(values.clone(), parameters.top_k[:, None], parameters.top_p[:, None]), -torch.inf)
        values += gumbel_noise(parameters.seeds, parameters.positions, tokens)
        drawn = _tokens(_candidates(values, tokens).amax(dim=-1))
        return torch.where(_wanted(parameters, rows.width) == 1, likeliest, drawn).masked_fill_(broken, -1)

    def _parameters(self, rows: CandidateRows) -> DrawParameters:
        return rows.columns.draw_parameters(rows.slots, rows.positions)

    def _select(self, logits: Tensor, rows: CandidateRows, block: Tensor, tokens: Tensor) -> Tensor:
        slots, first = rows.slots[block], int(tokens[0])
        parameters = rows.columns.draw_parameters(slots, rows.positions[block])
        values = softcapped(logits[block], rows.softcap)
        broken = values.isnan()
        if rows.masks is not None:
            assert rows.mask_rows is not None
            mask = rows.mask_rows[block]
            values.masked_fill_(
                (mask >= 0)[:, None] & ~allowed_tokens(rows.masks[mask.clamp(min=0)], tokens), -torch.inf
            )
        banned = rows.columns.banned[slots].long() - first
        banning = (rows.output_counts[block] < rows.columns.min_tokens[slots])[:, None]
        row, place = (banning & (banned >= 0) & (banned < len(tokens))).nonzero(as_tuple=True)
        values[row, banned[row, place]] = -torch.inf
        greedy = parameters.temperature < MIN_TEMPERATURE
        values /= parameters.temperature.masked_fill(greedy, 1.0)[:, None]
        (noisy,) = (~greedy & (parameters.top_k == 0)).nonzero(as_tuple=True)
        values[noisy] += gumbel_noise(parameters.seeds[noisy], parameters.positions[noisy], tokens)
        values.masked_fill_(broken, torch.nan)
        return _best(_candidates(values, tokens), parameters, rows.width)


def _wanted(parameters: DrawParameters, width: int) -> Tensor:
    """Candidates that each row needs, int64 [N]."""
    one = (parameters.temperature < MIN_TEMPERATURE) | (parameters.top_k == 0)
    return parameters.top_k.clamp(max=width).masked_fill_(one, 1)


def _best(candidates: Tensor, parameters: DrawParameters, width: int) -> Tensor:
    """Int64 [N, width]: the largest of candidates [N, n] in descending order, as many as a row needs, then NOBODY."""
    best = candidates.new_full((len(candidates), width), NOBODY)
    count = min(width, candidates.shape[1])
    best[:, :count] = candidates.amax(dim=-1, keepdim=True) if count == 1 else candidates.topk(count, dim=-1).values
    lane = torch.arange(width, device=candidates.device)
    return best.masked_fill_(lane >= _wanted(parameters, width)[:, None], NOBODY)


def _candidates(values: Tensor, tokens: Tensor) -> Tensor:
    """Of values float32 [N, n] and tokens int64 [n] or [N, n]."""
    bits = (values + 0.0).view(torch.int32)  # a sum of two zeros is the positive one
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(values.isnan(), NAN_KEY)
    return (keys.long() << 32) + (tokens ^ 0x7FFFFFFF)


def _values(candidates: Tensor) -> Tensor:
    """Float32; -inf for NOBODY and for NaNs."""
    keys = (candidates >> 32).int()
    values = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _tokens(candidates: Tensor) -> Tensor:
    return (candidates & 0xFFFFFFFF) ^ 0x7FFFFFFF


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap) in float32, or the logits in float32 without a cap; never the tensor it was given."""
    wide = logits.to(torch.float32, copy=True)
    # The reciprocal is rounded to float32 once, on every device: PyTorch itself divides on the CPU, multiplies on CUDA.
    return wide if cap is None else wide.mul_(1.0 / cap).tanh_().mul_(cap)


def likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of float32 [N, vocab] in the order above, values and int64 tokens [N, count].
    Overwrites `logprobs`: one row more of such a size is not there.

    Not `topk`: which of equals it names, and in what order, differs with `count` and with the number of rows, and of
    logits in bfloat16 many are equal.
    """
    values = logprobs.new_empty((len(logprobs), count))
    tokens = torch.empty_like(values, dtype=torch.int64)
    for place in range(count):
        values[:, place], tokens[:, place] = logprobs.max(dim=-1)  # of equals the first
        logprobs.scatter_(1, tokens[:, place : place + 1], -torch.inf)
    return values, tokens


def allowed_tokens(words: Tensor, tokens: Tensor) -> Tensor:
    """Which of tokens int64 [n] have their bit set in each row of int32 [N, ceil(vocab / 32)]: bool [N, n]."""
    return (words[:, tokens // 32] >> (tokens % 32).int()) & 1 != 0


def draw_tokens(values: Tensor, parameters: DrawParameters, *, random: bool, min_p: bool, truncated: bool) -> Tensor:
    """One token per row of values float32 [N, vocab], which hold all adjustments but the temperature: int64 [N].

    Rows below MIN_TEMPERATURE get the argmax. `random`, `min_p` and `truncated` (top-k or top-p) say whether any row
    needs that part; leaving it out changes no row that does not.
    """
    likeliest = values.argmax(dim=-1)
    if not random:
        return likeliest
    greedy = parameters.temperature < MIN_TEMPERATURE
    scaled = values / parameters.temperature.masked_fill(greedy, 1.0)[:, None]
    if min_p:
        scaled.masked_fill_(scaled < _min_p_floor(scaled, parameters), -torch.inf)
    if truncated:
        scaled.masked_fill_(_cut(scaled, parameters.top_k[:, None], parameters.top_p[:, None]), -torch.inf)
    tokens = torch.arange(scaled.shape[1], device=scaled.device)
    scaled += gumbel_noise(parameters.seeds, parameters.positions, tokens)
    return torch.where(greedy, likeliest, scaled.argmax(dim=-1))


def _min_p_floor(scaled: Tensor, parameters: DrawParameters) -> Tensor:
    """p >= min_p * p_max in logarithms, float32 [N, 1]; min_p 0 gives -inf and keeps all."""
    return scaled.amax(dim=-1, keepdim=True) + parameters.min_p.log()[:, None]


def _cut(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """True for the tokens that `_kept` leaves out. Ties are cut by token id: the sort is stable."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    keep = _kept(ordered, top_k, top_p)
    return torch.ones_like(keep).scatter_(1, order, ~keep)


def _kept(ordered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Of values in descending order, given up: True for the top_k first (0: all), and of these for the smallest
    likeliest set of mass >= top_p. The first always stays.
    """
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    keep = (top_k == 0) | (rank < top_k)
    largest = ordered[:, :1].clone()
    # A value equal to the largest weighs 1 even where both are infinite.
    relative = ordered.sub_(largest).masked_fill_(ordered.isnan(), 0.0)
    weights = relative.exp_().mul_(2.0**WEIGHT_BITS).long().mul_(keep)
    mass = weights.cumsum(dim=-1)
    limit = (top_p.double() * mass[:, -1:].double()).ceil_().long()
    # top_p 1 is tested by itself: a tail that weighs nothing must stay.
    keep &= (top_p >= 1) | (mass.sub_(weights) < limit) | (rank == 0)
    return keep
