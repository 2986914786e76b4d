"""Debug check of the kernel path: that the page rows its kernels are told to read hold what they should.

Kernels mask inside, so what a query read cannot be observed. Checked instead, before each layer's attention, are the
stamps of all page rows that the step's arrays and the device's block tables lead to; and every store is stamped where
those arrays send it. Everything here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.cache.kv_stamps import KVStamps, describe, stamp
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.block_tables import BlockTables

_Longs = NDArray[np.int64]


@dataclass(frozen=True)
class _Reader:
    """A request of the step, as the kernels are told of it. `own_rows`: its rows of sliding layers are in pages too."""

    texts: _Longs  # numbers of its text up to each position below `end`
    slot: int
    start: int
    end: int
    own_rows: bool


class TableAudit:
    """Stamps and checks of one runner's steps. `producers[layer]` is the layer whose rows `layer` reads."""

    def __init__(self, cache: KVCache, tables: BlockTables, producers: Sequence[int]) -> None:
        assert cache.stamps is not None
        self._cache = cache
        self._stamps: KVStamps = cache.stamps
        self._tables = tables
        self._producers = producers
        self._readers: list[_Reader] = []

    def begin(self, step: Step, batch: ScheduledBatch) -> None:
        """Take the arrays of the next step and the tables as they are now."""
        texts = self._stamps.texts
        texts.begin(batch)
        spans = zip(batch.slots.tolist(), batch.starts.tolist(), (batch.starts + batch.lengths).tolist(), strict=True)
        self._owners = np.concatenate([texts.of(*span) for span in spans])
        self._pages = {kind: table.cpu().numpy() for kind, table in self._tables.device.items()}
        self._positions = _longs(step.positions)
        self._stores = {LayerKind.GLOBAL: _longs(step.global_slots), LayerKind.SLIDING: _longs(step.sliding_slots)}
        self._late_stores = _longs(step.commit_slots)
        self._readers = [_Reader(texts.of(told[0], 0, told[2]), *told) for told in _told(step)]

    def prepared(self, layer: int) -> None:
        """The layer's rows have been stored: global ones, and the sliding ones of decodes."""
        if self._producers[layer] == layer:
            self._stamp(layer, self._stores[self._kind(layer)])

    def committed(self, producer: int) -> None:
        """The sliding rows of the step's chunks that outlive it have been stored."""
        self._stamp(producer, self._late_stores)

    def check(self, layer: int) -> None:
        """Raise AssertionError unless every page row that the layer's attention may read holds its own position.

        Global layers: [0, end). Sliding layers: [max(0, start - W + 1), start) and, where a request's own row is in a
        page already, that one too.
        """
        producer = self._producers[layer]
        kind = self._kind(producer)
        for reader in self._readers:
            positions = np.arange(0, reader.end)
            if kind is LayerKind.SLIDING:
                first = max(0, reader.start - self._cache.geometry.window + 1)
                positions = np.arange(first, reader.end if reader.own_rows else reader.start)
            slots = torch.from_numpy(self._token_slots(kind, np.full_like(positions, reader.slot), positions))
            found = self._stamps.read_slots(producer, slots)
            wanted = stamp(torch.from_numpy(reader.texts[positions]), producer, torch.from_numpy(positions))
            wrong = (found != wanted).nonzero()
            if len(wrong):
                at = int(wrong[0])
                raise AssertionError(
                    f"layer {layer}: request #{reader.texts[-1]} would read {describe(int(found[at]))} at position "
                    f"{positions[at]}, its rows [{positions[0]}, {positions[-1] + 1}) of layer {producer} being wrong "
                    f"in {len(wrong)} places"
                )

    def _stamp(self, layer: int, slots: _Longs) -> None:
        tokens = np.flatnonzero(slots >= 0)
        assert not len(tokens) or tokens[-1] < len(self._owners), f"layer {layer}: a padded row is stored"
        positions = self._positions[tokens]
        places = self._token_slots(self._kind(layer), slots[tokens], positions)
        stamps = stamp(torch.from_numpy(self._owners[tokens]), layer, torch.from_numpy(positions))
        self._stamps.write(layer, torch.from_numpy(places), stamps)

    def _token_slots(self, kind: LayerKind, slots: _Longs, positions: _Longs) -> _Longs:
        """View row * page_tokens + token of each position in the pages of its slot."""
        page = self._cache.geometry.page(kind).page_tokens
        logical = positions // page
        entries = logical % self._cache.geometry.sliding_table_entries if kind is LayerKind.SLIDING else logical
        return self._cache.page_rows(kind, self._pages[kind][slots, entries]) * page + positions % page

    def _kind(self, layer: int) -> LayerKind:
        return LayerKind.SLIDING if layer in self._cache.geometry.sliding_page.layers else LayerKind.GLOBAL


def _told(step: Step) -> Iterator[tuple[int, int, int, bool]]:
    """Slot, start, end and `own_rows` of every segment, in batch order; padding has no rows."""
    for segments, own_rows in ((step.decode, True), (step.chunks, False)):
        if segments is not None:
            columns = (segments.slots, segments.starts, segments.lengths)
            for slot, start, length in zip(*(_longs(c[: segments.most]).tolist() for c in columns), strict=True):
                if length:
                    yield slot, start, start + length, own_rows


def _longs(values: Tensor) -> _Longs:
    return values.cpu().numpy().astype(np.int64)
