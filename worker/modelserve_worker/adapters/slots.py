"""Slots of device memory for adapters, and copies of adapters in host memory, of one rank.

A slot is one stretch of memory that has both factors of every matrix that may be adapted, and so is an adapter in host
memory: it comes into a slot by one copy, on the compute stream, between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.model.weight_format import TextLinear
from modelserve.sizing.adapters import AdaptedMatrix, AdapterLimits
from modelserve_worker.kernels.adapters.terms import SlotFactors
from modelserve_worker.layers.adapter_rows import ExpertTerm, MatrixTerm
from modelserve_worker.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from modelserve_worker.layers.moe import Experts
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM


@dataclass(frozen=True)
class AdaptedLayer:
    """A matrix that may be adapted, or those of a layer's experts. `outputs` has of each stacked matrix the rows that
    this rank holds, None: all; `inputs` the columns, None: all. Its factors begin at element `first` of a slot, A
    before B, and its scales at row `first_scales`, a row an expert."""

    linear: TextLinear
    layer: int | None  # None: of no layer
    matrix: StoredMatrix
    outputs: tuple[Shard | None, ...]
    inputs: Shard | None
    first_scales: int
    first: int

    @property
    def copies(self) -> int:
        """Of both factors: one, or as many as there are experts."""
        return max(1, self.matrix.experts)

    @property
    def scales(self) -> slice:
        """Rows of the scales of a slot."""
        return slice(self.first_scales, self.first_scales + self.copies)


@dataclass(frozen=True)
class HostAdapter:
    """One adapter in host memory: `factors` [elements of a slot], pinned where there is a GPU, and `scales` float32
    [matrices, of experts each, most parts]."""

    factors: Tensor
    scales: Tensor


class AdapterSlots:
    """Makes room in `model`, whose products add the terms from then on in steps that have adapters."""

    def __init__(self, model: Gemma4ForCausalLM, limits: AdapterLimits) -> None:
        self.limits = limits
        self.layers = tuple(_layers(model, limits))
        self.by_name = {(each.linear, each.layer): each for each in self.layers}
        self.device = device = model.norm.weight.device
        self.dtype, self.pins = model.dtype, device.type == "cuda"
        self.elements = sum(_elements(each, limits.rank) for each in self.layers)
        self.most_parts = max((len(each.matrix.parts) for each in self.layers), default=1)
        self._factors = torch.zeros(limits.slots, self.elements, dtype=model.dtype, device=device)
        self.scale_rows = sum(each.copies for each in self.layers)
        shape = (limits.slots, self.scale_rows, self.most_parts)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device)
        operations, self.rows = model.operations, model.placement.adapter_rows
        self.factors: list[SlotFactors] = []  # of each layer
        for each in self.layers:
            a, b = factor_views(self._factors, each, limits.rank)
            parts = each.matrix.parts
            if each.matrix.experts:
                factors = SlotFactors(a, b, self._scales[:, each.scales, : len(parts)], parts)
                each.matrix.expert_term = ExpertTerm(factors, self.rows, operations.expert_terms)
            else:
                factors = SlotFactors(a, b, self._scales[:, each.first_scales], parts)
                each.matrix.term = MatrixTerm(factors, self.rows, operations.adapter_terms)
            self.factors.append(factors)

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return self._factors.nbytes + self._scales.nbytes

    def place(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter into a slot on the current stream, behind the steps that read what was there."""
        self._factors[slot].copy_(adapter.factors, non_blocking=True)
        self._scales[slot].copy_(adapter.scales, non_blocking=True)


def factor_views(memory: Tensor, layer: AdaptedLayer, rank: int) -> tuple[Tensor, Tensor]:
    """A [..., parts * rank, inputs] and B [..., outputs, rank] of one matrix in the memory [..., elements] of slots; of
    experts [..., experts, parts * rank, inputs] and [..., experts, outputs, rank]."""
    matrix = layer.matrix
    rows = len(matrix.parts) * rank
    middle = layer.first + layer.copies * rows * matrix.columns
    end = middle + layer.copies * matrix.rows * rank
    before = (*memory.shape[:-1], layer.copies) if matrix.experts else memory.shape[:-1]
    a = memory[..., layer.first : middle].view(*before, rows, matrix.columns)
    return a, memory[..., middle:end].view(*before, matrix.rows, rank)


def _elements(layer: AdaptedLayer, rank: int) -> int:
    matrix = layer.matrix
    return AdaptedMatrix(layer.linear, matrix.parts, matrix.columns, matrix.experts).elements(rank)


def _layers(model: Gemma4ForCausalLM, limits: AdapterLimits) -> Iterator[AdaptedLayer]:
    first_scales = first = 0
    for linear, layer, module in _linears(model):
        if linear not in limits.targets:
            continue
        found = AdaptedLayer(linear, layer, *_held(linear, module), first_scales, first)
        yield found
        first_scales, first = first_scales + found.copies, first + _elements(found, limits.rank)


def _held(
    linear: TextLinear, module: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear | Experts
) -> tuple[StoredMatrix, tuple[Shard | None, ...], Shard | None]:
    """The matrix, and the outputs and inputs of it that this rank holds."""
    if isinstance(module, Experts):
        if linear is TextLinear.EXPERT_GATE_UP:
            return module.gate_up, (module.shard, module.shard), None
        return module.down, (None,), module.shard
    outputs: tuple[Shard | None, ...] = (None,) * len(module.matrix.parts)
    if isinstance(module, ColumnParallelLinear):
        outputs = module.shards
    return module.matrix, outputs, module.shard if isinstance(module, RowParallelLinear) else None


def _linears(
    model: Gemma4ForCausalLM,
) -> Iterator[tuple[TextLinear, int | None, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear | Experts]]:
    for index, layer in enumerate(model.decoder_layers()):
        yield TextLinear.QKV, index, layer.attention.qkv
        yield TextLinear.OUTPUT, index, layer.attention.o
        yield TextLinear.GATE_UP, index, layer.mlp.gate_up
        yield TextLinear.DOWN, index, layer.mlp.down
        if layer.moe is not None:
            yield TextLinear.EXPERT_GATE_UP, index, layer.moe.experts
            yield TextLinear.EXPERT_DOWN, index, layer.moe.experts
        if layer.per_layer_input is not None:
            yield TextLinear.LAYER_INPUT_GATE, index, layer.per_layer_input.gate
            yield TextLinear.LAYER_PROJECTION, index, layer.per_layer_input.projection
    if model.per_layer_embedding is not None:
        yield TextLinear.MODEL_PROJECTION, None, model.per_layer_embedding.projection
