"""Rows of sounds of E2B and E4B: two convolutions over a spectrum, a conformer, a projection.

    x    = W relu(norm(conv(relu(norm(conv(mel))))))            a row of four frames, each convolution of stride 2
    x   += ff(x) / 2;  x += norm(attention(norm(x)));  x += conv(x);  x += ff(x) / 2;  x = norm(x)       in each layer
    row  = P (y / rms(y)),  y = O x + b

Attention is over a row and the ones before it, `keys` in all, in float32: a query meets a key by what both are and by
how far apart they are, scores are capped by a tanh. A layer's convolution is over a row and the ones before it, too,
each column by itself. So rows look back alone, and a sound is encoded by itself as it is beside others: sounds lie one
behind the other, with a block of `keys` rows of zeros before each, and zeros behind it to whole blocks. Then a block's
keys are its own and those of the block before. Rows are not multiplied by sqrt(H).

Plain PyTorch on every device; every rank holds the tower whole, and has the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from modelserve.model.audio import AudioArchitecture
from modelserve.model.audio_tower import LINEAR_EPS, AudioTowerArchitecture
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.tower_linear import TowerLinear

_LONGEST_TURN = 10_000.0


class Blocks(NamedTuple):
    """Where rows of sounds are among blocks of B rows of K: `places` [N]; `real` [B K, 1], 1 where there is a row, of
    the tower's dtype; `seen` [B, 1, K, 2 K], which keys of the block before and of its own a row attends to."""

    places: Tensor
    real: Tensor
    seen: Tensor


