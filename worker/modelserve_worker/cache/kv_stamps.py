"""Debug stamps: who wrote each cache row, and the check that attention read exactly what it may.

A stamp is (text, position, layer) in one int64. The text is the request alone or, where requests read each other's
rows, its tokens up to the position. Each owning layer has a stamp per token slot of its page kind. The
two kinds share bytes, so a write also erases the stamps of the other kind's pages that it overlaps. Everything here
synchronises with the device: it is for tests and for hunting a fault.

A drafter's layers have stamps too, by numbers behind those of a model: FULL_DRAFT_LAYERS + i and WINDOW_DRAFT_LAYERS +
i, the latter with DraftPages.page_tokens of each global page. A page is of a ring or of a context, and a write of one
erases the stamps of the other. What a draft reads at its anchor is what an audited query at the position before that
one may read, of the drafter's window.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import IN_FLIGHT, AdmittedRequest, ScheduledBatch

_POSITION_BITS = 24
_LAYER_BITS = 10
_EMPTY = -1
FULL_DRAFT_LAYERS, WINDOW_DRAFT_LAYERS = 768, 896


_Numbers = NDArray[np.int64]


class TextNumbers:
    """Numbers of 29 bits that stand for the texts of requests in stamps: the same on every rank, with no table to keep.

    Of a request that shares rows, the number at a position stands for its tokens up to there, whoever has computed the
    row; of another one, for the request.
    """

    def __init__(self) -> None:
        self._admitted: dict[int, AdmittedRequest] = {}  # by slot
        self._keys: dict[int, dict[int, bytes]] = {}  # of embeddings that rows begin from, by slot and position
        self._sums: dict[int, list[int]] = {}  # CRC-32 up to each position, by slot, of those that share rows
        self._step = -1

    def begin(
        self, batch: ScheduledBatch, slot_tokens: Tensor | None = None, slot_positions: Tensor | None = None
    ) -> None:
        """Take the tokens of a step, once. What the device knows: `slot_tokens` [slots, 1 + k], those IN_FLIGHT and the
        drafts behind them, and with k > 0 `slot_positions` [slots], where those are."""
        if batch.step == self._step:
            return
        self._step = batch.step
        for admitted in batch.admitted:
            self._admitted[admitted.slot] = admitted
            self._sums.pop(admitted.slot, None)
            self._keys[admitted.slot] = {at: s.key for s in admitted.spans for at in range(s.start, s.end)}
            if admitted.shares_rows_as is not None:
                self._sums[admitted.slot] = []
                self._extend(admitted.slot, 0, (*admitted.prompt_token_ids, *admitted.output_token_ids))
        known = batch.token_ids.tolist()
        spans = zip(batch.slots.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True)
        for slot, assumed, length in spans:
            tokens, known = known[:length], known[length:]
            if slot in self._sums:
                start = assumed
                if tokens[0] == IN_FLIGHT and slot_positions is not None:
                    start = int(slot_positions[slot])  # of the drafts before it some were wrong
                if min(tokens) <= IN_FLIGHT:
                    assert slot_tokens is not None, "tokens in flight and drafts are on the device"
                    known_there = slot_tokens[slot].tolist()
                    tokens = [known_there[IN_FLIGHT - token] if token <= IN_FLIGHT else token for token in tokens]
                self._extend(slot, start, tokens)

    def of(self, slot: int, start: int, end: int) -> _Numbers:
        """Of the positions [start, end) of the request in `slot`."""
        if slot not in self._sums:
            return np.full(end - start, zlib.crc32(self._admitted[slot].request_id.encode()) >> 3, dtype=np.int64)
        return np.array(self._sums[slot][start:end], dtype=np.int64) >> 3

    def _extend(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        sums = self._sums[slot]
        del sums[start:]
        assert len(sums) == start, f"slot {slot}: the tokens before position {start} are not known"
        before = sums[-1] if sums else zlib.crc32((self._admitted[slot].shares_rows_as or "").encode())
        for token in tokens:
            before = zlib.crc32(token.to_bytes(4, "little") + self._keys[slot].get(len(sums), b""), before)
            sums.append(before)


def stamp(texts: Tensor, layer: int, positions: Tensor) -> Tensor:
    """Stamps int64 of rows of one layer at `positions`, of texts with these numbers, one or one per row."""
    return positions | (layer << _POSITION_BITS) | (texts << (_POSITION_BITS + _LAYER_BITS))


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
        self.texts = TextNumbers()
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
        if (draft := geometry.draft) is not None:
            full, window = (FULL_DRAFT_LAYERS, draft.full_layers), (WINDOW_DRAFT_LAYERS, draft.window_layers)
            for (first, count), tokens in ((full, geometry.global_page.page_tokens), (window, draft.page_tokens)):
                for layer in range(first, first + count):
                    pages = num_pages[LayerKind.GLOBAL]
                    self._layers[layer] = torch.full((pages, tokens), _EMPTY, dtype=torch.int64)
                    self._kind[layer] = LayerKind.GLOBAL

    def write(self, layer: int, slots: Tensor, stamps: Tensor) -> None:
        """Stamp token slots (view row * page_tokens + token) of one layer."""
        kind = self._kind[layer]
        slots = slots.cpu()
        self._layers[layer].view(-1)[slots] = stamps.cpu()
        for row in torch.unique(slots // self._layers[layer].shape[1]).tolist():
            self._erase_other(kind, row)
            self._erase_other_use(layer, row)

    def move(self, kind: LayerKind, source: int, destination: int) -> None:
        for layer, owner in self._kind.items():
            if owner is kind:
                self._layers[layer][destination] = self._layers[layer][source]
        self._erase_other(kind, destination)

    def of_page(self, kind: LayerKind, row: int) -> list[Tensor]:
        """Those of a whole page, layer by layer, as `put_page` takes them."""
        return [self._layers[layer][row].clone() for layer, owner in self._kind.items() if owner is kind]

    def put_page(self, kind: LayerKind, row: int, stamps: list[Tensor]) -> None:
        """The rows of a page have come from elsewhere."""
        layers = [layer for layer, owner in self._kind.items() if owner is kind]
        for layer, saved in zip(layers, stamps, strict=True):
            self._layers[layer][row] = saved
        self._erase_other(kind, row)

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

    def _erase_other_use(self, layer: int, row: int) -> None:
        """Of a global page: what it had as one of a ring, or as none."""
        if self._geometry.draft is not None and self._kind[layer] is LayerKind.GLOBAL:
            in_ring = layer >= WINDOW_DRAFT_LAYERS
            for other, kind in self._kind.items():
                if kind is LayerKind.GLOBAL and (other >= WINDOW_DRAFT_LAYERS) != in_ring:
                    self._layers[other][row] = _EMPTY

    def _start(self, kind: LayerKind) -> int:
        if kind is LayerKind.SLIDING:
            return 0
        return self._pool_bytes - self._num_pages[kind] * self._geometry.page(kind).page_bytes


@dataclass
class ReadAudit:
    """What one request's queries read in one layer, block by block; `check` compares it with what they may read."""

    texts: Tensor  # [positions] int64, numbers of the request's text up to each of its positions, CPU
    layer: int
    producer: int
    query_positions: Tensor  # [Tq] int64, CPU
    window: int | None  # None: a global layer
    last_positions: Tensor  # [Tq] int64, CPU: the last one that each query may read
    _blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def observe(self, stamps: Tensor, mask: Tensor) -> None:
        """Note the stamps [K] of one block of keys and the mask [Tq, K] that attention applied to it."""
        self._blocks.append((stamps.cpu(), mask.cpu()))

    def check(self) -> None:
        """Raise AssertionError unless each query read exactly [max(0, p - W + 1) .. last] (global layers: [0 .. last]),
        where last is p but in rows that see what is behind them."""
        stamps = torch.cat([block[0] for block in self._blocks])
        mask = torch.cat([block[1] for block in self._blocks], dim=1)
        queries = zip(self.query_positions.tolist(), self.last_positions.tolist(), strict=True)
        for row, (position, last) in enumerate(queries):
            first = 0 if self.window is None else max(0, position - self.window + 1)
            expected = stamp(self.texts[first : last + 1], self.producer, torch.arange(first, last + 1))
            expected = expected.sort().values
            read = stamps[mask[row]].sort().values
            text = int(self.texts[position])
            if not torch.equal(read, expected):
                wrong = sorted(set(read.tolist()) ^ set(expected.tolist())) or read.tolist()
                raise AssertionError(
                    f"layer {self.layer}: the query at position {position} of request #{text} read "
                    f"{len(read)} rows and may read positions {first}..{last} ({len(expected)} rows); "
                    f"first difference: {describe(wrong[0])}"
                )
