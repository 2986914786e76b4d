"""Root-mean-square normalisation of Gemma 4: the weight multiplies as it is (not 1 + weight)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelserve_worker.kernels.elementwise import ElementwiseDoors, elementwise_doors


class RMSNorm(nn.Module):
    """Normalise in float32, multiply by a weight [size], round once to the input's dtype.

    Where a norm stands beside a sum, the decoder hands `weight` to a door that does both, and never calls the module.
    """

    def __init__(self, size: int, *, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.doors: ElementwiseDoors = elementwise_doors(device)
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.doors.rms_norm(x, self.weight, eps=self.eps)
