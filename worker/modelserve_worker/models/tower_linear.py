"""Linears of encoders, whose inputs and outputs some checkpoints bound, and which tensors fill them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.weight_source import WeightSource, whole_tensor

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class TowerLinear(nn.Module):
    """Matrices [O_i, I] that take the same input, one below the other, each with its own bounds where there are any."""

    def __init__(self, inputs: int, outputs: tuple[int, ...], placement: Placement, *, clipped: bool) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = placement.parameter(sum(outputs), inputs)
        self.bounds = placement.parameter(len(outputs), len(BOUNDS)) if clipped else None

    @cached_property
    def _limits(self) -> list[list[float]]:
        """On the host, once the weights are there."""
        assert self.bounds is not None
        return self.bounds.tolist()

    def forward(self, x: Tensor) -> Tensor:
        """x [n, I] -> [n, sum of O_i], side by side."""
        if self.bounds is None:
            return functional.linear(x, self.weight)
        limits, sizes = self._limits, list(self.outputs)
        alike = all(each[:2] == limits[0][:2] for each in limits)
        if alike:
            made = functional.linear(x.clamp(*limits[0][:2]), self.weight)
        else:
            made = x.new_empty(len(x), len(self.weight))
        parts = zip(torch.split(made, sizes, -1), torch.split(self.weight, sizes), limits, strict=True)
        for part, matrix, (lowest, highest, *bounds) in parts:
            if not alike:
                torch.mm(x.clamp(lowest, highest), matrix.t(), out=part)
            part.clamp_(*bounds)
        return made


def linear_sources(names: list[str], linear: TowerLinear) -> Iterator[WeightSource]:
    """The matrices of one input, and of each its bounds, which files hold as numbers without a shape."""
    for number, (name, part) in enumerate(zip(names, torch.split(linear.weight, list(linear.outputs)), strict=True)):
        yield from whole_tensor(f"{name}.linear.weight", part)
        if linear.bounds is not None:
            for at, bound in enumerate(BOUNDS):
                yield from whole_tensor(f"{name}.{bound}", linear.bounds[number, at : at + 1])
