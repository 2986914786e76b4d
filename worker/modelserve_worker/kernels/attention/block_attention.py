"""Attention over blocks of keys, merged by log-sum-exp in float32 (the online softmax; scale 1.0, grouped queries).

The result does not depend on how keys are cut into blocks beyond float32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SoftmaxAccumulator:
    """Running softmax(q · kᵀ) · v of one set of query rows, fed block by block.

    `queries` is [B, Tq, Hq, D] with Hq = G * Hkv; query head h reads key head h // G.
    """

    def __init__(self, queries: Tensor, *, kv_heads: int) -> None:
        batch, rows, heads, width = queries.shape
        group = heads // kv_heads
        # [B, Hkv, G * Tq, D]: the queries of one key head are the rows of one matrix product.
        self._queries = (
            queries.view(batch, rows, kv_heads, group, width).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)
        )
        self._shape = (batch, rows, kv_heads, group, width)
        state = self._queries.shape[:3]
        self._maximum = torch.full((*state, 1), -torch.inf, dtype=torch.float32, device=queries.device)
        self._denominator = torch.zeros((*state, 1), dtype=torch.float32, device=queries.device)
        self._numerator = torch.zeros((*state, width), dtype=torch.float32, device=queries.device)

    def add(self, keys: Tensor, values: Tensor, mask: Tensor) -> None:
        """Add keys and values [B, Hkv, K, D]; `mask` bool [B, Tq, K] is True where a query may read a key.

        Values at keys that no query may read must be finite: 0 · NaN would reach the sum.
        """
        batch, rows, kv_heads, group, _ = self._shape
        scores = _matmul_float32(self._queries, keys.transpose(-1, -2))
        grouped = scores.view(batch, kv_heads, group, rows, -1)
        grouped.masked_fill_(~mask[:, None, None], -torch.inf)
        maximum = torch.maximum(self._maximum, scores.amax(dim=-1, keepdim=True))
        # A row that has seen no permitted key yet has maximum -inf; 0 stands in, so that no inf - inf arises.
        reference = torch.where(maximum == -torch.inf, 0.0, maximum)
        weights = scores.sub_(reference).exp_()
        decay = torch.exp(self._maximum - reference)
        self._denominator.mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
        self._numerator.mul_(decay).add_(_matmul_float32(weights, values))
        self._maximum = maximum

    def result(self, dtype: torch.dtype) -> Tensor:
        """Attention output [B, Tq, Hq, D]. Every query must have had at least one permitted key."""
        batch, rows, kv_heads, group, width = self._shape
        output = (self._numerator / self._denominator).to(dtype)
        return output.view(batch, kv_heads, group, rows, width).permute(0, 3, 1, 2, 4).reshape(batch, rows, -1, width)


def _matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right over [B, H, M, K] x [B, H, K, N] with float32 sums and a float32 result.

    On a GPU the left side is rounded to the right side's dtype first, which is what matrix units multiply.
    """
    if left.device.type == "cuda" and right.dtype != torch.float32:
        product: Tensor = torch.bmm(left.to(right.dtype).flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32)
        return product.view(*left.shape[:-1], right.shape[-1])
    return left.float() @ right.float()
