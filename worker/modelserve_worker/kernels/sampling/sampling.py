"""Sampling in plain PyTorch: candidates of rows that need few of them, the draw of every other filter by a sort, log
probabilities; the reference of `kernels.sampling.sampling_triton`.

All select by the same total order, larger values first and lower token ids first among equals, and add up probability
in integers, so that neither the order of addition nor the rest of the batch can move the edge of top-p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from modelserve.sizing.activation import ROWS_PER_SORT
from modelserve_worker.kernels.sampling.counter_random import gumbel_noise
from modelserve_worker.kernels.sampling.slot_columns import DrawParameters, SlotColumns, SlotLists

MIN_TEMPERATURE = 1e-5  # below it the draw is the argmax anyway, and the division would overflow
WEIGHT_BITS = 40  # a weight is exp(logit - largest) in units of 2^-40; 2^18 of them add up below 2^63
NAN_KEY = 0x7FFFFFFF  # above the key of infinity: a row that holds a NaN keeps it as its best candidate
NOBODY = -(1 << 63) + 1  # below every candidate
IN_PROMPT = 1 << 30  # bit of a count of seen tokens that says: the token is in the prompt


@dataclass(frozen=True)
class Adjustments:
    """What changes logits of some rows before they are filtered. `seen` int32 [slots, vocab]: how often the answer has
    each token, and IN_PROMPT where the prompt has it."""

    seen: Tensor
    lists: SlotLists


@dataclass(frozen=True)
class SampledRows:
    """N rows of a step, whatever their filters."""

    slots: Tensor  # int32 [N]
    positions: Tensor  # int32 [N], of the sampled tokens
    output_counts: Tensor  # int32 [N], tokens that the row's request has sampled before
    columns: SlotColumns
    width: int  # candidates that the row with most of them needs, of those that few are enough for
    softcap: float | None
    mask_rows: Tensor | None = None  # int32 [N]: a row of `masks`, or -1: any token
    masks: Tensor | None = None  # int32 [C, ceil(vocab / 32)], bit i of word w: token 32 w + i; one is set at least
    adjustments: Adjustments | None = None  # None: no row has a list or a penalty

    def some(self, which: Tensor) -> SampledRows:
        """Those of these numbers, int64 [M]."""
        mask_rows = None if self.mask_rows is None else self.mask_rows[which]
        return replace(
            self, slots=self.slots[which], positions=self.positions[which],
            output_counts=self.output_counts[which], mask_rows=mask_rows,
        )  # fmt: skip


@dataclass(frozen=True)
class RowLogprobs:
    """Log probabilities of N rows: the chosen token's (float32 [N]) and its rank (int64, 1 = the likeliest), and the
    likeliest tokens (int64 [N, most]) with theirs (float32)."""

    chosen: Tensor
    rank: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class SamplingBackend(Protocol):
    """Tokens and log probabilities of rows of logits.

    Adjusted values are the softcapped logits, -inf where a mask forbids the token, changed by the row's list and its
    penalties, by the temperature where it is no greedy row.

    A candidate is an int64 whose order is the order of selection: a float32 value's bits made monotone (equal for both
    zeros; NAN_KEY for a NaN of the raw logits), then the token id complemented, so that ties fall to the lower id.
    The value is the adjusted one; in an unfiltered row with the token's noise. A row needs 1 candidate when it is
    greedy or unfiltered, else its top_k; what stands in its other places means nothing. Neither parts nor shares
    change a token. A row that needs more than `width` gets a token that means nothing.
    """

    rows_at_once: int
    """Rows that `draw_filtered` and `logprobs` take."""

    def select(self, logits: Tensor, rows: SampledRows, *, first_token: int) -> Tensor:
        """Raw logits [N, n], rows contiguous, of tokens from first_token on -> candidates int64 [N, parts, width]."""
        ...

    def merge(self, candidates: Tensor, rows: SampledRows) -> Tensor:
        """The best of candidates int64 [N, parts, width], contiguous: int64 [N, width]."""
        ...

    def draw(self, candidates: Tensor, rows: SampledRows) -> Tensor:
        """One token per row of candidates int64 [N, parts, width], contiguous: int64 [N]. -1: the row held a NaN."""
        ...

    def draw_filtered(self, logits: Tensor, rows: SampledRows, places: Tensor) -> Tensor:
        """One token int64 [N] per row, none of them greedy, whatever it is filtered by, of all its raw logits: row
        places[i] (int64 [N]) of [M, vocab], rows contiguous. -1: the row held a NaN."""
        ...

    def logprobs(
        self, logits: Tensor, tokens: Tensor, places: Tensor, *, most: int, softcap: float | None
    ) -> RowLogprobs:
        """Of the tokens int64 [N] (below 0: of any token) and the `most` likeliest, of softcapped logits as above."""
        ...


class PlainSampling:
    """Sampling in plain PyTorch, on any device."""

    rows_at_once = ROWS_PER_SORT

    def select(self, logits: Tensor, rows: SampledRows, *, first_token: int) -> Tensor:
        blocks = torch.split(torch.arange(len(logits), device=logits.device), ROWS_PER_SORT)
        return torch.cat([self._select(logits[each], rows.some(each), first_token) for each in blocks]).unsqueeze(1)

    def merge(self, candidates: Tensor, rows: SampledRows) -> Tensor:
        return _best(candidates.flatten(1), _parameters(rows), rows.width)

    def draw(self, candidates: Tensor, rows: SampledRows) -> Tensor:
        parameters = _parameters(rows)
        final = _best(candidates.flatten(1), parameters, rows.width)
        values, tokens = _values(final), _tokens(final)
        likeliest, broken = tokens[:, 0], final[:, 0] >> 32 == NAN_KEY
        values.masked_fill_(values < _min_p_floor(values, parameters), -torch.inf)
        values.masked_fill_(~_kept(values.clone(), parameters.top_k[:, None], parameters.top_p[:, None]), -torch.inf)
        values += gumbel_noise(parameters.seeds, parameters.positions, tokens)
        drawn = _tokens(_candidates(values, tokens).amax(dim=-1))
        return torch.where(_wanted(parameters, rows.width) == 1, likeliest, drawn).masked_fill_(broken, -1)

    def draw_filtered(self, logits: Tensor, rows: SampledRows, places: Tensor) -> Tensor:
        values, broken = _adjusted(logits[places], rows, 0)
        return draw_tokens(values, _parameters(rows)).masked_fill_(broken, -1)

    def logprobs(
        self, logits: Tensor, tokens: Tensor, places: Tensor, *, most: int, softcap: float | None
    ) -> RowLogprobs:
        values, of = softcapped(logits[places], softcap), tokens.clamp(min=0)[:, None]
        everything = values.log_softmax(dim=-1)
        rank = (values > values.gather(1, of)).sum(dim=-1) + 1
        likely = likeliest(values, most)[1]
        return RowLogprobs(everything.gather(1, of)[:, 0], rank, likely, everything.gather(1, likely))

    def _select(self, logits: Tensor, rows: SampledRows, first_token: int) -> Tensor:
        tokens = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
        parameters = _parameters(rows)
        values, broken = _adjusted(logits, rows, first_token)
        greedy = parameters.temperature < MIN_TEMPERATURE
        values /= parameters.temperature.masked_fill(greedy, 1.0)[:, None]
        (noisy,) = (~greedy & (parameters.top_k == 0)).nonzero(as_tuple=True)
        values[noisy] += gumbel_noise(parameters.seeds[noisy], parameters.positions[noisy], tokens)
        values.masked_fill_(broken[:, None], torch.nan)
        return _best(_candidates(values, tokens), parameters, rows.width)


def _parameters(rows: SampledRows) -> DrawParameters:
    return rows.columns.draw_parameters(rows.slots, rows.positions)


def _adjusted(logits: Tensor, rows: SampledRows, first_token: int) -> tuple[Tensor, Tensor]:
    """Values float32 [N, n] of raw logits of tokens from first_token on, before the temperature, and which rows hold a
    NaN, bool [N]."""
    values = softcapped(logits, rows.softcap)
    broken = values.isnan().any(dim=-1)
    if rows.masks is not None:
        assert rows.mask_rows is not None
        tokens = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
        allowed = allowed_tokens(rows.masks[rows.mask_rows.clamp(min=0)], tokens)
        values.masked_fill_((rows.mask_rows >= 0)[:, None] & ~allowed, -torch.inf)
    if rows.adjustments is not None:
        _apply_lists(values, rows, rows.adjustments.lists, first_token)
        _penalise(values, rows, rows.adjustments.seen[:, first_token : first_token + logits.shape[1]])
    return values, broken


def _apply_lists(values: Tensor, rows: SampledRows, lists: SlotLists, first_token: int) -> None:
    columns, slots, count = rows.columns, rows.slots, values.shape[1]
    places, biases = lists.tokens[slots].long() - first_token, lists.biases[slots]
    here = torch.arange(places.shape[1], device=places.device) < columns.listed[slots][:, None]
    here &= (places >= 0) & (places < count)
    bans = biases == -torch.inf
    places = places.clamp_(0, count - 1)
    values.scatter_add_(1, places, torch.where(here & ~bans, biases, 0.0))  # a token is biased once: no order of sums
    banned = here & bans & (rows.output_counts < columns.min_tokens[slots])[:, None]
    row, place = banned.nonzero(as_tuple=True)
    values[row, places[row, place]] = -torch.inf


def _penalise(values: Tensor, rows: SampledRows, seen_of_slots: Tensor) -> None:
    columns, slots = rows.columns, rows.slots
    seen = seen_of_slots[slots]
    factor = torch.where(seen > 0, columns.repetition_penalty[slots][:, None], 1.0)
    values.copy_(torch.where(values > 0, values / factor, values * factor))
    counts = (seen & (IN_PROMPT - 1)).float()
    values -= columns.frequency_penalty[slots][:, None] * counts
    values -= columns.presence_penalty[slots][:, None] * (counts > 0)


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


def draw_tokens(values: Tensor, parameters: DrawParameters) -> Tensor:
    """One token per row of adjusted values float32 [N, vocab] before the temperature, which is above MIN_TEMPERATURE:
    int64 [N]."""
    scaled = values / parameters.temperature[:, None]
    scaled.masked_fill_(scaled < _min_p_floor(scaled, parameters), -torch.inf)
    scaled.masked_fill_(_cut(scaled, parameters.top_k[:, None], parameters.top_p[:, None]), -torch.inf)
    tokens = torch.arange(scaled.shape[1], device=scaled.device)
    scaled += gumbel_noise(parameters.seeds, parameters.positions, tokens)
    return scaled.argmax(dim=-1)


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
