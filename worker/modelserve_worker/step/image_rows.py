"""Rows of images on the device: made once of their patches, and kept while chunks of a prompt still want some."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from modelserve_worker.embedded_spans import ImagePatches
from modelserve_worker.models.image_embedder import ImageEmbedder
from modelserve_worker.models.image_tower import ImageTower
from modelserve_worker.step.staging import upload


def rows_of(images: Sequence[ImagePatches], embedder: ImageTower | ImageEmbedder) -> Tensor:
    """Rows [sum of N, H] of whole images, one behind the other."""
    device, values = embedder.projection.device, [each.values for each in images]
    sent = upload(values[0] if len(values) == 1 else np.concatenate(values), device)
    places = upload(np.concatenate([embedder.places(each) for each in images]), device)
    made: Tensor = embedder(sent, places, [len(each) for each in images])
    return made


def packed(lengths: Sequence[int], *, most: int) -> Iterator[slice]:
    """Which images of so many rows to make together: in order, `most` rows at most, or one image."""
    first, rows = 0, 0
    for number, length in enumerate(lengths):
        if number > first and rows + length > most:
            yield slice(first, number)
            first, rows = number, 0
        rows += length
    if lengths:
        yield slice(first, len(lengths))


class KeptRows:
    """Room for all rows of some images, [images, rows, H]. Where there is none left, the one that was used longest ago
    goes: whoever wants it makes it again."""

    def __init__(self, images: int, rows: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.empty(images, rows, hidden_size, dtype=dtype, device=device)
        self._places: OrderedDict[tuple[int, int], int] = OrderedDict()  # the last used at the end
        self._free = list(range(images))

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def keep(self, name: tuple[int, int], rows: Tensor) -> None:
        """Rows [N, H] of an image that is not kept, under its slot and number."""
        if not len(self._rows) or len(rows) > self._rows.shape[1]:
            return
        place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        self._rows[place, : len(rows)].copy_(rows)
        self._places[name] = place

    def find(self, name: tuple[int, int]) -> Tensor | None:
        """[rows, H], of which the image's come first."""
        if name not in self._places:
            return None
        self._places.move_to_end(name)
        return self._rows[self._places[name]]

    def drop(self, name: tuple[int, int]) -> None:
        if (place := self._places.pop(name, None)) is not None:
            self._free.append(place)

    def drop_slot(self, slot: int) -> None:
        """All that its request has kept."""
        for name in [name for name in self._places if name[0] == slot]:
            self.drop(name)
