"""A device that executes scheduled batches literally, with a stamp in the place of every cache row.

Memory is an array of bytes, each holding the stamp of the row last written over it: (stay of a request, position,
layer). Executing a step follows the rules of modelserve_worker.batch layer by layer, and asserts that attention reads
exactly the rows it is permitted to: those of its own request, position and producing layer, in the whole window and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from modelserve.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, PageSpec
from modelserve_worker.batch import IN_FLIGHT, SampledTokens, ScheduledBatch, ScheduledRequest
from modelserve_worker.request import SampledToken

POSITION_BITS, LAYER_BITS = 16, 6
NONSENSE = -2  # what a request says after a failed step


@dataclass(frozen=True)
class StampedModel:
    """Layers of a small hybrid model: `kinds[i]` is layer i's kind; the last `shared` layers own no cache."""

    kinds: tuple[LayerKind, ...]
    shared: int = 0

    def producer(self, layer: int) -> int:
        owners = len(self.kinds) - self.shared
        if layer < owners:
            return layer
        return max(i for i in range(owners) if self.kinds[i] is self.kinds[layer])

    def last_reader(self, producer: int) -> int:
        return max(layer for layer in range(len(self.kinds)) if self.producer(layer) == producer)

    def geometry(
        self, *, window: int, global_tokens: int, sliding_tokens: int, global_row: int, sliding_row: int
    ) -> CacheGeometry:
        """Pages of `..._tokens` rows of `..._row` bytes per layer."""

        def page(kind: LayerKind, tokens: int, row: int) -> PageSpec:
            owners = range(len(self.kinds) - self.shared)
            return PageSpec(kind, tokens, tuple(i for i in owners if self.kinds[i] is kind), (), tokens * row)

        return CacheGeometry(
            global_page=page(LayerKind.GLOBAL, global_tokens, global_row),
            sliding_page=page(LayerKind.SLIDING, sliding_tokens, sliding_row),
            window=window,
            dtype=KVCacheDtype.BFLOAT16,
            layout=KVCacheLayout.KV,
        )


@dataclass
class Slot:
    request_id: str
    stay: int
    next_position: int
    last_token: int
    lost: bool = False  # a step failed under it: whatever it computes until it is given away is discarded


class StampedDevice:
    """Memory of `pool_bytes` bytes. `token_at(request_id, position)` is the text that the requests have and will say.

    Faults for mutation tests: `write_first` writes sliding rows before the layer's attention, `ignore_sharing` writes
    them after the producer's own attention, `window_error` widens the window that attention expects, `skip_moves` does
    not copy moved pages.
    """

    def __init__(
        self,
        model: StampedModel,
        geometry: CacheGeometry,
        pool_bytes: int,
        token_at: Callable[[str, int], int],
        *,
        write_first: bool = False,
        ignore_sharing: bool = False,
        window_error: int = 0,
        skip_moves: bool = False,
    ) -> None:
        self.model = model
        self.geometry = geometry
        self.memory = np.full(pool_bytes, -1, dtype=np.int64)
        self.token_at = token_at
        self.write_first = write_first
        self.ignore_sharing = ignore_sharing
        self.skip_moves = skip_moves
        self.window = geometry.window + window_error
        self.slots: dict[int, Slot] = {}
        self.stays = 0
        self.rows_read = 0
        self.reuses_in_place = 0

    def lose(self, batch: ScheduledBatch) -> None:
        """The step failed before it did anything."""
        for request in batch.requests:
            self.enter(request).lost = True
        if batch.page_moves:
            for slot in self.slots.values():
                slot.lost = True

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        for move in () if self.skip_moves else batch.page_moves:
            source, destination = self.page(move.kind, move.source), self.page(move.kind, move.destination)
            self.memory[destination] = self.memory[source].copy()
        sizes = [len(request.token_ids) for request in batch.requests]
        assert sizes == sorted(sizes, key=lambda size: size > 1), "decodes come first"
        assert len({request.slot for request in batch.requests}) == len(sizes), "one row per slot"
        steps = [_Share(self, request) for request in batch.requests]
        for layer, kind in enumerate(self.model.kinds):
            if kind is LayerKind.GLOBAL:
                self._global_layer(layer, steps)
            else:
                self._sliding_layer(layer, steps)
        return SampledTokens(
            batch.step, {step.request.request_id: step.sample() for step in steps if step.request.samples}
        )

    def enter(self, request: ScheduledRequest) -> Slot:
        """Row of the per-request state, moved on to the step's end; tokens fed must be those of the request's text."""
        if request.first_in_slot:
            self.stays += 1
            known = (*request.prompt_token_ids, *request.output_token_ids)
            assert all(token == self.token_at(request.request_id, i) for i, token in enumerate(known))
            assert request.start == 0
            self.slots[request.slot] = Slot(request.request_id, self.stays, 0, last_token=IN_FLIGHT)
        slot = self.slots[request.slot]
        assert (slot.request_id, slot.next_position) == (request.request_id, request.start)
        tokens = [slot.last_token] if request.token_ids == (IN_FLIGHT,) else list(request.token_ids)
        if not slot.lost:
            for position, token in enumerate(tokens, request.start):
                assert token == self.token_at(request.request_id, position), f"wrong token at {position}"
        slot.next_position = request.end
        return slot

    def _global_layer(self, layer: int, steps: list[_Share]) -> None:
        producer = self.model.producer(layer)
        for step in steps:
            if producer == layer:
                step.write_global(layer)
        for step in steps:
            step.read_global(producer)

    def _sliding_layer(self, layer: int, steps: list[_Share]) -> None:
        producer = self.model.producer(layer)
        if self.write_first and producer == layer:
            for step in steps:
                step.write_sliding(layer)
        for step in steps:
            step.read_sliding(producer)
        last = producer if self.ignore_sharing else self.model.last_reader(producer)
        if last == layer and not self.write_first:
            for step in steps:
                step.write_sliding(producer)

    def page(self, kind: LayerKind, number: int) -> slice:
        size = self.geometry.page(kind).page_bytes
        start = number * size if kind is LayerKind.SLIDING else len(self.memory) - (number + 1) * size
        assert 0 <= number < len(self.memory) // size, f"{kind} page {number} is outside"
        return slice(start, start + size)


