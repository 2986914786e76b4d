"""A ScheduledBatch as device arrays: filled on the host in whole-array operations, sent in one copy.

Two layouts at fixed addresses: one for steps of few-row segments alone, which captured graphs read, and one for any.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from modelserve.sizing.adapters import AdapterLimits
from modelserve.sizing.kernel_buffers import chunk_slots
from modelserve.sizing.pages import CacheGeometry
from modelserve.sizing.speculation import Speculation
from modelserve_worker.batch import (
    IN_FLIGHT,
    ScheduledBatch,
    draft_stored_from,
    row_places,
    spare_from,
    stored_from,
)
from modelserve_worker.kernels.step import Draws, Segments, Step
from modelserve_worker.step.adapted_rows import ADAPTED_ROWS, CHUNKED, DECODES, KEPT, AdaptedRows, with_adapters
from modelserve_worker.step.chunk_passes import SECTION, ChunkPasses, PassSize
from modelserve_worker.step.packing_limits import PackingLimits
from modelserve_worker.step.segment_columns import Ints, of_rows, row_by_row
from modelserve_worker.step.staging import StagingBuffer
from modelserve_worker.step.step_size import QueryBlocks, StepSize

_PADDING = -1
_PADDED = ("positions", "slots", "starts", "assumed", ADAPTED_ROWS)
_SEGMENT = ("slots", "starts", "lengths", "rows")  # columns of Segments
_ROW = ("token_ids", "positions", "global_slots", "sliding_slots", "commit_slots")
_RING = "ring_slots"  # a column of rows, where a drafter has layers with windows
_SAMPLED = ("sampled_rows", "sampled_slots", "sampled_positions", "output_counts")
_DRAWS = ("draw_slots", "draw_firsts", "draw_lengths", "draw_rows")
_KEPT = ("kept", "kept_slots", "kept_positions")


class StepPacker:
    """Packs steps for one runner. Segments of at most `most_rows` rows are no chunks. Where rows are to be `exact`,
    decodes are attended to row by row, and no step is narrowed. Its buffers are made by `staging`."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        blocks: QueryBlocks,
        device: torch.device,
        most_rows: int = 1,
        exact: bool = False,
        adapters: AdapterLimits | None = None,
        staging: type[StagingBuffer] = StagingBuffer,
    ) -> None:
        self.most_rows = most_rows
        self.exact = exact
        self._geometry = geometry
        self._max_num_seqs = max_num_seqs
        self._speculation = Speculation(most_rows - 1)
        self._few = self._speculation.step_rows(max_num_seqs)  # rows of segments that are no chunks
        self._max_tokens = max(max_num_batched_tokens, self._few)
        self._limits = PackingLimits(
            max_num_seqs=max_num_seqs, max_tokens=self._max_tokens, few_rows=self._few, most_rows=most_rows,
            vocab_size=vocab_size, max_model_len=max_model_len,
        )  # fmt: skip
        self._blocks = blocks
        self.adapted = None if adapters is None else AdaptedRows(adapters, max_num_seqs)
        self._numbers = np.arange(self._max_tokens, dtype=np.int32)
        self._most_segments = self._few if exact else max_num_seqs
        decodes = _sections("decode_", _SEGMENT, self._most_segments)
        decodes |= _sections("", _DRAWS, max_num_seqs) | _sections("", _SAMPLED, self._few)
        chunks = _sections("chunk_", (*_SEGMENT, "sliding_blocks"), chunk_slots(max_num_seqs))
        kept = {**_sections("", _KEPT, self._few), **_sections("kept_segment_", _SEGMENT, max_num_seqs)}
        if most_rows > 1:
            decodes["assumed"] = max_num_seqs
        if self.adapted is not None:
            decodes |= self.adapted.sections(DECODES, self._few)
            chunks |= self.adapted.sections(CHUNKED, self._max_tokens)
            kept |= self.adapted.sections(KEPT, self._few)
        self._passes = ChunkPasses(max_num_seqs)
        draft = geometry.draft
        self._rings = draft if draft is not None and draft.window_layers else None
        row = (*_ROW, _RING) if self._rings is not None else _ROW
        self._decodes = staging({"num_rows": 1, **_sections("", row, self._few), **decodes}, device)
        self._any = staging(
            {
                "num_rows": 1, **_sections("", row, self._max_tokens), **decodes, **chunks, "num_kept": 1, **kept,
                **self._passes.sections,
            },
            device,
        )  # fmt: skip

    def fits_one_expansion(self, batch: ScheduledBatch) -> bool:
        """Whether the contexts of all chunks are expanded together, as a captured step has it."""
        page = self._geometry.global_page.page_tokens
        ends = (batch.starts + batch.lengths)[batch.decodes(self.most_rows) :]
        return int((-(-ends // page) * page).sum()) <= self._blocks.expansion_keys

    def narrows(self, batch: ScheduledBatch) -> bool:
        """Whether a step has rows to leave out: it has chunks, and none of them is scored."""
        chunks = batch.decodes(self.most_rows) < batch.num_requests
        return not self.exact and chunks and int(batch.sampled.max()) <= self.most_rows

    def pack(self, batch: ScheduledBatch, *, padded_to: StepSize | None = None) -> Step:
        """Fill and send one step. `padded_to`: the captured step that is to take it.

        Raises InvalidInput when the batch breaks the contract of `modelserve_worker.batch`.
        """
        self._limits.check(batch)
        decodes = batch.decodes(self.most_rows)
        chunked = decodes < batch.num_requests
        staging = self._any if chunked else self._decodes
        staging.begin()
        narrows = self.narrows(batch)
        rows = batch.num_tokens if padded_to is None else padded_to.rows
        lone = batch.num_tokens == batch.num_requests
        firsts = self._numbers[: batch.num_requests] if lone else np.cumsum(batch.lengths) - batch.lengths
        self._fill_rows(staging, batch, firsts, decodes, rows, window=self._kept_window(batch, narrows=narrows))
        if self.most_rows > 1:
            self._fill_assumed(staging, batch, firsts)
        columns = (batch.slots, batch.starts, batch.lengths, firsts)
        few = tuple(column[:decodes] for column in columns)
        if self.exact and self.most_rows > 1:
            few = row_by_row(*few)
        self._fill_segments(staging, "decode_", few)
        segments, drawn = self._fill_samples(staging, batch, batch.kept if narrows else batch.lengths)
        chunks: Segments | None = None
        passes: tuple[Segments, ...] = ()
        if chunked:
            chunks, passes = self._fill_chunks(tuple(column[decodes:] for column in columns))
        narrowed = None
        if narrows:
            self._fill_kept(batch, firsts)
            kept = int(batch.kept.sum()) if padded_to is None else padded_to.last
            narrowed = self._narrowed(kept, batch.num_requests if padded_to is None else self.segments_of(kept))
        filled = None
        if self.adapted is not None and len(batch.adapters):
            filled = self.adapted.fill(staging, batch, padded_to, chunked=chunked, narrowed=narrows)
        if chunked:
            self._passes.send(staging, len(passes))
        else:
            staging.send()
        padded, most_rows = len(few[0]), self.most_rows
        if padded_to is not None and not chunked:
            padded, most_rows = self.segments_of(rows, padded_to.few), padded_to.few
        step = self._step(staging, rows, padded, chunks, passes, narrowed, few=most_rows)
        step = step if filled is None else with_adapters(step, *filled)
        if not drawn:
            return step
        views = [staging.device(name)[:drawn] for name in _SAMPLED]
        # Rows rise, so where the last is the N-th they are the first ones.
        first_rows = int(staging.host("sampled_rows")[drawn - 1]) == drawn - 1
        return replace(
            step,
            draws=Draws(*(staging.device(name)[:segments] for name in _DRAWS)),
            sampled_rows=None if first_rows else views[0],
            sampled_slots=views[1],
            sampled_positions=views[2],
            output_counts=views[3],
        )

    def last_rows(self, rows: int, last: int) -> int:
        """Rows of a captured step with chunks that have hidden states, where `last` are enough."""
        return rows if self.exact else last

    def decode_views(self, rows: int, few: int = 1, *, adapted: bool = False) -> Step:
        """The step of `rows` rows in segments of at most `few` that `pack` fills, all of it padding for now: what a
        graph is captured over."""
        self._clear(self._decodes)
        step = self._step(self._decodes, rows, self.segments_of(rows, few), None, (), None, few=few)
        return step if not adapted or self.adapted is None else self.adapted.decode_views(step, self._decodes)

    def mixed_views(self, rows: int, last: int, *, adapted: bool = False) -> Step:
        """The same for a step of `rows` rows with chunks, of which at most `last` go on: its launches cover whatever
        such a step may hold."""
        self._clear(self._any)
        size, blocks = self._max_num_seqs, self._blocks
        most = -(-rows // blocks.sliding_tokens) + size
        chunks = self._chunks(most, size)
        most_pages = blocks.expansion_keys // self._geometry.global_page.page_tokens
        whole = self._pass(chunks, 0, PassSize(-(-rows // blocks.global_tokens) + size, most_pages))
        narrowed = None if self.exact else self._narrowed(last, self.segments_of(last))
        step = self._step(self._any, rows, self._most_segments, chunks, (whole,), narrowed, few=self.most_rows)
        return step if not adapted or self.adapted is None else self.adapted.mixed_views(step, self._any)

    def segments_of(self, rows: int, few: int = 1) -> int:
        """Segments that a captured step of so many rows has room for."""
        if few == 1 or self.exact:
            return min(self._most_segments, rows)
        return self._speculation.segments(rows, self._max_num_seqs)

    def _clear(self, staging: StagingBuffer) -> None:
        staging.begin()
        for name in staging.names:
            if name != SECTION:
                staging.host(name)[:] = _PADDING if name.endswith(_PADDED) else 0
        if staging is self._any:
            self._passes.clear(staging)
        else:
            staging.send()

    def _step(
        self,
        staging: StagingBuffer,
        rows: int,
        decodes: int,
        chunks: Segments | None,
        passes: tuple[Segments, ...],
        narrowed: Step | None,
        *,
        few: int,
    ) -> Step:
        token_ids, positions, global_slots, sliding_slots, commit_slots = (staging.device(name)[:rows] for name in _ROW)
        return Step(
            positions=positions,
            num_rows=staging.device("num_rows"),
            global_slots=global_slots,
            sliding_slots=sliding_slots,
            commit_slots=commit_slots,
            decode=self._few_rows(staging, "decode_", decodes, few=few) if decodes else None,
            chunks=chunks,
            passes=passes,
            token_ids=token_ids,
            narrowed=narrowed,
            assumed=staging.device("assumed") if self.most_rows > 1 else None,
            ring_slots=staging.device(_RING)[:rows] if self._rings is not None else None,
        )

    def _few_rows(self, staging: StagingBuffer, prefix: str, count: int, *, few: int, settled: bool = True) -> Segments:
        slots, starts, lengths, rows = (staging.device(prefix + name)[:count] for name in _SEGMENT)
        most_rows = 1 if self.exact else few
        return Segments(slots, starts, lengths, rows, most=count, most_rows=most_rows, settled=settled)

    def _narrowed(self, rows: int, segments: int) -> Step:
        """The sections that `_fill_kept` fills, with padding."""
        kept, slots, positions = (self._any.device(name)[:rows] for name in _KEPT)
        return Step(
            positions=positions,
            num_rows=self._any.device("num_kept"),
            global_slots=slots,
            sliding_slots=slots,
            commit_slots=slots,
            decode=self._few_rows(self._any, "kept_segment_", segments, few=self.most_rows, settled=False),
            chunks=None,
            kept=kept,
        )

    def _kept_window(self, batch: ScheduledBatch, *, narrows: bool) -> Ints | int:
        """Rows of each segment that sliding layers keep: the window of the first row that is read from pages, where
        others are not computed."""
        window = self._geometry.window
        return window + batch.kept - 1 if narrows and self.most_rows > 1 else window

    def _fill_rows(
        self, staging: StagingBuffer, batch: ScheduledBatch, firsts: Ints, decodes: int, rows: int,
        *, window: Ints | int,
    ) -> None:  # fmt: skip
        tokens = batch.num_tokens
        staging.host("num_rows")[0] = tokens
        positions, slots = batch.starts, batch.slots
        commits: Ints | int = _PADDING
        few = decodes
        if tokens > batch.num_requests:
            few = int(batch.lengths[:decodes].sum())
            positions = self._numbers[:tokens] + of_rows(batch, batch.starts - firsts)
            slots = of_rows(batch, batch.slots)
        rings = slots
        if decodes < batch.num_requests:
            ends = batch.starts + batch.lengths
            kept_from = np.minimum(stored_from(self._geometry, ends), ends - window)
            commits = np.where(positions >= of_rows(batch, kept_from), slots, _PADDING)
            if len(batch.spare_slots):
                spare = (commits < 0) & (positions >= of_rows(batch, spare_from(self._geometry, ends)))
                commits = np.where(spare, of_rows(batch, batch.spare_slots), commits)
            commits[:few] = _PADDING
            if self._rings is not None:
                kept = positions >= of_rows(batch, draft_stored_from(self._rings, ends))
                kept[:few] = True
                rings = np.where(kept, slots, _PADDING)
        sliding = staging.host("sliding_slots")
        sliding[:few] = slots[:few] if len(slots) > 1 else slots
        sliding[few:rows] = _PADDING
        for name, values, padding in (
            ("token_ids", batch.token_ids, 0),
            ("positions", positions, _PADDING),
            ("global_slots", slots, _PADDING),
            ("commit_slots", commits, _PADDING),
            *([(_RING, rings, _PADDING)] if self._rings is not None else []),
        ):
            section = staging.host(name)
            section[:tokens] = values
            section[tokens:rows] = padding

    def _fill_assumed(self, staging: StagingBuffer, batch: ScheduledBatch, firsts: Ints) -> None:
        ahead = batch.token_ids[firsts] == IN_FLIGHT
        section = staging.host("assumed")
        section[:] = _PADDING
        section[batch.slots[ahead]] = batch.starts[ahead]

    def _fill_segments(self, staging: StagingBuffer, prefix: str, columns: tuple[Ints, ...]) -> None:
        count = len(columns[0])
        for name, values in zip(_SEGMENT, columns, strict=True):
            section = staging.host(prefix + name)
            section[:count] = values
            section[count:] = _PADDING if name in ("slots", "starts") else 0

    def _fill_kept(self, batch: ScheduledBatch, firsts: Ints) -> None:
        kept = batch.kept
        segments, offsets = row_places(kept)
        count, skipped = len(segments), (batch.lengths - kept)[segments] + offsets
        self._any.host("num_kept")[0] = count
        for name, values, padding in (
            ("kept", firsts[segments] + skipped, 0),
            ("kept_slots", batch.slots[segments], _PADDING),
            ("kept_positions", batch.starts[segments] + skipped, _PADDING),
        ):
            section = self._any.host(name)
            section[:count] = values
            section[count:] = padding
        starts = batch.starts + batch.lengths - kept
        self._fill_segments(self._any, "kept_segment_", (batch.slots, starts, kept, np.cumsum(kept) - kept))

    def _fill_samples(self, staging: StagingBuffer, batch: ScheduledBatch, lengths: Ints) -> tuple[int, int]:
        """How many segments get tokens, and how many, of rows that lie back to back, `lengths` of each segment."""
        drawn, numbers = batch.drawn, self._numbers
        if batch.num_tokens == batch.num_requests == np.count_nonzero(drawn):  # decodes alone, nearly always
            count = len(drawn)
            columns: tuple[Ints, ...] = (batch.slots, numbers[:count], drawn, numbers[:count])
            rows = (numbers[:count], batch.slots, batch.starts + 1, batch.output_counts)
        else:
            drawing, (segments, offsets) = np.flatnonzero(drawn), row_places(drawn)
            firsts = offsets - drawn[segments]  # from the segment's end
            columns = tuple(
                each[drawing].astype(np.int32)
                for each in (batch.slots, np.cumsum(drawn) - drawn, drawn, np.cumsum(batch.lengths) - drawn)
            )
            rows = (
                (np.cumsum(lengths)[segments] + firsts).astype(np.int32),
                batch.slots[segments],
                (batch.starts + batch.lengths)[segments] + firsts + 1,
                batch.output_counts[segments] + offsets,
            )
        for names, arrays in ((_DRAWS, columns), (_SAMPLED, rows)):
            for name, values in zip(names, arrays, strict=True):
                staging.host(name)[: len(values)] = values
        return len(columns[0]), len(rows[0])

    def _fill_chunks(self, columns: tuple[Ints, ...]) -> tuple[Segments, tuple[Segments, ...]]:
        _, starts, lengths, _ = columns
        staging, count = self._any, len(lengths)
        for name, array in zip(_SEGMENT, columns, strict=True):
            staging.host(f"chunk_{name}")[:count] = array
        sliding_blocks = np.cumsum(-(-lengths // self._blocks.sliding_tokens))
        staging.host("chunk_sliding_blocks")[:count] = sliding_blocks
        staging.host("chunk_sliding_blocks")[count:] = sliding_blocks[-1]
        chunks = self._chunks(int(sliding_blocks[-1]), count)
        page = self._geometry.global_page.page_tokens
        sizes = self._passes.fill(
            staging, -(-(starts + lengths) // page), -(-lengths // self._blocks.global_tokens), page_tokens=page,
            capacity=self._blocks.expansion_keys,
        )  # fmt: skip
        return chunks, tuple(self._pass(chunks, number, size) for number, size in enumerate(sizes))

    def _chunks(self, most_sliding_blocks: int, most: int) -> Segments:
        slots, starts, lengths, rows = (self._any.device(f"chunk_{name}") for name in _SEGMENT)
        return Segments(
            slots, starts, lengths, rows, most=most, most_rows=self._max_tokens,
            sliding_blocks=self._any.device("chunk_sliding_blocks"), most_sliding_blocks=most_sliding_blocks,
        )  # fmt: skip

    def _pass(self, chunks: Segments, number: int, size: PassSize) -> Segments:
        blocks, pages, key_rows = self._passes.columns(self._any.device(SECTION), number)
        return replace(
            chunks, blocks=blocks, pages=pages, key_rows=key_rows, most_blocks=size.most_blocks,
            most_pages=size.most_pages,
        )  # fmt: skip


def _sections(prefix: str, names: tuple[str, ...], words: int) -> dict[str, int]:
    return {prefix + name: words for name in names}
