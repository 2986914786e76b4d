"""A layer of a drafter of the DFlash family: Qwen3's, with two norms, or Gemma 4's, with four and a scalar.

    Qwen3    x += attention(RMS(x)),                x += mlp(RMS(x))
    Gemma 4  x += RMS(attention(RMS(x))),           x = (x + RMS(mlp(RMS(x)))) * scalar

Keys and values of the rows before a block are no affair of the layer: `DFlash.context_rows` makes them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.weight_format import StoredType, TextLinear
from modelserve_worker.kernels.elementwise.elementwise import ElementwiseBackend, rms_normalize
from modelserve_worker.kernels.step_start import Rotation
from modelserve_worker.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.rotary import rotate


class DraftAttention(Protocol):
    """Attention of blocks over themselves and the rows before them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S, B, query heads, D], k and v [S, B, KV heads, D] of S blocks of B rows, normed and rotated; rows of v
        may lie apart. Returns [S, B, query heads * D].

        A row sees what the cache has of its slot's positions before the anchor's, within the layer's window those from
        anchor - window on, and of its block all rows, or where the layer is causal those up to itself. Scores are
        q.k times `attention_scale`, softmax in float32, grouped-query by consecutive heads.
        """
        ...


class KeysValues:
    """Projections to keys and values of all layers, one matrix, with what becomes of their results."""

    def __init__(self, architecture: DFlashArchitecture, placement: Placement) -> None:
        parallel, heads = placement.parallel, architecture.num_attention_heads
        kv = parallel.kv_shard(heads, architecture.num_key_value_heads).scaled(architecture.head_dim)
        self._head_dim, self._eps = architecture.head_dim, architecture.rms_norm_eps
        self._of_each, self._norms_values = architecture.values_per_row, architecture.stack == "gemma4"
        self._elementwise: ElementwiseBackend = placement.operations.elementwise
        layers, hidden = architecture.num_hidden_layers, architecture.hidden_size
        shards = [kv] * (self._of_each * layers)
        self.linear = ColumnParallelLinear(TextLinear.QKV, hidden, placement, shards=shards)
        self._rows = self._of_each * kv.size
        self._products = placement.operations.products(TextLinear.QKV, (self._rows, hidden), StoredType.BFLOAT16)

    def of_layer(self, x: Tensor, layer: int) -> Tensor:
        """x [T, H] -> [T, rows of the layer]."""
        weight = self.linear.matrix.dense()
        return self._products.dense(x, weight[layer * self._rows : (layer + 1) * self._rows])

    def finished(self, projected: Tensor, norm: RMSNorm, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """projected [T, rows of a layer], perhaps part of more columns -> K, normed and rotated, and V, both
        [T, KV heads, D]; rows of V may lie apart."""
        parts = projected.view(projected.shape[0], self._of_each, -1, self._head_dim)
        raw, values = parts[:, 0], parts[:, -1]
        keys = rotate(self._elementwise.rms_norm(raw, norm.weight, eps=self._eps), *rotation)
        if self._norms_values:
            values = rms_normalize(values, eps=self._eps).to(projected.dtype)
        return keys, values

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """[T, rows of all layers] -> those of each."""
        return torch.split(projected, self._rows, dim=-1)


class DraftMLP(nn.Module):
    """W_down(act(W_gate x) * W_up x), to be added over ranks."""

    def __init__(self, architecture: DFlashArchitecture, placement: Placement) -> None:
        super().__init__()
        self.elementwise = placement.operations.elementwise
        self.gelu = architecture.hidden_act == "gelu_pytorch_tanh"
        shard = placement.parallel.shard(architecture.intermediate_size, what="the drafter's intermediate_size")
        hidden = architecture.hidden_size
        self.gate_up = ColumnParallelLinear(TextLinear.GATE_UP, hidden, placement, shards=(shard, shard))
        self.down = RowParallelLinear(TextLinear.DOWN, hidden, placement, shard=shard, in_parts=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gelu:
            result: Tensor = self.down(self.gate_up.matrix.gated(x, self.elementwise))
            return result
        gate, up = self.gate_up(x)
        down: Tensor = self.down(functional.silu(gate) * up)
        return down


class BlockConvolution(nn.Module):
    """DFlash2's: a row and those before it in its block, weighted by channel, before and behind half a layer.

    y_t = sum over taps j of h_{t-j} (base_j + kappa_t,j), kappa from the row itself by groups of channels; h before the
    block is 0. Whole on every rank.
    """

    def __init__(self, architecture: DFlashArchitecture, placement: Placement) -> None:
        super().__init__()
        hidden, self.taps, self.group = (
            architecture.hidden_size, architecture.conv_kernel_size, architecture.conv_group_size,
        )  # fmt: skip
        self.base = placement.parameter(2, self.taps, hidden)
        self.projection = ReplicatedLinear(TextLinear.QKV, hidden, 2 * self.taps * (hidden // self.group), placement)

    def ahead(self, h: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """h [S * block, H] -> what goes into the half layer, and kappa [S * block, taps, groups] of what comes out."""
        kappa = self.projection(h).view(h.shape[0], 2, self.taps, -1)
        return self._convolved(h, kappa[:, 0], self.base[0], block), kappa[:, 1]

    def behind(self, h: Tensor, kappa: Tensor, block: int) -> Tensor:
        """Of what comes out of the half layer."""
        return self._convolved(h, kappa, self.base[1], block)

    def _convolved(self, h: Tensor, kappa: Tensor, base: Tensor, block: int) -> Tensor:
        rows = h.view(-1, block, h.shape[-1] // self.group, self.group)
        kappa = kappa.reshape(-1, block, self.taps, rows.shape[2], 1)
        result = torch.zeros_like(rows)
        for tap in range(self.taps):
            shifted = rows if tap == 0 else functional.pad(rows[:, :-tap], (0, 0, 0, 0, tap, 0))
            result = result + shifted * (base[tap].view(-1, self.group) + kappa[:, :, tap])
        return result.view(h.shape)


class DFlashLayer(nn.Module):
    """One rank's share of a layer. It takes its input normed and norms its result for the next one."""

    def __init__(self, architecture: DFlashArchitecture, placement: Placement, *, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.parallel, self.elementwise = placement.parallel, placement.operations.elementwise
        self.head_dim, self.eps, self.block = architecture.head_dim, architecture.rms_norm_eps, architecture.block_rows
        heads, hidden = architecture.num_attention_heads, architecture.hidden_size
        q = self.parallel.shard(heads, what="the drafter's num_attention_heads").scaled(self.head_dim)
        self.q = ColumnParallelLinear(TextLinear.QKV, hidden, placement, shards=[q])
        self.o = RowParallelLinear(TextLinear.OUTPUT, hidden, placement, shard=q, in_parts=False)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, placement, eps=self.eps) for _ in range(2))
        self.mlp = DraftMLP(architecture, placement)
        self.input_norm = RMSNorm(hidden, placement, eps=self.eps)
        self.feedforward_norm = RMSNorm(hidden, placement, eps=self.eps)
        gemma = architecture.stack == "gemma4"
        self.after_attention = RMSNorm(hidden, placement, eps=self.eps) if gemma else None
        self.after_feedforward = RMSNorm(hidden, placement, eps=self.eps) if gemma else None
        self.scalar = placement.parameter(1) if gemma else None
        convolves = architecture.conv_kernel_size > 0
        self.attention_conv = BlockConvolution(architecture, placement) if convolves else None
        self.mlp_conv = BlockConvolution(architecture, placement) if convolves else None

    def forward(
        self, x: Tensor, normed: Tensor, *, keys_values: KeysValues, next_norm: RMSNorm, rotation: Rotation,
        attention: DraftAttention,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x [S * B, H], given up: the result may take its place; normed is its `input_norm`; rotation of all rows.

        Returns the layer's result and the result's `next_norm`, both [S * B, H].
        """
        kappa = None
        if self.attention_conv is not None:
            normed, kappa = self.attention_conv.ahead(normed, self.block)
        q = self.q.stacked(normed).view(x.shape[0], -1, self.head_dim)
        q = rotate(self.elementwise.rms_norm(q, self.q_norm.weight, eps=self.eps), *rotation)
        k, v = keys_values.finished(keys_values.of_layer(normed, self.layer), self.k_norm, rotation)
        attended = attention.attend(self.layer, *(self._in_blocks(rows) for rows in (q, k, v)))
        delta = self.parallel.all_reduce(self.o(attended.flatten(0, 1)))
        if self.attention_conv is not None and kappa is not None:
            delta = self.attention_conv.behind(delta, kappa, self.block)
        x, normed = self._added(x, delta, self.after_attention, self.feedforward_norm, None)
        if self.mlp_conv is not None:
            normed, kappa = self.mlp_conv.ahead(normed, self.block)
        delta = self.parallel.all_reduce(self.mlp(normed))
        if self.mlp_conv is not None and kappa is not None:
            delta = self.mlp_conv.behind(delta, kappa, self.block)
        return self._added(x, delta, self.after_feedforward, next_norm, self.scalar)

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """[S * B, heads, D] -> [S, B, heads, D]; rows may lie apart."""
        return rows.view(-1, self.block, *rows.shape[1:])

    def _added(
        self, x: Tensor, delta: Tensor, delta_norm: RMSNorm | None, next_norm: RMSNorm, scalar: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if delta_norm is None:
            x = x + delta
            return x, self.elementwise.rms_norm(x, next_norm.weight, eps=self.eps)
        x, normed = self.elementwise.residual_norm(
            x, delta, delta_norm.weight, scalar=scalar, next_weight=next_norm.weight, eps=self.eps
        )
        assert normed is not None  # there is a next norm
        return x, normed
