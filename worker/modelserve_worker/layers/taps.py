"""Copies of what some layers leave, for a drafter that makes its keys and values of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerTaps:
    """The residual streams behind the layers `layers`, of the rows of the step at work, side by side.

    `after` is the first layer that nothing is tapped of behind it: from there on rows may be left out.
    """

    def __init__(
        self, layers: Sequence[int], *, rows: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self.after = max(layers) + 1
        self._hidden = hidden
        self._columns = {layer: place * hidden for place, layer in enumerate(layers)}
        self._streams = torch.zeros(rows, len(layers) * hidden, dtype=dtype, device=device)

    def put(self, layer: int, stream: Tensor) -> None:
        """`stream` [T, H], whole on this rank, is what one of `layers` leaves."""
        first = self._columns[layer]
        self._streams[: len(stream), first : first + self._hidden].copy_(stream)

    def of(self, rows: int) -> Tensor:
        """Of the first `rows` rows of the step: [rows, len(layers) * H], until the next step."""
        return self._streams[:rows]
