"""What plain attention needs of a step: view rows of pages and token slots, from the batch and the block tables."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.architecture import LayerKind
from modelserve_worker.batch import ScheduledBatch, spare_from, stored_from
from modelserve_worker.execution.block_tables import BlockTables
from modelserve_worker.execution.kv_cache import KVCache

_Rows = NDArray[np.int64]


@dataclass(frozen=True)
class DecodeGroup:
    """B single-token requests whose tables have one width P, which follows from the context of each alone
    (`_table_width`): what a row costs, and its bits, do not depend on the rows beside it."""

    tokens: tuple[int, ...]  # host: their token rows in the step
    rows: Tensor  # [B] int64: the same on the device
    positions: Tensor  # [B] int64
    first: Tensor  # [B] int64: logical page of each table's first column
    table: Tensor  # [B, P] int64 view rows of logical pages first, first + 1, ..., padded with row 0

    def parts(self, most: int) -> Iterator[DecodeGroup]:
        """The group in parts of at most `most` rows."""
        for start in range(0, len(self.tokens), most):
            part = slice(start, start + most)
            yield DecodeGroup(
                self.tokens[part], self.rows[part], self.positions[part], self.first[part], self.table[part]
            )


@dataclass(frozen=True)
class PrefillChunk:
    """One request's chunk: positions [start, end) at token rows [offset, offset + end - start) of the step."""

    offset: int
    start: int
    end: int
    global_rows: Tensor  # [Pg] int64
    sliding_rows: Tensor  # [Ps] int64
    sliding_first: int


@dataclass(frozen=True)
class PlainStep:
    positions: Tensor  # [T] int64
    global_slots: Tensor  # [T] int64 token slots of every row: view row * page_tokens + token within the page
    sliding_tokens: Tensor  # [N] int64: which of the T rows outlive the step in sliding pages
    sliding_slots: Tensor  # [N] int64 their token slots
    decodes: Mapping[LayerKind, tuple[DecodeGroup, ...]]  # the leading single-token requests
    chunks: tuple[PrefillChunk, ...]
    texts: tuple[Tensor, ...]  # debug: numbers of each request's text up to each position below its end; on the CPU
    owners: Tensor | None  # debug: [T] int64, those of the rows
    offsets: tuple[int, ...]  # the first row of each request

    def text_of(self, row: int) -> Tensor:
        """Numbers of the text of the request that has this row, in debug mode."""
        return self.texts[bisect.bisect_right(self.offsets, row) - 1]


