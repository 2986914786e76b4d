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
from modelserve_worker.layers.adapter_rows import MatrixTerm
from modelserve_worker.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM


@dataclass(frozen=True)
class AdaptedLayer:
    """A matrix that may be adapted. `outputs` has of each stacked matrix the rows that this rank holds, None: all;
    `inputs` the columns, None: all. Its factors begin at element `first` of a slot, A before B."""

    linear: TextLinear
    layer: int | None  # None: of no layer
    matrix: StoredMatrix
    outputs: tuple[Shard | None, ...]
    inputs: Shard | None
    number: int
    first: int


@dataclass(frozen=True)
class HostAdapter:
    """One adapter in host memory: `factors` [elements of a slot], pinned where there is a GPU, and `scales` float32
    [matrices, most parts]."""

    factors: Tensor
    scales: Tensor


class AdapterSlots:
    """Makes room in `model`, whose products add the terms from then on in steps that have adapters."""

    def __init__(self, model: Gemma4ForCausalLM, limits: AdapterLimits) -> None:
        self.limits = limits
        self.layers = tuple(_layers(model, limits))
        self.by_name = {(each.linear, each.layer): each for each in self.layers}
        device = model.norm.weight.device
        self.dtype, self.pins = model.dtype, device.type == "cuda"
        self.elements = sum(_elements(each, limits.rank) for each in self.layers)
        self.most_parts = max((len(each.matrix.parts) for each in self.layers), default=1)
        self._factors = torch.zeros(limits.slots, self.elements, dtype=model.dtype, device=device)
        shape = (limits.slots, len(self.layers), self.most_parts)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device)
        backend, rows = model.operations.adapter_terms, model.placement.adapter_rows
        for each in self.layers:
            a, b = factor_views(self._factors, each, limits.rank)
            factors = SlotFactors(a, b, self._scales[:, each.number], each.matrix.parts)
            each.matrix.term = MatrixTerm(factors, rows, backend)

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return self._factors.nbytes + self._scales.nbytes

    def place(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter into a slot on the current stream, behind the steps that read what was there."""
        self._factors[slot].copy_(adapter.factors, non_blocking=True)
        self._scales[slot].copy_(adapter.scales, non_blocking=True)


def factor_views(memory: Tensor, layer: AdaptedLayer, rank: int) -> tuple[Tensor, Tensor]:
    """A [..., parts * rank, inputs] and B [..., outputs, rank] of one matrix in the memory [..., elements] of slots."""
    matrix = layer.matrix
    rows = len(matrix.parts) * rank
    middle = layer.first + rows * matrix.columns
    before = memory.shape[:-1]
    a = memory[..., layer.first : middle].view(*before, rows, matrix.columns)
    return a, memory[..., middle : middle + matrix.rows * rank].view(*before, matrix.rows, rank)


def _elements(layer: AdaptedLayer, rank: int) -> int:
    matrix = layer.matrix
    return AdaptedMatrix(layer.linear, matrix.parts, matrix.columns).elements(rank)


def _layers(model: Gemma4ForCausalLM, limits: AdapterLimits) -> Iterator[AdaptedLayer]:
    number = first = 0
    for linear, layer, module in _linears(model):
        if linear not in limits.targets:
            continue
        matrix = module.matrix
        outputs: tuple[Shard | None, ...] = (None,) * len(matrix.parts)
        if isinstance(module, ColumnParallelLinear):
            outputs = module.shards
        inputs = module.shard if isinstance(module, RowParallelLinear) else None
        found = AdaptedLayer(linear, layer, matrix, outputs, inputs, number, first)
        yield found
        number, first = number + 1, first + _elements(found, limits.rank)


def _linears(
    model: Gemma4ForCausalLM,
) -> Iterator[tuple[TextLinear, int | None, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear]]:
    for index, layer in enumerate(model.decoder_layers()):
        yield TextLinear.QKV, index, layer.attention.qkv
        yield TextLinear.OUTPUT, index, layer.attention.o
        yield TextLinear.GATE_UP, index, layer.mlp.gate_up
        yield TextLinear.DOWN, index, layer.mlp.down
        if layer.per_layer_input is not None:
            yield TextLinear.LAYER_INPUT_GATE, index, layer.per_layer_input.gate
            yield TextLinear.LAYER_PROJECTION, index, layer.per_layer_input.projection
    if model.per_layer_embedding is not None:
        yield TextLinear.MODEL_PROJECTION, None, model.per_layer_embedding.projection
