"""What plain attention needs of a step: view rows of pages and token slots, from its segments and the block tables."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import ScheduledBatch, spare_from, stored_from
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.step.block_tables import BlockTables

FEW_ROWS = 8  # segments of more are attended to one by one

_Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SegmentGroup:
    """B segments of n rows each whose tables have one width P. That follows from the context of each alone
    (`_table_width`): what a segment costs, and its bits, do not depend on the segments beside it."""

    firsts: tuple[int, ...]  # host: the step's row of each segment's first one
    starts: tuple[int, ...]  # host: its position
    rows: Tensor  # [B, n] int64 rows of the step
    positions: Tensor  # [B, n] int64
    first_page: Tensor  # [B] int64: logical page of each table's first column
    table: Tensor  # [B, P] int64 view rows of logical pages first, first + 1, ..., padded with row 0
    visible: Tensor | None = None  # [B, n] int64: last position that a row sees, not before its own; None: its own

    @property
    def last_seen(self) -> Tensor:
        """[B, n] int64: last position that each row sees."""
        return self.positions if self.visible is None else self.visible

    @property
    def num_rows(self) -> int:
        """n."""
        return self.rows.shape[1]

    @property
    def alone(self) -> bool:
        """Whether its one segment is attended to by itself at all times, so that its length may shape the work."""
        return self.num_rows > FEW_ROWS

    def parts(self, most: int) -> Iterator[SegmentGroup]:
        """The group in parts of at most `most` segments."""
        for start in range(0, len(self.firsts), most):
            part = slice(start, start + most)
            yield SegmentGroup(
                self.firsts[part], self.starts[part], self.rows[part], self.positions[part], self.first_page[part],
                self.table[part], None if self.visible is None else self.visible[part],
            )  # fmt: skip


@dataclass(frozen=True)
class PageGroups:
    """Where the rows of one step are read and written."""

    positions: Tensor  # [T] int64
    global_slots: Tensor  # [T] int64 token slots of every row: view row * page_tokens + token within the page
    sliding_tokens: Tensor  # [N] int64: which of the T rows outlive the step in sliding pages
    sliding_slots: Tensor  # [N] int64 their token slots
    groups: Mapping[LayerKind, tuple[SegmentGroup, ...]]  # global tables are of [0, end), sliding ones of the window
    texts: tuple[Tensor, ...]  # debug: numbers of each segment's text up to each position below its end; on the CPU
    owners: Tensor | None  # debug: [T] int64, those of the rows
    offsets: tuple[int, ...]  # the first row of each segment

    def text_of(self, row: int) -> Tensor:
        """Numbers of the text of the request that has this row, in debug mode."""
        return self.texts[bisect.bisect_right(self.offsets, row) - 1]


def page_groups(batch: ScheduledBatch, cache: KVCache, tables: BlockTables, *, kept: int = 1) -> PageGroups:
    """Of the batch's segments. `kept`: of a step that is narrowed, the most rows of a segment that go on.

    Raises InvalidInput when a table names a page outside the arena.
    """
    device, geometry = cache.arena.device, cache.geometry
    columns = (batch.slots, batch.starts, batch.starts + batch.lengths)
    spans = list(zip(*(column.tolist() for column in columns), strict=True))
    held_globally = [global_rows(slot, end, cache, tables) for slot, _, end in spans]
    window = [sliding_rows(slot, max(0, start - geometry.window + 1), start, cache, tables) for slot, start, _ in spans]
    page = geometry.global_page.page_tokens

    def ints(values: object) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device)

    positions = [np.arange(start, end) for _, start, end in spans]
    slots = [
        rows[at // page] * page + at % page if rows.size else np.zeros_like(at)
        for rows, at in zip(held_globally, positions, strict=True)
    ]
    offsets = (np.cumsum(batch.lengths) - batch.lengths).tolist()
    kept_tokens, kept_slots = [], []
    if geometry.sliding_page.layers:
        ends = batch.starts + batch.lengths
        # The window of the first row that goes on, and what else is in the first page of the last row's.
        stored = np.maximum(batch.starts, np.minimum(stored_from(geometry, ends), ends - geometry.window - kept + 1))
        spare = stored if not len(batch.spare_slots) else np.maximum(batch.starts, spare_from(geometry, ends))
        for i, ((slot, start, end), offset) in enumerate(zip(spans, offsets, strict=True)):
            outliving = [(slot, int(stored[i]), end)]
            if len(batch.spare_slots) and batch.spare_slots[i] >= 0:
                outliving.append((int(batch.spare_slots[i]), int(spare[i]), int(stored[i])))
            for holder, first, stop in outliving:
                at = np.arange(first, stop)
                page, rows = sliding_rows(holder, first, stop, cache, tables)
                size = geometry.sliding_page.page_tokens
                kept_tokens.append(at - start + offset)
                kept_slots.append(rows[at // size - page] * size + at % size)
    texts: tuple[Tensor, ...] = ()
    if cache.stamps is not None:
        cache.stamps.texts.begin(batch)
        texts = tuple(torch.from_numpy(cache.stamps.texts.of(slot, 0, end)) for slot, _, end in spans)

    sees_ahead = set(batch.spans.segments[batch.spans.visible >= 0].tolist())
    ends_seen = np.zeros(0, dtype=np.int32)
    if sees_ahead:
        ends_seen = batch.last_visible()

    def groups(kind: LayerKind, found: Sequence[tuple[int, _Rows]]) -> tuple[SegmentGroup, ...]:
        alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for index, ((_, start, end), (_, rows)) in enumerate(zip(spans, found, strict=True)):
            few = end - start <= FEW_ROWS
            width = min(_table_width(rows.size), tables.context_entries[kind]) if few else rows.size
            alike[end - start, width, -1 if few and index not in sees_ahead else index].append(index)
        return tuple(
            SegmentGroup(
                firsts=tuple(offsets[i] for i in members),
                starts=tuple(spans[i][1] for i in members),
                rows=ints([np.arange(offsets[i], offsets[i] + length) for i in members]),
                positions=ints([positions[i] for i in members]),
                first_page=ints([found[i][0] for i in members]),
                table=ints(_padded([found[i][1] for i in members], width)),
                visible=(
                    ints([ends_seen[offsets[i] : offsets[i] + length] for i in members])
                    if kind is LayerKind.SLIDING and sees_ahead.issuperset(members)
                    else None
                ),
            )
            for (length, width, _), members in alike.items()
        )

    return PageGroups(
        positions=ints(np.concatenate(positions)),
        global_slots=ints(np.concatenate(slots)),
        sliding_tokens=ints(np.concatenate(kept_tokens) if kept_tokens else []),
        sliding_slots=ints(np.concatenate(kept_slots) if kept_slots else []),
        groups={
            LayerKind.GLOBAL: groups(LayerKind.GLOBAL, [(0, rows) for rows in held_globally]),
            LayerKind.SLIDING: groups(LayerKind.SLIDING, window),
        },
        texts=texts,
        owners=torch.cat([text[start:] for text, (_, start, _) in zip(texts, spans, strict=True)]) if texts else None,
        offsets=tuple(offsets),
    )


def global_rows(slot: int, end: int, cache: KVCache, tables: BlockTables) -> _Rows:
    """View rows of the pages of [0, end); empty when no global layer owns a cache."""
    pages = tables.host[LayerKind.GLOBAL][slot, : cache.geometry.global_pages(end)]
    return cache.page_rows(LayerKind.GLOBAL, pages)


def sliding_rows(slot: int, first: int, stop: int, cache: KVCache, tables: BlockTables) -> tuple[int, _Rows]:
    """First logical page of positions [first, stop), and the view rows of all of them."""
    spec = cache.geometry.sliding_page
    if not spec.layers or first >= stop:
        return 0, np.zeros(0, dtype=np.int64)
    logical = np.arange(first // spec.page_tokens, spec.pages(stop))
    pages = tables.host[LayerKind.SLIDING][slot, logical % cache.geometry.sliding_table_entries]
    return int(logical[0]), cache.page_rows(LayerKind.SLIDING, pages)


def _table_width(pages: int) -> int:
    """`pages` rounded up to two significant bits (1, 2, 3, 4, 6, 8, 12, ...): few widths, and at most half again."""
    unit = 1 << max(0, (pages - 1).bit_length() - 2)
    return -(-pages // unit) * unit


def _padded(tables: list[_Rows], width: int) -> _Rows:
    padded = np.zeros((len(tables), width), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: table.size] = table
    return padded
