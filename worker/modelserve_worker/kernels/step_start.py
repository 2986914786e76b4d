"""What a step computes before the embedding and after sampling: its tokens and rotations, the tokens that it leaves.

Tokens that the last step sampled never leave the device: `last_tokens` int32 has one entry per slot. The plain twins
of the kernels behind the doors are here too.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cos and sin, float32 [T, P]


class StepDoors(Protocol):
    """These operations on one kind of device. T is the number of rows of the step, S of those that sample."""

    def tokens(self, ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
        """ids, or where one is below 0 the last token of the row's slot; ids and slots int32 [T] -> int32 [T].

        A slot below 0, of padding, counts as slot 0.
        """
        ...

    def rotations(self, positions: Tensor, first: Tensor, second: Tensor) -> tuple[Rotation, Rotation]:
        """cos and sin of positions [T], of any integer dtype, times each of two float32 [P] of radians per position."""
        ...

    def keep_tokens(self, sampled: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        """Write sampled int64 [S] to their slots, int32 [S]; a token below 0, of a broken row, as 0."""
        ...


def cos_sin(positions: Tensor, inverse_frequencies: Tensor) -> Rotation:
    """cos and sin, float32 [T, P], for positions [T] of any integer dtype and float32 [P]."""
    angles = positions.float().unsqueeze(-1) * inverse_frequencies
    return angles.cos(), angles.sin()


class PlainStep:
    """The doors in plain PyTorch, on any device."""

    def tokens(self, ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
        return torch.where(ids < 0, last_tokens[slots.clamp(min=0)], ids)

    def rotations(self, positions: Tensor, first: Tensor, second: Tensor) -> tuple[Rotation, Rotation]:
        return cos_sin(positions, first), cos_sin(positions, second)

    def keep_tokens(self, sampled: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        last_tokens.index_copy_(0, slots.long(), sampled.clamp(min=0).int())


@cache
def step_doors(device: torch.device) -> StepDoors:
    """The implementation for a device, chosen once: Triton kernels on CUDA, the plain twins elsewhere."""
    if device.type != "cuda":
        return PlainStep()
    from modelserve_worker.kernels.step_start_triton import TritonStep

    return TritonStep()
