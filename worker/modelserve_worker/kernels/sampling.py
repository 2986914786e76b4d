"""Filters and the draw of one token per row, in plain PyTorch: the twin of `kernels.sampling_triton`, and the
exact path of every filter the kernels do not have.

Both select by the same total order, larger values first and lower token ids first among equals, and add up probability
in integers, so that neither the order of addition nor the rest of the batch can move the edge of top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve_worker.kernels.counter_random import gumbel_noise

MIN_TEMPERATURE = 1e-5  # below it the draw is the argmax anyway, and the division would overflow
WEIGHT_BITS = 40  # a weight is exp(logit - largest) in units of 2^-40; 2^18 of them add up below 2^63


@dataclass(frozen=True)
class DrawParameters:
    """What the draw of each row depends on. Integers are int64 [N], the others float32 [N]."""

    seeds: Tensor
    positions: Tensor  # of the sampled token: the key of its random numbers
    temperature: Tensor
    top_k: Tensor  # 0 is off
    top_p: Tensor
    min_p: Tensor


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap) in float32, or the logits in float32 without a cap; never the tensor it was given."""
    wide = logits.to(torch.float32, copy=True)
    # The reciprocal is rounded to float32 once, on every device: PyTorch itself divides on the CPU, multiplies on CUDA.
    return wide if cap is None else wide.mul_(1.0 / cap).tanh_().mul_(cap)


def masked(values: Tensor, words: Tensor) -> Tensor:
    """Float32 [N, vocab] with -inf for each token whose bit in int32 [N, ceil(vocab / 32)] is 0; NaN there as well."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> bits) & 1).view(len(words), -1)[:, : values.shape[1]]
    return values.masked_fill(allowed == 0, -torch.inf)


def draw_tokens(values: Tensor, parameters: DrawParameters, *, random: bool, min_p: bool, truncated: bool) -> Tensor:
    """One token per row of values float32 [N, vocab], which hold all adjustments but the temperature: int64 [N].

    Rows below MIN_TEMPERATURE get the argmax. `random`, `min_p` and `truncated` (top-k or top-p) say whether any row
    needs that part; leaving it out changes no row that does not.
    """
    tokens = values.argmax(dim=-1)
    if not random:
        return tokens
    greedy = parameters.temperature < MIN_TEMPERATURE
    scaled = values / parameters.temperature.masked_fill(greedy, 1.0)[:, None]
    if min_p:
        # p >= min_p * p_max in logarithms; min_p 0 gives -inf and keeps all.
        floor = scaled.amax(dim=-1, keepdim=True) + parameters.min_p.log()[:, None]
        scaled.masked_fill_(scaled < floor, -torch.inf)
    if truncated:
        scaled.masked_fill_(_cut(scaled, parameters.top_k[:, None], parameters.top_p[:, None]), -torch.inf)
    scaled += gumbel_noise(parameters.seeds, parameters.positions, scaled.shape[1])
    return torch.where(greedy, tokens, scaled.argmax(dim=-1))


def _cut(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """True for all but the top_k likeliest (0: all), and of these all but the smallest likeliest set of mass >= top_p.

    Ties at the edge are cut by token id (the sort is stable), so exactly top_k tokens stay. The likeliest always stays.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    keep = (top_k == 0) | (rank < top_k)
    largest = ordered[:, :1].clone()
    # A value equal to the largest weighs 1 even where both are infinite.
    relative = ordered.sub_(largest).masked_fill_(ordered.isnan(), 0.0)
    weights = relative.exp_().mul_(2.0**WEIGHT_BITS).long().mul_(keep)
    mass = weights.cumsum(dim=-1)
    limit = (top_p.double() * mass[:, -1:].double()).ceil_().long()
    # top_p 1 is tested by itself: a tail that weighs nothing must stay.
    keep &= (top_p >= 1) | (mass.sub_(weights) < limit) | (rank == 0)
    return torch.ones_like(keep).scatter_(1, order, ~keep)
