"""Rows of images of a model without a tower: each patch by itself, LayerNorm, linear, LayerNorm, its place, twice more.

    e = LN_3(LN_2(W LN_1(p / 255) + b) + table[x, 0] + table[y, 1]);    row = P (e / rms(e))

of patches p of 3 side^2 colours, 0 to 255; LayerNorms have an epsilon of 1e-5, the last norm, without a weight, the
config's. Rows are not multiplied by sqrt(H). Plain PyTorch on every device: a patch's row costs what a token's does in
a fifth of a layer, and knows nothing of other patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from modelserve.model.images import ImageArchitecture
from modelserve_worker.embedded_spans import ImagePatches
from modelserve_worker.layers.placement import Placement

LAYER_NORM_EPS = 1e-5


class LayerNorm(nn.Module):
    """With weight and bias [size]; in float32, rounded once."""

    def __init__(self, size: int, placement: Placement) -> None:
        super().__init__()
        self.weight, self.bias = placement.parameter(size), placement.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


class ImageEmbedder(nn.Module):
    """Every rank has all of it and computes all rows: none is gathered."""

    def __init__(self, images: ImageArchitecture, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.images = images
        width, size = images.patch_values, images.embed_size
        self.patch_norm = LayerNorm(width, placement)
        self.patch_weight, self.patch_bias = placement.parameter(size, width), placement.parameter(size)
        self.embedded_norm = LayerNorm(size, placement)
        self.positions = placement.parameter(images.positions, 2, size)
        self.placed_norm = LayerNorm(size, placement)
        self.projection = placement.parameter(hidden_size, size)

    def places(self, patches: ImagePatches) -> NDArray[np.int64]:
        """Where its patches are, [N, 2]."""
        return patches.positions()

    @torch.no_grad()
    def forward(self, values: Tensor, places: Tensor, _lengths: Sequence[int]) -> Tensor:
        """values uint8 [N, V], places int64 [N, 2] -> rows [N, H]. Bits of a row may depend on how many are multiplied
        together, and knows nothing of other rows of its image."""
        x = values.to(torch.float32).div_(255).to(self.patch_weight.dtype)
        x = functional.linear(self.patch_norm(x), self.patch_weight, self.patch_bias)
        x = self.embedded_norm(x)
        x = self.placed_norm(x + (self.positions[places[:, 0], 0] + self.positions[places[:, 1], 1]))
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.images.rms_norm_eps)
        return functional.linear(normed.to(x.dtype), self.projection)