def block_layout(
    lengths: Sequence[int], *, keys: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
    """`Blocks` of sounds of so many rows, on the host."""
    places, before = [], 0
    for length in lengths:
        places.append(before + keys + np.arange(length))
        before += keys + -(-length // keys) * keys
    at = np.concatenate(places)
    real = np.zeros(before, dtype=bool)
    real[at] = True
    here = real.reshape(-1, keys)
    both = np.concatenate((np.concatenate((np.zeros_like(here[:1]), here[:-1])), here), axis=1)
    distance = keys + np.arange(keys)[:, None] - np.arange(2 * keys)
    return at, real[:, None].astype(np.float32), both[:, None, None] & ((distance >= 0) & (distance < keys))


class AudioFeedForward(nn.Module):
    """Half of what it makes is added."""

    def __init__(self, tower: AudioTowerArchitecture, placement: Placement) -> None:
        super().__init__()
        self.tower = tower
        hidden, width = tower.hidden_size, tower.feed_forward_size
        self.up = TowerLinear(hidden, (width,), placement, clipped=tower.clipped)
        self.down = TowerLinear(width, (hidden,), placement, clipped=tower.clipped)
        self.norm_before, self.norm_behind = placement.parameter(hidden), placement.parameter(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, h], changed in place."""
        made = self.up(_norm(_cut(x.clone(), self.tower), self.norm_before))
        made = self.down(functional.silu(made, inplace=True))
        return x.add_(_norm(_cut(made, self.tower), self.norm_behind), alpha=self.tower.residual_weight)


class AudioAttention(nn.Module):
    """Over a row and those before it."""

    def __init__(self, tower: AudioTowerArchitecture, placement: Placement) -> None:
        super().__init__()
        self.tower = tower
        hidden = tower.hidden_size
        self.qkv = TowerLinear(hidden, (hidden,) * 3, placement, clipped=tower.clipped)
        self.out = TowerLinear(hidden, (hidden,), placement, clipped=tower.clipped)
        self.distances = placement.parameter(hidden, hidden)
        self.scale = placement.parameter(tower.head_dim)
        self.norm_before, self.norm_behind = placement.parameter(hidden), placement.parameter(hidden)

    def forward(self, x: Tensor, blocks: Blocks, turns: Tensor) -> Tensor:
        """x [B K, h], changed in place; turns: `sinusoids`."""
        attended = self._attended(_norm(_cut(x.clone(), self.tower), self.norm_before), blocks, turns)
        return x.add_(_norm(_cut(attended, self.tower), self.norm_behind))

    def _attended(self, x: Tensor, blocks: Blocks, turns: Tensor) -> Tensor:
        tower = self.tower
        shape = (-1, tower.keys, 3, tower.heads, tower.head_dim)
        q, k, v = self.qkv(x).float().view(shape).permute(2, 0, 3, 1, 4)  # [B, heads, K, d] each
        q = q * (tower.head_dim**-0.5 / math.log(2)) * functional.softplus(self.scale)
        far = functional.linear(turns, self.distances).view(-1, tower.heads, tower.head_dim).float()
        scores = q @ _with_block_before(k).transpose(2, 3)
        scores *= math.log(1 + math.e) / math.log(2)
        scores += by_distance(q @ far.permute(1, 2, 0))
        scores = scores.div_(tower.logit_cap).tanh_().mul_(tower.logit_cap)
        scores.masked_fill_(~blocks.seen, tower.invalid_logit)
        attended = scores.softmax(-1) @ _with_block_before(v)
        made: Tensor = self.out(attended.transpose(1, 2).reshape(len(x), -1).to(x.dtype))
        return made


def _with_block_before(x: Tensor) -> Tensor:
    """[B, heads, K, d] -> [B, heads, 2 K, d], with zeros before the first."""
    return torch.cat((torch.cat((torch.zeros_like(x[:1]), x[:-1])), x), dim=2)


def by_distance(x: Tensor) -> Tensor:
    """Scores [..., K, K + 1] by distance, from K down to 0, as [..., K, 2 K] by key; of what is out of sight any."""
    keys = x.shape[-2]
    number = torch.arange(2 * keys, device=x.device) - torch.arange(keys, device=x.device)[:, None]
    return x.gather(-1, number.clamp_(0, keys).expand(*x.shape[:-1], 2 * keys))


def sinusoids(tower: AudioTowerArchitecture, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[K + 1, h]: of distances K down to 0 the sines and then the cosines of h / 2 turns of 1 to 10^4."""
    count = tower.hidden_size // 2
    step = math.log(_LONGEST_TURN) / max(count - 1, 1)
    turns = torch.exp(torch.arange(count, device=device) * -step)
    angles = torch.arange(tower.keys, -1, -1, device=device)[:, None] * turns
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)


class AudioConvolution(nn.Module):
    """A gate, and each column with the rows before it."""

    def __init__(self, tower: AudioTowerArchitecture, placement: Placement, *, eps: float) -> None:
        super().__init__()
        self.tower, self.eps = tower, eps
        hidden = tower.hidden_size
        self.gated = TowerLinear(hidden, (2 * hidden,), placement, clipped=tower.clipped)
        self.out = TowerLinear(hidden, (hidden,), placement, clipped=tower.clipped)
        self.weight = placement.parameter(hidden, 1, tower.kernel)
        self.norm_before, self.norm_within = placement.parameter(hidden), placement.parameter(hidden)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """x [n, h], changed in place; `real` as in Blocks: the rows before a sound's first are zeros."""
        made = functional.glu(self.gated(_norm(x, self.norm_before, self.eps)), dim=-1).mul_(real)
        before = functional.pad(made.t()[None], (self.tower.kernel - 1, 0))
        made = functional.conv1d(before, self.weight, groups=self.tower.hidden_size)[0].t().contiguous()
        made = functional.silu(_norm(_cut(made, self.tower), self.norm_within, self.eps), inplace=True)
        return x.add_(self.out(made))


class AudioLayer(nn.Module):
    def __init__(self, tower: AudioTowerArchitecture, placement: Placement, *, eps: float) -> None:
        super().__init__()
        self.tower = tower
        self.first = AudioFeedForward(tower, placement)
        self.attention = AudioAttention(tower, placement)
        self.convolution = AudioConvolution(tower, placement, eps=eps)
        self.second = AudioFeedForward(tower, placement)
        self.norm = placement.parameter(tower.hidden_size)

    def forward(self, x: Tensor, blocks: Blocks, turns: Tensor) -> Tensor:
        x = self.attention(self.first(x), blocks, turns)
        x = self.second(self.convolution(x, blocks.real))
        return _norm(_cut(x, self.tower), self.norm)


def _norm(x: Tensor, weight: Tensor, eps: float = LINEAR_EPS) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _cut(x: Tensor, tower: AudioTowerArchitecture) -> Tensor:
    """In place."""
    most = min(tower.most, torch.finfo(x.dtype).max)
    return x.clamp_(-most, most)


class AudioTower(nn.Module):
    """Parameters are allocated, not initialised: a loader fills them."""

    def __init__(self, audio: AudioArchitecture, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        tower = audio.tower
        assert tower is not None, "the 12B embeds frames by themselves"
        self.audio, self.tower = audio, tower
        first, second = tower.channels
        self.first, self.first_norm = placement.parameter(first, 1, 3, 3), placement.parameter(first)
        self.second, self.second_norm = placement.parameter(second, first, 3, 3), placement.parameter(second)
        self.entry = placement.parameter(tower.hidden_size, tower.subsampled_size)
        self.layers = nn.ModuleList(AudioLayer(tower, placement, eps=audio.rms_norm_eps) for _ in range(tower.layers))
        self.out = placement.parameter(audio.embed_size, tower.hidden_size)
        self.bias = placement.parameter(audio.embed_size)
        self.projection = placement.parameter(hidden_size, audio.embed_size)

    @torch.no_grad()
    def forward(self, values: Tensor, frames: Sequence[int], blocks: Blocks) -> Tensor:
        """values float32 [F, 128]: sounds of so many frames, one behind the other, and their `block_layout` -> rows
        [N, H]. Bits of a row may depend on how many are encoded together."""
        made = [self._subsampled(each) for each in torch.split(values, list(frames))]
        dtype, device = self.entry.dtype, values.device
        x = torch.zeros(len(blocks.real), self.tower.hidden_size, dtype=dtype, device=device)
        x.index_copy_(0, blocks.places, made[0] if len(made) == 1 else torch.cat(made))
        del made
        turns = sinusoids(self.tower, dtype=dtype, device=device)
        for layer in self.layers:
            x = layer(x, blocks, turns)
        y = functional.linear(x.index_select(0, blocks.places), self.out, self.bias)
        return functional.linear(functional.rms_norm(y, y.shape[-1:], eps=self.audio.rms_norm_eps), self.projection)

    def _subsampled(self, frames: Tensor) -> Tensor:
        """[F, 128] -> [N, h]. Each sound by itself: what convolutions see behind its end are zeros then, and what they
        make is as large as all layers' work."""
        x = frames.to(self.entry.dtype)[None, None]
        for weight, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            x = functional.conv2d(x, weight, stride=2, padding=1).permute(0, 2, 3, 1)
            x = functional.layer_norm(x, norm.shape, norm, None, self.audio.rms_norm_eps).relu_().permute(0, 3, 1, 2)
        return functional.linear(x[0].permute(1, 2, 0).flatten(1), self.entry)


class AudioEmbedder(nn.Module):
    """Of the 12B, which hears samples: row = P (s / rms(s)) of 640 samples s, 40 ms."""

    def __init__(self, audio: AudioArchitecture, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.audio = audio
        self.projection = placement.parameter(hidden_size, audio.embed_size)

    @torch.no_grad()
    def forward(self, values: Tensor) -> Tensor:
        """values float32 [N, 640] -> rows [N, H], each of its own frame alone."""
        x = values.to(self.projection.dtype)
        return functional.linear(functional.rms_norm(x, x.shape[-1:], eps=self.audio.rms_norm_eps), self.projection)
