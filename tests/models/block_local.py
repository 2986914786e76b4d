"""Attention for transformers that is linear in length on sliding layers: `attn_implementation="block_local"`.

Queries in blocks of one window see their own block and the one before. Global layers are transformers' causal SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

NAME = "block_local"


def register() -> None:
    """Make NAME known to transformers. It builds no mask for a name that it has no mask function for."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, L, D], key and value [B, Hkv, L, D] of whole sequences from position 0 -> [B, L, Hq, D]."""
    assert attention_mask is None, "block_local attention is for whole sequences, padded at their end"
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    if sliding_window is None:
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        attended = _sliding(query, key, value, window=sliding_window, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _sliding(query: Tensor, key: Tensor, value: Tensor, *, window: int, scale: float) -> Tensor:
    """All [B, H, L, D]."""
    batch, heads, length, width = query.shape
    count = -(-length // window)

    def blocks(t: Tensor) -> Tensor:
        padded = functional.pad(t, (0, 0, 0, count * window - length))
        return padded.reshape(batch, heads, count, window, width).transpose(1, 2)  # [B, N, H, W, D]

    def with_previous(t: Tensor) -> Tensor:
        own = blocks(t)
        previous = torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), dim=1)
        return torch.cat((previous, own), dim=3).flatten(0, 1)

    at = torch.arange(window, device=query.device)
    other = torch.arange(-window, window, device=query.device)
    distance = at[:, None] - other
    mask = ((distance >= 0) & (distance < window)).repeat(count, 1, 1)
    mask[0] &= other >= 0
    attended = functional.scaled_dot_product_attention(
        blocks(query).flatten(0, 1),
        with_previous(key),
        with_previous(value),
        attn_mask=mask[:, None].repeat(batch, 1, 1, 1),
        scale=scale,
    )
    in_order = attended.reshape(batch, count, heads, window, width).transpose(1, 2)
    return in_order.reshape(batch, heads, count * window, width)[:, :, :length]
