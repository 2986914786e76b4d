"""Root-mean-square normalisation of Gemma 4: the weight multiplies as it is (not 1 + weight)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rms_normalize(x: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in float32. Returns float32 of x's shape."""
    x = x.float()
    return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + eps, -0.5)


class RMSNorm(nn.Module):
    """Normalise in float32, multiply by a weight [size], round once to the input's dtype."""

    def __init__(self, size: int, *, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (rms_normalize(x, eps=self.eps) * self.weight.float()).to(x.dtype)
