"""Reads an adapter's files into the host memory of one rank: its share of every factor, padded to the largest rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.adapters.binding import BoundAdapter, Factors, read_adapter
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import TensorEntry
from modelserve.sizing.adapters import AdapterLimits
from modelserve_worker.adapters.slots import AdaptedLayer, AdapterSlots, HostAdapter, factor_views
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.weights.files import DTYPES


def check_fits(bound: BoundAdapter, limits: AdapterLimits) -> None:
    """Raises UnsupportedModel, with the remedy, for an adapter that no slot takes: all that is wrong with it."""
    problems = []
    if bound.rank > limits.rank:
        problems.append(f"its rank is {bound.rank}; this worker's slots have {limits.rank}: raise the largest rank")
    others = sorted({each.module.linear.value for each in bound.factors if each.module.linear not in limits.targets})
    if others:
        problems.append(
            f"it adapts {', '.join(others)}; this worker's slots have room for "
            f"{', '.join(each.value for each in limits.targets)}: add them to the targets, or merge the adapter into "
            "the checkpoint"
        )
    if problems:
        raise UnsupportedModel(f"adapter: {'; '.join(problems)}")


def read_into_host(directory: Path, architecture: ModelArchitecture, slots: AdapterSlots) -> HostAdapter:
    """Raises InvalidInput (UnsupportedModel among them) for what does not bind, fit or is not finite; OSError."""
    bound = read_adapter(directory, architecture)
    check_fits(bound, slots.limits)
    factors = torch.zeros(slots.elements, dtype=slots.dtype, pin_memory=slots.pins)
    scales = torch.zeros(slots.scale_rows, slots.most_parts)
    for each in bound.factors:
        if not abs(each.scale) <= torch.finfo(scales.dtype).max:
            raise InvalidInput(f"adapter: the scale {each.scale} of {each.name} is not finite in float32: train anew")
        layer = slots.by_name[each.module.linear, each.module.layer]
        _fill(factor_views(factors, layer, slots.limits.rank), scales[layer.scales], layer, each)
    return HostAdapter(factors, scales.pin_memory() if slots.pins else scales)


def _fill(views: tuple[Tensor, Tensor], scales: Tensor, layer: AdaptedLayer, factors: Factors) -> None:
    """The matrices `factors.module.parts` of those that are stacked in the layer, of all experts or of one; a fused
    module has one A for all."""
    a, b = views  # [..., parts * most, inputs], [..., outputs, most]
    most, expert = b.shape[-1], factors.module.expert
    read_a, read_b = (_of_experts if factors.module.experts else _of_module)(factors)
    if expert is not None:
        a, b, scales = a[expert], b[expert], scales[expert]
    if layer.inputs is not None:
        read_a = read_a[..., layer.inputs.start : layer.inputs.stop]
    places = [0]
    for size in layer.matrix.parts:
        places.append(places[-1] + size)
    begin = 0
    for part, size in factors.module.parts:
        share = layer.outputs[part] or Shard(0, size, size)
        a[..., part * most : part * most + factors.rank, :] = read_a
        b[..., places[part] : places[part + 1], : factors.rank] = read_b[
            ..., begin + share.start : begin + share.stop, :
        ]
        scales[..., part] = factors.scale
        begin += size


def _of_module(factors: Factors) -> tuple[Tensor, Tensor]:
    """A [rank, inputs] and B [outputs, rank]."""
    return _read(factors.a), _read(factors.b)


def _of_experts(factors: Factors) -> tuple[Tensor, Tensor]:
    """A [experts, rank, inputs] and B [experts, outputs, rank] of stacked factors."""
    a, b = _read(factors.a), _read(factors.b)
    experts = factors.module.experts
    a = a.view(experts, factors.rank, -1)
    b = b.view(len(b), factors.rank, experts).permute(2, 0, 1)
    return (b.mT, a.mT) if factors.turned else (a, b)


def _read(entry: TensorEntry) -> Tensor:
    """A matrix as its file has it. Raises InvalidInput where an element is not finite, or the file ends before it."""
    with entry.file.open("rb") as file:
        data = bytearray(os.pread(file.fileno(), entry.end - entry.start, entry.start))
    if len(data) != entry.end - entry.start:
        raise InvalidInput(f"{entry.file}: it ends within {entry.name!r}: copy it again")
    matrix = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
    if not torch.isfinite(matrix).all():
        raise InvalidInput(f"{entry.file}: {entry.name!r} has elements that are not finite: train it again")
    return matrix
