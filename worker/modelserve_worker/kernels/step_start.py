"""What a step computes before the embedding and after sampling: its tokens and rotations, the tokens that it leaves.

Tokens that the last step sampled never leave the device: `slot_tokens` int32 [slots, 1 + k] has the last one of each
slot and the k drafts that are proposed to follow it, `slot_positions` int32 [slots] the position of the last one. A
step that is launched before it is known how many drafts of the one before are accepted assumes that all are; `settle`
moves it back to where its requests are. Their references in plain PyTorch are here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from modelserve_worker.kernels.step import Draws

Rotation = tuple[Tensor, Tensor]  # cos and sin, float32 [T, P]


class StepBackend(Protocol):
    """These operations on one kind of device. T is the number of rows of the step, N of those that get a token, S of
    the segments that these belong to."""

    def tokens(self, ids: Tensor, slots: Tensor, slot_tokens: Tensor) -> Tensor:
        """ids and slots int32 [T]: an id of -1 - j becomes token j of the row's slot, in place. Returns ids.

        A slot below 0, of padding, counts as slot 0.
        """
        ...

    def rotations(self, positions: Tensor, first: Tensor, second: Tensor) -> tuple[Rotation, Rotation]:
        """cos and sin of positions [T], of any integer dtype, times each of two float32 [P] of radians per position."""
        ...

    def settle(self, placed: Sequence[tuple[Tensor, Tensor]], assumed: Tensor, slot_positions: Tensor) -> None:
        """In place: positions or counts of rows, each int32 with the rows' slots (below 0: padding, left alone), that
        were made for slots at `assumed` int32 [slots] (below 0: that is where it is) -> those of where slots are. At
        most four pairs."""
        ...

    def accept(
        self, sampled: Tensor, fed: Tensor, positions: Tensor, draws: Draws, slot_tokens: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """How many of the sampled tokens int64 [N] count, of each segment: int32 [S].

        The token of a row counts while the tokens before it, of its segment, are those that the rows behind them were
        fed with; `fed` and `positions` int32 [T]. The last one that counts is written to its slot, one below 0, of a
        broken row, as 0; with k > 0 its position too.
        """
        ...


def cos_sin(positions: Tensor, inverse_frequencies: Tensor) -> Rotation:
    """cos and sin, float32 [T, P], for positions [T] of any integer dtype and float32 [P]."""
    angles = positions.float().unsqueeze(-1) * inverse_frequencies
    return angles.cos(), angles.sin()


class PlainStep:
    """The operations in plain PyTorch, on any device."""

    def tokens(self, ids: Tensor, slots: Tensor, slot_tokens: Tensor) -> Tensor:
        return ids.copy_(torch.where(ids < 0, slot_tokens[slots.clamp(min=0), (-1 - ids).clamp(min=0)], ids))

    def rotations(self, positions: Tensor, first: Tensor, second: Tensor) -> tuple[Rotation, Rotation]:
        return cos_sin(positions, first), cos_sin(positions, second)

    def settle(self, placed: Sequence[tuple[Tensor, Tensor]], assumed: Tensor, slot_positions: Tensor) -> None:
        moved = torch.where(assumed >= 0, slot_positions - assumed, 0)
        for values, slots in placed:
            values.add_(torch.where(slots >= 0, moved[slots.clamp(min=0)], 0))

    def accept(
        self, sampled: Tensor, fed: Tensor, positions: Tensor, draws: Draws, slot_tokens: Tensor, slot_positions: Tensor
    ) -> Tensor:
        firsts, counts = draws.firsts.long(), torch.ones_like(draws.lengths)
        right = torch.ones_like(firsts, dtype=torch.bool)
        for offset in range(1, slot_tokens.shape[1]):
            right &= draws.lengths > offset
            at = torch.where(right, firsts + offset, firsts + 1).clamp(max=len(sampled))
            right &= sampled[at - 1] == fed[torch.where(right, draws.rows.long() + offset, 0)]
            counts += right
        slot_tokens[draws.slots.long(), 0] = sampled[firsts + counts - 1].clamp(min=0).int()
        if slot_tokens.shape[1] > 1:
            slot_positions[draws.slots.long()] = positions[draws.rows + counts - 1] + 1
        return counts
