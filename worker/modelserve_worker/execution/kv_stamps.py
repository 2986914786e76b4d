"""Debug stamps: who wrote each cache row, and the check that attention read exactly what it may.

A stamp is (request, position, layer) in one int64. Each owning layer has a stamp per token slot of its page kind. The
two kinds share bytes, so a write also erases the stamps of the other kind's pages that it overlaps. Everything here
synchronises with the device: it is for tests and for hunting a fault.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelserve.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry

_POSITION_BITS = 24
_LAYER_BITS = 10
_EMPTY = -1


def request_number(request_id: str) -> int:
    """A number of 29 bits that stands for a request in stamps: the same on every rank, with no table to keep."""
    return zlib.crc32(request_id.encode()) >> 3


def stamp(requests: Tensor | int, layer: int, positions: Tensor) -> Tensor:
    """Stamps int64 of rows of one layer: `requests` (numbers, one or one per row) at `positions`."""
    return positions | (layer << _POSITION_BITS) | (requests << (_POSITION_BITS + _LAYER_BITS))


def describe(value: int) -> str:
    """A stamp in words."""
    if value == _EMPTY:
        return "a row never written"
    position = value & ((1 << _POSITION_BITS) - 1)
    layer = (value >> _POSITION_BITS) & ((1 << _LAYER_BITS) - 1)
    return f"position {position} of request #{value >> (_POSITION_BITS + _LAYER_BITS)} in layer {layer}"


class KVStamps:
    """Stamps of every token slot, on the CPU: per owning layer [pages, page_tokens] int64."""

    def __init__(self, geometry: CacheGeometry, num_pages: dict[LayerKind, int], *, pool_bytes: int) -> None:
        self._geometry = geometry
        self._pool_bytes = pool_bytes
        self._num_pages = num_pages
        self._layers = {
            layer: torch.full((num_pages[spec.kind], spec.page_tokens), _EMPTY, dtype=torch.int64)
            for spec in (geometry.sliding_page, geometry.global_page)
            for layer in spec.layers
        }
        self._kind = {
            layer: spec.kind for spec in (geometry.sliding_page, geometry.global_page) for layer in spec.layers
        }

    def write(self, layer: int, slots: Tensor, stamps: Tensor) -> None:
        """Stamp token slots (view row * page_tokens + token) of one layer."""
        kind = self._kind[layer]
        slots = slots.cpu()
        self._layers[layer].view(-1)[slots] = stamps.cpu()
        for row in torch.unique(slots // self._geometry.page(kind).page_tokens).tolist():
            self._erase_other(kind, row)

    def move(self, kind: LayerKind, source: int, destination: int) -> None:
        for layer, owner in self._kind.items():
            if owner is kind:
                self._layers[layer][destination] = self._layers[layer][source]
        self._erase_other(kind, destination)

    def read_pages(self, layer: int, page_rows: Tensor) -> Tensor:
        """Stamps [P * page_tokens] of whole pages; page_rows int64 [P]."""
        return self._layers[layer][page_rows.cpu()].view(-1)

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        """Stamps [N] of token slots (view row * page_tokens + token) int64 [N]."""
        return self._layers[layer].view(-1)[slots]

    def _erase_other(self, kind: LayerKind, row: int) -> None:
        other = LayerKind.GLOBAL if kind is LayerKind.SLIDING else LayerKind.SLIDING
        size = self._geometry.page(other).page_bytes
        if not size:
            return
        own = self._geometry.page(kind).page_bytes
        start = self._start(kind) + row * own - self._start(other)
        first, last = max(0, start // size), min(self._num_pages[other] - 1, (start + own - 1) // size)
        for layer, owner in self._kind.items():
            if owner is other and first <= last:
                self._layers[layer][first : last + 1] = _EMPTY

    def _start(self, kind: LayerKind) -> int:
        if kind is LayerKind.SLIDING:
            return 0
        return self._pool_bytes - self._num_pages[kind] * self._geometry.page(kind).page_bytes


@dataclass
class ReadAudit:
    """What one request's queries read in one layer, block by block; `check` compares it with what they may read."""

    request: int
    layer: int
    producer: int
    query_positions: Tensor  # [Tq] int64, CPU
    window: int | None  # None: a global layer
    _blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def observe(self, stamps: Tensor, mask: Tensor) -> None:
        """Note the stamps [K] of one block of keys and the mask [Tq, K] that attention applied to it."""
        self._blocks.append((stamps.cpu(), mask.cpu()))

    def check(self) -> None:
        """Raise AssertionError unless each query read exactly [max(0, p - W + 1) .. p] (global layers: [0 .. p])."""
        stamps = torch.cat([block[0] for block in self._blocks])
        mask = torch.cat([block[1] for block in self._blocks], dim=1)
        for row, position in enumerate(self.query_positions.tolist()):
            first = 0 if self.window is None else max(0, position - self.window + 1)
            expected = stamp(self.request, self.producer, torch.arange(first, position + 1))
            read = stamps[mask[row]].sort().values
            if not torch.equal(read, expected):
                wrong = sorted(set(read.tolist()) ^ set(expected.tolist())) or read.tolist()
                raise AssertionError(
                    f"layer {self.layer}: the query at position {position} of request #{self.request} read "
                    f"{len(read)} rows and may read positions {first}..{position} ({len(expected)} rows); "
                    f"first difference: {describe(wrong[0])}"
                )
