"""Rows of images of a model with a tower: an encoder over small patches, averaged by squares, projected.

    x   = W (2 p / 255 - 1) + table[0, column] + table[1, row]
    x  += norm(attention(norm(x))),  x += norm(mlp(norm(x)))          in each layer
    row = P (y / rms(y)),  y = sqrt(h) mean of a soft token's patches, which larger towers standardise: (y - bias) scale

Patches of a soft token lie one behind the other, so a mean is over consecutive rows. Attention is over all patches of
an image and over no other's, with the scale 1: heads of queries, keys and values are normed, the last without a weight.
Of each head the first half turns by the patch's column, the second by its row. Smaller towers bound what goes into and
comes out of each linear, by numbers that the checkpoint has. Rows are not multiplied by sqrt(H).

Plain PyTorch on every device; every rank holds the tower whole, and has the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from modelserve.model.image_tower import TowerArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve_worker.embedded_spans import ImagePatches
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.tower_linear import TowerLinear


class TowerLayer(nn.Module):
    """Attention and a gated MLP, each with a norm before and behind it."""

    def __init__(self, tower: TowerArchitecture, placement: Placement, *, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps = tower.heads, tower.head_dim, eps
        hidden, width, attention = tower.hidden_size, tower.intermediate_size, tower.attention_size
        clipped = tower.clipped
        self.qkv = TowerLinear(hidden, (attention,) * 3, placement, clipped=clipped)
        self.o = TowerLinear(attention, (hidden,), placement, clipped=clipped)
        self.gate_up = TowerLinear(hidden, (width,) * 2, placement, clipped=clipped)
        self.down = TowerLinear(width, (hidden,), placement, clipped=clipped)
        self.qk_norm = placement.parameter(2, tower.head_dim)
        self.input_norm, self.attended_norm = placement.parameter(hidden), placement.parameter(hidden)
        self.mlp_norm, self.added_norm = placement.parameter(hidden), placement.parameter(hidden)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """x [n, h], changed in place, of images of so many patches; turn: `angles` [n, 1, 1, d]."""
        x += self._norm(self._attended(self._norm(x, self.input_norm), turn, lengths), self.attended_norm)
        x += self._norm(self._mlp(self._norm(x, self.mlp_norm)), self.added_norm)
        return x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.eps)

    def _attended(self, x: Tensor, turn: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3, self.heads, self.head_dim)
        # Heads are short rows and many, of which PyTorch's norm takes a block of threads each.
        lengths_of_heads = torch.linalg.vector_norm(qkv, dim=-1, keepdim=True, dtype=torch.float32)
        qkv.mul_(lengths_of_heads.square_().div_(self.head_dim).add_(self.eps).rsqrt_())
        qk = turned(qkv[:, :2] * self.qk_norm[:, None], turn)
        # [n, heads, d] each; nothing but the patches of one image meet, and no device holds their scores.
        parts = (torch.split(each, list(lengths)) for each in (qk[:, 0], qk[:, 1], qkv[:, 2]))
        attended = [_attend(*image) for image in zip(*parts, strict=True)]
        del qkv, qk
        made: Tensor = self.o(attended[0] if len(attended) == 1 else torch.cat(attended))
        return made

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        gated = functional.gelu(gate, approximate="tanh").mul_(up)
        del gate, up
        made: Tensor = self.down(gated)
        return made


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[n, heads, d] each -> [n, heads d]."""
    q, k, v = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
    return attended[0].transpose(0, 1).flatten(1)


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [n, ..., d], given up, turned by [n, ..., d] `angles`: of each of two halves its first half with its second."""
    across = x.view(*x.shape[:-1], 2, 2, x.shape[-1] // 4).flip(-2).view(x.shape)
    return x.mul_(turn[0]).addcmul_(across, turn[1])


def angles(places: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, d] of patches at `places` [n, 2], column and row. Sines are of what is added: they have the
    other sign where the second half of a half is taken off its first."""
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=places.device) / (head_dim // 2)
    turns = places[:, :, None, None].float() / theta**exponents  # [n, 2, 1, d / 4]
    cosines = turns.cos().expand(-1, -1, 2, -1).flatten(1)
    sines = turns.sin()
    return cosines.to(dtype), torch.cat((-sines, sines), 2).flatten(1).to(dtype)


def small_places(patches: ImagePatches, pooled: int) -> NDArray[np.int64]:
    """Column and row [N pooled^2, 2] of the small patches of each soft token, row by row within it."""
    within = np.arange(pooled**2)
    inner = np.stack((within % pooled, within // pooled), axis=1)
    return (pooled * patches.positions()[:, None] + inner).reshape(-1, 2)


def small_patches(values: Tensor, *, pooled: int, side: int) -> Tensor:
    """Squares [N, 3 (pooled side)^2] cut into patches [N pooled^2, 3 side^2], in the order of `small_places`."""
    squares = values.view(-1, pooled, side, pooled, side * 3)
    return squares.transpose(2, 3).reshape(-1, side**2 * 3)


class ImageTower(nn.Module):
    """Parameters are allocated, not initialised: a loader fills them."""

    def __init__(self, images: ImageArchitecture, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        tower = images.tower
        assert tower is not None, "other models embed patches by themselves"
        self.images, self.tower = images, tower
        hidden, self.side = tower.hidden_size, images.patch_side // tower.pooled
        self.patch_weight = placement.parameter(hidden, 3 * self.side**2)
        self.positions = placement.parameter(2, images.positions, hidden)
        self.layers = nn.ModuleList(TowerLayer(tower, placement, eps=images.rms_norm_eps) for _ in range(tower.layers))
        standard = tower.standardised
        self.bias, self.scale = (placement.parameter(hidden) if standard else None for _ in range(2))
        self.projection = placement.parameter(hidden_size, hidden)
        if placement.device.type == "cuda":
            # It makes a plan for each new length, and images have hundreds. Nothing else here attends by PyTorch.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def places(self, patches: ImagePatches) -> NDArray[np.int64]:
        """Where its small patches are, [n, 2]."""
        return small_places(patches, self.tower.pooled)

    @torch.no_grad()
    def forward(self, values: Tensor, places: Tensor, lengths: Sequence[int]) -> Tensor:
        """values uint8 [N, V], places int64 [n, 2]: images of so many soft tokens, one behind the other -> rows [N, H].
        Bits of a row may depend on how many are encoded together."""
        x = self._embedded(values, places)
        tower = self.tower
        cos, sin = angles(places, head_dim=tower.head_dim, theta=tower.rope_theta, dtype=x.dtype)
        turn = cos[:, None, None], sin[:, None, None]
        counts = [length * tower.patches for length in lengths]
        for layer in self.layers:
            x = layer(x, turn, counts)
        return functional.linear(self._pooled(x), self.projection)

    def _embedded(self, values: Tensor, places: Tensor) -> Tensor:
        patches = small_patches(values, pooled=self.tower.pooled, side=self.side).to(torch.float32)
        patches = patches.div_(255).sub_(0.5).mul_(2).to(self.patch_weight.dtype)
        x = functional.linear(patches, self.patch_weight)
        return x.add_(self.positions[0, places[:, 0]] + self.positions[1, places[:, 1]])

    def _pooled(self, x: Tensor) -> Tensor:
        """[n, h] -> [N, h], normed; in float32, since towers' outputs are large."""
        hidden = x.shape[-1]
        y = x.view(-1, self.tower.patches, hidden).mean(1, dtype=torch.float32).mul_(hidden**0.5)
        if self.bias is not None and self.scale is not None:
            y = y.sub_(self.bias).mul_(self.scale)
        return functional.rms_norm(y.to(x.dtype), (hidden,), eps=self.images.rms_norm_eps)