def plain_step(batch: ScheduledBatch, cache: KVCache, tables: BlockTables) -> PlainStep:
    """Raises InvalidInput when a table names a page outside the arena."""
    device, geometry = cache.arena.device, cache.geometry
    lengths = batch.lengths.tolist()
    spans = list(zip(batch.slots.tolist(), batch.starts.tolist(), (batch.starts + batch.lengths).tolist(), strict=True))
    decodes = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
    global_rows = [_global_rows(slot, end, cache, tables) for slot, _, end in spans]
    window = [
        _sliding_rows(slot, max(0, start - geometry.window + 1), start, cache, tables) for slot, start, _ in spans
    ]
    page = geometry.global_page.page_tokens

    def ints(values: object) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device)

    positions = [np.arange(start, end) for _, start, end in spans]
    slots = [
        rows[at // page] * page + at % page if rows.size else np.zeros_like(at)
        for rows, at in zip(global_rows, positions, strict=True)
    ]
    offsets = np.cumsum([0, *lengths])[:-1].tolist()
    kept_tokens, kept_slots = [], []
    if geometry.sliding_page.layers:
        ends = batch.starts + batch.lengths
        stored = np.maximum(batch.starts, stored_from(geometry, ends))
        spare = stored if not len(batch.spare_slots) else np.maximum(batch.starts, spare_from(geometry, ends))
        for i, ((slot, start, end), offset) in enumerate(zip(spans, offsets, strict=True)):
            kept = [(slot, int(stored[i]), end)]
            if len(batch.spare_slots) and batch.spare_slots[i] >= 0:
                kept.append((int(batch.spare_slots[i]), int(spare[i]), int(stored[i])))
            for holder, first, stop in kept:
                at = np.arange(first, stop)
                page, rows = _sliding_rows(holder, first, stop, cache, tables)
                size = geometry.sliding_page.page_tokens
                kept_tokens.append(at - start + offset)
                kept_slots.append(rows[at // size - page] * size + at % size)
    flat = ints(np.concatenate(positions))
    texts: tuple[Tensor, ...] = ()
    if cache.stamps is not None:
        cache.stamps.texts.begin(batch)
        texts = tuple(torch.from_numpy(cache.stamps.texts.of(slot, 0, end)) for slot, _, end in spans)

    def groups(kind: LayerKind, decoding: Sequence[tuple[int, _Rows]]) -> tuple[DecodeGroup, ...]:
        by_width: dict[int, list[int]] = defaultdict(list)
        for token, (_, rows) in enumerate(decoding):
            by_width[min(_table_width(rows.size), tables.host[kind].shape[1])].append(token)
        return tuple(
            DecodeGroup(
                tokens=tuple(tokens),
                rows=ints(tokens),
                positions=flat[tokens],
                first=ints([decoding[token][0] for token in tokens]),
                table=ints(_padded([decoding[token][1] for token in tokens], width)),
            )
            for width, tokens in by_width.items()
        )

    return PlainStep(
        positions=flat,
        global_slots=ints(np.concatenate(slots)),
        sliding_tokens=ints(np.concatenate(kept_tokens) if kept_tokens else []),
        sliding_slots=ints(np.concatenate(kept_slots) if kept_slots else []),
        decodes={
            LayerKind.GLOBAL: groups(LayerKind.GLOBAL, [(0, rows) for rows in global_rows[:decodes]]),
            LayerKind.SLIDING: groups(LayerKind.SLIDING, window[:decodes]),
        },
        chunks=tuple(
            PrefillChunk(offsets[i], *spans[i][1:], ints(global_rows[i]), ints(window[i][1]), window[i][0])
            for i in range(decodes, len(spans))
        ),
        texts=texts,
        owners=torch.cat([text[start:] for text, (_, start, _) in zip(texts, spans, strict=True)]) if texts else None,
        offsets=tuple(offsets),
    )


def _global_rows(slot: int, end: int, cache: KVCache, tables: BlockTables) -> _Rows:
    """View rows of the pages of [0, end); empty when no global layer owns a cache."""
    pages = tables.host[LayerKind.GLOBAL][slot, : cache.geometry.global_pages(end)]
    return cache.page_rows(LayerKind.GLOBAL, pages)


def _sliding_rows(slot: int, first: int, stop: int, cache: KVCache, tables: BlockTables) -> tuple[int, _Rows]:
    """First logical page of positions [first, stop), and the view rows of all of them."""
    spec = cache.geometry.sliding_page
    if not spec.layers or first >= stop:
        return 0, np.zeros(0, dtype=np.int64)
    logical = np.arange(first // spec.page_tokens, spec.pages(stop))
    pages = tables.host[LayerKind.SLIDING][slot, logical % cache.geometry.sliding_table_entries]
    return int(logical[0]), cache.page_rows(LayerKind.SLIDING, pages)


def _table_width(pages: int) -> int:
    """`pages` rounded up to two significant bits (1, 2, 3, 4, 6, 8, 12, ...): few widths, at most half more."""
    unit = 1 << max(0, (pages - 1).bit_length() - 2)
    return -(-pages // unit) * unit


def _padded(tables: list[_Rows], width: int) -> _Rows:
    padded = np.zeros((len(tables), width), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: table.size] = table
    return padded
