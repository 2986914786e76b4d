"""The paged hybrid KV cache of one rank: one arena of bytes, two page kinds growing from its two ends.

Sliding page s lies at [s * Ps, (s + 1) * Ps) from the bottom, global page g at [total - (g + 1) * Pg, total - g * Pg)
from the top, where Ps and Pg are the page bytes of CacheGeometry. Pages are named by number (page id) outside and by
row of a strided view inside; rows of global pages count from the bottom, because torch has no negative strides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import LAYER_ALIGNMENT_BYTES, CacheGeometry, KVCacheDtype, PageSpec, Plane
from modelserve_worker.batch import NOT_IN_A_RING, PageCheck, PageMove
from modelserve_worker.cache.kv_stamps import KVStamps
from modelserve_worker.kernels.attention.row_codec import StoredRows, decode_rows, encode_rows, storage_dtype

_Ids = TypeVar("_Ids", NDArray[np.int64], Tensor)
_CHECKED_BYTES = 4 << 20  # of one layer at once: what they decode to is some times as large


@dataclass(frozen=True)
class _LayerPlanes:
    """Views [pages, heads, page_tokens, width] of one layer; `scales` has width 1 and is empty but for int8."""

    kind: LayerKind
    rows: dict[str, Tensor]
    scales: dict[str, Tensor]


@dataclass(frozen=True)
class _DraftViews:
    """Of each full layer of a drafter, and of each window layer: by plane [pages, heads, tokens, head_dim]."""

    full: tuple[dict[str, Tensor], ...] = ()
    window: tuple[dict[str, Tensor], ...] = ()

    @classmethod
    def of(cls, geometry: CacheGeometry, pages: Tensor) -> _DraftViews:
        """`pages` uint8 [global pages, page bytes]."""
        draft = geometry.draft
        if draft is None:
            return cls()

        def views(start: int, tokens: int) -> dict[str, Tensor]:
            size = draft.kv_heads * tokens * draft.head_dim * draft.element_bytes
            shape = (-1, draft.kv_heads, tokens, draft.head_dim)
            dtype = {2: torch.bfloat16, 4: torch.float32}[draft.element_bytes]
            starts = {plane: start + number * size for number, plane in enumerate(draft.planes)}
            return {plane: pages[:, at : at + size].view(dtype).view(shape) for plane, at in starts.items()}

        full = range(draft.full_offset_bytes, draft.full_offset_bytes + draft.full_bytes, draft.layer_bytes)
        tokens = geometry.global_page.page_tokens
        return cls(
            tuple(views(start, tokens) for start in full),
            tuple(views(index * draft.ring_layer_bytes, draft.page_tokens) for index in range(draft.window_layers)),
        )


class KVCache:
    """Arena of `pool_bytes` bytes, typed views into it, row writes, page reads and page moves.

    Raises InvalidInput when pool_bytes is not a multiple of 128 (the alignment of a layer block).
    """

    def __init__(
        self, geometry: CacheGeometry, pool_bytes: int, *, device: torch.device, debug_stamps: bool = False
    ) -> None:
        if pool_bytes < 0 or pool_bytes % LAYER_ALIGNMENT_BYTES:
            raise InvalidInput(
                f"the cache pool of {pool_bytes} bytes is not a multiple of {LAYER_ALIGNMENT_BYTES}; round it down"
            )
        self.geometry = geometry
        self.pool_bytes = pool_bytes
        # Not cleared: no reader uses a row that was not written, and untouched pages cost a CPU worker no memory.
        self.arena = torch.empty(pool_bytes, dtype=torch.uint8, device=device)
        self.num_pages = {spec.kind: _page_count(spec, pool_bytes) for spec in _specs(geometry)}
        self._pages = {spec.kind: self._page_view(spec) for spec in _specs(geometry)}
        self._layers = {
            layer: self._layer_planes(spec, block)
            for spec in _specs(geometry)
            for block, layer in enumerate(spec.layers)
        }
        self._drafts = _DraftViews.of(geometry, self._pages[LayerKind.GLOBAL])
        self.rounded_to: KVCacheDtype | None = None  # what the present step's rows are rounded to before they are kept
        self.stamps = KVStamps(geometry, self.num_pages, pool_bytes=pool_bytes) if debug_stamps else None

    def page_rows(self, kind: LayerKind, pages: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """View rows (int64) of page ids. Raises InvalidInput for an id outside the arena."""
        ids = np.asarray(pages, dtype=np.int64)
        count = self.num_pages[kind]
        if ids.size and not (ids.min() >= 0 and ids.max() < count):
            raise InvalidInput(f"{kind.value} page {ids.min()}..{ids.max()} outside the arena's 0..{count - 1}")
        return self._view_rows(kind, ids)

    def _view_rows(self, kind: LayerKind, ids: _Ids) -> _Ids:
        """Where the views have the pages of these ids: those of global layers grow from the arena's end."""
        return ids if kind is LayerKind.SLIDING else self.num_pages[kind] - 1 - ids

    def pages(self, kind: LayerKind) -> Tensor:
        """Bytes of all pages of one kind, uint8 [view rows, page bytes]."""
        return self._pages[kind]

    def move(self, moves: Sequence[PageMove]) -> None:
        """Copy whole pages in order, all layers and planes, on the current stream: those that do not touch each other's
        bytes at once, in one launch for tens of them. (cuMemcpyBatchAsync takes no default stream, which this is.)"""
        for some in self._apart(moves):
            rows = [self.page_rows(move.kind, (move.source, move.destination)).tolist() for move in some]
            words = [self._pages[move.kind].view(torch.int64) for move in some]
            torch._foreach_copy_(
                [pages[destination] for pages, (_, destination) in zip(words, rows, strict=True)],
                [pages[source] for pages, (source, _) in zip(words, rows, strict=True)],
            )
            if self.stamps is not None:
                for move, (source, destination) in zip(some, rows, strict=True):
                    self.stamps.move(move.kind, source, destination)

    def _apart(self, moves: Sequence[PageMove]) -> Iterator[list[PageMove]]:
        """The moves in order, in as few lists as there are that write no byte which another of them reads or writes."""
        some: list[PageMove] = []
        read, written = _Stretches(), _Stretches()
        for move in moves:
            size = self.geometry.page(move.kind).page_bytes
            source, destination = (self._start(move.kind, page) for page in (move.source, move.destination))
            if source == destination:
                continue
            written_there = written.meets(source, size) or written.meets(destination, size)
            otherwise_read = read.meets(source, size) and not read.has(source, size)
            if written_there or otherwise_read or read.meets(destination, size):
                yield some
                some, read, written = [], _Stretches(), _Stretches()
            some.append(move)
            read.add(source, size)
            written.add(destination, size)
        if some:
            yield some

    def _start(self, kind: LayerKind, page: int) -> int:
        """First byte of a page in the arena."""
        size = self.geometry.page(kind).page_bytes
        return page * size if kind is LayerKind.SLIDING else self.pool_bytes - (page + 1) * size

    def unsound(self, checks: Sequence[PageCheck]) -> Tensor:
        """Which of these pages have, among the rows named, one that is not finite: bool [checks], on the device."""
        found = torch.zeros(len(checks), dtype=torch.bool, device=self.arena.device)
        for kind in LayerKind:
            which = [i for i, check in enumerate(checks) if check.kind is kind and check.ring_row == NOT_IN_A_RING]
            spec, layers = self.geometry.page(kind), [each for each in self._layers.values() if each.kind is kind]
            at_once = max(1, _CHECKED_BYTES // max(1, spec.layer_bytes))
            for first in range(0, len(which), at_once):
                some = which[first : first + at_once]
                rows = torch.from_numpy(self.page_rows(kind, [checks[index].page for index in some]))
                counts = torch.tensor([checks[index].rows for index in some])
                pages, counts = rows.to(found.device), counts.to(found.device)
                counted = torch.arange(spec.page_tokens, device=found.device) < counts[:, None]  # [pages, page tokens]
                for layer in layers:
                    for plane in layer.rows:
                        scales = layer.scales.get(plane)
                        stored = StoredRows(layer.rows[plane][pages], None if scales is None else scales[pages])
                        finite = self.decode(stored, torch.float32).isfinite().all(-1).all(1)
                        found[some] |= (~finite & counted).any(-1)
                for views in self._drafts.full if kind is LayerKind.GLOBAL else ():
                    found[some] |= _has_unsound(views, pages, counted)
        self._look_at_rings(checks, found)
        return found

    def _look_at_rings(self, checks: Sequence[PageCheck], found: Tensor) -> None:
        """Of `checks` those of pages in drafters' rings; `found` is changed in place."""
        for index, check in enumerate(checks):
            if check.ring_row != NOT_IN_A_RING:
                assert self.geometry.draft is not None, "there are no rings without a drafter"
                tokens = self.geometry.draft.page_tokens
                pages = torch.from_numpy(self.page_rows(check.kind, [check.page])).to(found.device)
                counted = (torch.arange(tokens, device=found.device) - check.ring_row) % tokens < check.rows
                for views in self._drafts.window:
                    found[index] |= _has_unsound(views, pages, counted[None])[0]

    def encode(self, rows: Tensor) -> StoredRows:
        """Encode rows [..., D] in the cache's dtype."""
        return encode_rows(self.rounded(rows), self.geometry.dtype)

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows [..., D] as a cache of `rounded_to` would give them back, in their own dtype."""
        if self.rounded_to is None:
            return rows
        return decode_rows(encode_rows(rows, self.rounded_to), self.rounded_to, rows.dtype)

    def round_stored(self, layer: int, table: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Round rows that a kernel has stored: of tokens at `positions` int32 [N] of the requests in `slots` int32 [N],
        -1 for those that are not in pages. `table` int32 [slots, entries]. Waits for the device."""
        planes = self._layers[layer]
        tokens = self.geometry.page(planes.kind).page_tokens
        stored = slots >= 0
        slots, positions = slots[stored].long(), positions[stored].long()
        entry = positions // tokens
        if planes.kind is LayerKind.SLIDING:
            entry %= self.geometry.sliding_table_entries
        rows = self._view_rows(planes.kind, table[slots, entry].long())
        for view in planes.rows.values():
            view[rows, :, positions % tokens] = self.rounded(view[rows, :, positions % tokens])

    def decode(self, stored: StoredRows, compute: torch.dtype) -> Tensor:
        return decode_rows(stored, self.geometry.dtype, compute)

    def planes(self, layer: int) -> tuple[str, ...]:
        """Row planes that this layer stores: ("k", "v") or ("v",)."""
        return tuple(self._layers[layer].rows)

    def full_draft_planes(self, index: int) -> dict[str, Tensor]:
        """Views [view rows of global pages, heads, page_tokens, head_dim] of a drafter's full layer, its `index`-th, by
        plane: "k" and "v", or "v". Rows in its compute type, not encoded."""
        return self._drafts.full[index]

    def window_draft_planes(self, index: int) -> dict[str, Tensor]:
        """Views [view rows of global pages, heads, DraftPages.page_tokens, head_dim] of a drafter's window layer, its
        `index`-th: of pages in its ring."""
        return self._drafts.window[index]

    def write_rows(self, layer: int, slots: Tensor, rows: dict[str, StoredRows]) -> None:
        """Write rows [N, heads, D] of each plane into token slots.

        `slots` int64 [N] = view row * page_tokens + token within the page.
        """
        planes = self._layers[layer]
        tokens = self.geometry.page(planes.kind).page_tokens
        page, token = slots // tokens, slots % tokens
        for name, view in planes.rows.items():
            view[page, :, token] = rows[name].values
        for name, view in planes.scales.items():
            scale = rows[name].scale
            assert scale is not None, "int8 rows carry scales"
            view[page, :, token] = scale

    def read_pages(self, layer: int, plane: str, page_rows: Tensor, compute: torch.dtype) -> Tensor:
        """Decoded rows of whole pages.

        `page_rows` int64 [B, P] -> [B, heads, P * page_tokens, D] in `compute`; rows never written hold anything, NaN
        included, and are the caller's to mask.
        """
        planes = self._layers[layer]
        scales = planes.scales.get(plane)
        stored = StoredRows(planes.rows[plane][page_rows], None if scales is None else scales[page_rows])
        decoded = self.decode(stored, compute)
        batch, pages, heads, tokens, width = decoded.shape
        return decoded.transpose(1, 2).reshape(batch, heads, pages * tokens, width)

    def _page_view(self, spec: PageSpec) -> Tensor:
        """Bytes of every page of one kind: [pages, page_bytes]."""
        count = self.num_pages[spec.kind]
        start = 0 if spec.kind is LayerKind.SLIDING else self.pool_bytes - count * spec.page_bytes
        return self.arena[start : start + count * spec.page_bytes].view(count, spec.page_bytes)

    def _layer_planes(self, spec: PageSpec, block: int) -> _LayerPlanes:
        rows: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        for plane in spec.planes:
            if plane.name.endswith("_scale"):
                scales[plane.name.removesuffix("_scale")] = self._typed(spec, block, plane, torch.float16)
            else:
                rows[plane.name] = self._typed(spec, block, plane, storage_dtype(self.geometry.dtype))
        return _LayerPlanes(spec.kind, rows, scales)

    def _typed(self, spec: PageSpec, block: int, plane: Plane, dtype: torch.dtype) -> Tensor:
        assert dtype.itemsize == plane.element_bytes, f"plane {plane.name} has elements of {plane.element_bytes} bytes"
        start = block * spec.layer_bytes + plane.offset_bytes
        size = plane.heads * spec.page_tokens * plane.width * plane.element_bytes
        typed = self._pages[spec.kind][:, start : start + size].view(dtype)
        return typed.view(-1, plane.heads, spec.page_tokens, plane.width)


def _has_unsound(views: dict[str, Tensor], pages: Tensor, counted: Tensor) -> Tensor:
    """Which of `pages` [N], view rows, have a row that is not finite among those `counted` [N, tokens]: bool [N]."""
    finite = torch.stack([view[pages].isfinite().all(-1).all(1) for view in views.values()]).all(0)
    return (~finite & counted).any(-1)


class _Stretches:
    """Of bytes, none of which meet but those that are the same."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # rising
        self._ends: list[int] = []

    def meets(self, start: int, size: int) -> bool:
        """Whether one of them has some of these bytes."""
        at = bisect_left(self._starts, start + size)
        return at > 0 and self._ends[at - 1] > start

    def has(self, start: int, size: int) -> bool:
        """Whether these are one of them."""
        at = bisect_left(self._starts, start)
        return at < len(self._starts) and (self._starts[at], self._ends[at]) == (start, start + size)

    def add(self, start: int, size: int) -> None:
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + size)


def _specs(geometry: CacheGeometry) -> tuple[PageSpec, ...]:
    return (geometry.sliding_page, geometry.global_page)


def _page_count(spec: PageSpec, pool_bytes: int) -> int:
    return pool_bytes // spec.page_bytes if spec.page_bytes else 0
