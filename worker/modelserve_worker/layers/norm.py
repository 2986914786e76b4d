"""Root-mean-square normalisation of Gemma 4: the weight multiplies as it is (not 1 + weight)."""

from __future__ import annotations

from torch import Tensor, nn

from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise
from modelserve_worker.layers.placement import Placement


class RMSNorm(nn.Module):
    """Normalise in float32, multiply by a weight [size], round once to the input's dtype.

    What kernels norm they are handed `weight` for; the module itself is called where attention is plain.
    """

    def __init__(self, size: int, placement: Placement, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = placement.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return PlainElementwise().rms_norm(x, self.weight, eps=self.eps)