class _Share:
    """One request's share of a step: byte addresses, in the first layer block, of the rows it reads and writes."""

    def __init__(self, device: StampedDevice, request: ScheduledRequest) -> None:
        self.device = device
        self.request = request
        self.slot = device.enter(request)
        geometry, start, end = device.geometry, request.start, request.end
        self.written = np.arange(start, end)
        self.all_positions = np.arange(end)
        self.global_rows = self._global_addresses()
        oldest_read = max(0, start - device.window + 1)
        oldest_kept = max(0, end - geometry.window + 1)
        self.old_positions = np.arange(oldest_read, start)
        self.kept_positions = np.arange(max(start, oldest_kept), end)
        kind = LayerKind.SLIDING
        if geometry.sliding_page.layers:
            read, write = request.sliding_read, request.sliding_write
            self.sliding_old = self._addresses(kind, read.pages, read.first, oldest_read, start)
            kept = self._addresses(kind, write.pages, write.first, oldest_kept, end)
            self.sliding_new = kept[len(kept) - len(self.kept_positions) :]
            stable = dict(zip(range(read.first, read.first + len(read.pages)), read.pages, strict=True))
            for logical, page in enumerate(write.pages, write.first):
                assert stable.get(logical, page) == page, "a live page changed its place without a move"
            device.reuses_in_place += len({*read.pages} & {*write.pages} - {*self._same(read, write)})

    @staticmethod
    def _same(read, write) -> set[int]:
        return {p for i, p in enumerate(read.pages, read.first) if write.first <= i < write.first + len(write.pages)}

    def sample(self) -> SampledToken:
        text = self.device.token_at(self.request.request_id, self.request.end)
        self.slot.last_token = NONSENSE if self.slot.lost else text
        return SampledToken(self.slot.last_token)

    def write_global(self, layer: int) -> None:
        self._write(LayerKind.GLOBAL, layer, self.global_rows[self.request.start :], self.written)

    def read_global(self, layer: int) -> None:
        self._read(LayerKind.GLOBAL, layer, self.global_rows, self.all_positions)

    def write_sliding(self, layer: int) -> None:
        self._write(LayerKind.SLIDING, layer, self.sliding_new, self.kept_positions)

    def read_sliding(self, layer: int) -> None:
        self._read(LayerKind.SLIDING, layer, self.sliding_old, self.old_positions)

    def _global_addresses(self) -> np.ndarray | None:
        if not self.device.geometry.global_page.layers:
            assert self.request.global_pages == ()
            return None
        return self._addresses(LayerKind.GLOBAL, self.request.global_pages, 0, 0, self.request.end)

    def _addresses(self, kind: LayerKind, pages: tuple[int, ...], first: int, low: int, high: int) -> np.ndarray:
        """Addresses [high - low, row bytes] of positions [low, high), whose pages must be exactly the table's."""
        spec = self.device.geometry.page(kind)
        row = spec.layer_bytes // spec.page_tokens
        if high <= low:
            assert pages == (), f"{len(pages)} {kind} pages listed for no position"
            return np.empty((0, row), dtype=np.int64)
        covered = (first, first + len(pages) - 1)
        assert covered == (low // spec.page_tokens, (high - 1) // spec.page_tokens), f"{kind} table covers {covered}"
        starts = np.array([self.device.page(kind, page).start for page in pages])
        positions = np.arange(low, high)
        addresses = starts[positions // spec.page_tokens - first] + positions % spec.page_tokens * row
        return addresses[:, None] + np.arange(row)

    def _stamps(self, layer: int, positions: np.ndarray) -> np.ndarray:
        return ((self.slot.stay << POSITION_BITS | positions) << LAYER_BITS | layer)[:, None]

    def _block(self, kind: LayerKind, layer: int) -> int:
        spec = self.device.geometry.page(kind)
        return spec.layers.index(layer) * spec.layer_bytes

    def _write(self, kind: LayerKind, layer: int, rows: np.ndarray, positions: np.ndarray) -> None:
        self.device.memory[rows + self._block(kind, layer)] = self._stamps(layer, positions)

    def _read(self, kind: LayerKind, layer: int, rows: np.ndarray, positions: np.ndarray) -> None:
        if self.slot.lost:
            return
        found, wanted = self.device.memory[rows + self._block(kind, layer)], self._stamps(layer, positions)
        assert (found == wanted).all(), f"layer {layer} of {self.request.request_id} read rows that are not its own"
        self.device.rows_read += len(positions)
