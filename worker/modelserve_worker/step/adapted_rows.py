"""Which rows of a step have which adapter, as the blocks that kernels multiply together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modelserve.sizing.adapters import BLOCK_ROWS, AdapterLimits, step_blocks
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.kernels.adapters.terms import AdapterBlocks, row_blocks
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.segment_columns import Ints
from modelserve_worker.step.staging import StagingBuffer
from modelserve_worker.step.step_size import StepSize

ADAPTED_ROWS = "adapted_rows"
_BLOCK_SLOTS = "adapted_block_slots"
_ROW_SLOTS = "adapted_row_slots"
DECODES, CHUNKED, KEPT = "", "chunk_", "kept_"
"""Before the names of sections: of the rows of steps without chunks, of steps with some, and of these once narrowed."""


class AdaptedRows:
    """Fills sections of a staging buffer."""

    def __init__(self, limits: AdapterLimits, max_num_seqs: int) -> None:
        self._limits = limits
        self._requests = max_num_seqs

    def sections(self, kind: str, rows: int) -> dict[str, int]:
        """Words of each, of a step of at most `rows` rows."""
        blocks = step_blocks(self._limits, rows, self._requests)
        return {kind + ADAPTED_ROWS: blocks * BLOCK_ROWS, kind + _BLOCK_SLOTS: blocks, kind + _ROW_SLOTS: rows}

    def fill(
        self, staging: StagingBuffer, batch: ScheduledBatch, padded_to: StepSize | None, *, chunked: bool,
        narrowed: bool,
    ) -> tuple[AdapterBlocks, AdapterBlocks | None]:  # fmt: skip
        """The blocks of all rows, and of those of the narrowed step: all that the captured step has, or those that are
        needed."""
        rows, last = (0, 0) if padded_to is None else (padded_to.rows, padded_to.last)
        whole = self._fill(staging, CHUNKED if chunked else DECODES, batch.adapters, batch.lengths, rows)
        return whole, self._fill(staging, KEPT, batch.adapters, batch.kept, last) if narrowed else None

    def decode_views(self, step: Step, staging: StagingBuffer) -> Step:
        """A captured step without chunks, with its blocks."""
        return with_adapters(step, self._of_rows(staging, DECODES, len(step.positions)), None)

    def mixed_views(self, step: Step, staging: StagingBuffer) -> Step:
        """One with chunks."""
        narrowed = None if step.narrowed is None else self._of_rows(staging, KEPT, len(step.narrowed.positions))
        return with_adapters(step, self._of_rows(staging, CHUNKED, len(step.positions)), narrowed)

    def _fill(
        self, staging: StagingBuffer, kind: str, adapters: Ints, lengths: Ints, padded_rows: int
    ) -> AdapterBlocks:
        row_slots = np.repeat(adapters, lengths)
        rows, slots = row_blocks(row_slots)
        for name, values in ((ADAPTED_ROWS, rows), (_BLOCK_SLOTS, slots), (_ROW_SLOTS, row_slots)):
            section = staging.host(kind + name)
            section[: len(values)] = values
            section[len(values) :] = -1
        if padded_rows:
            return self._of_rows(staging, kind, padded_rows)
        return self._views(staging, kind, len(slots), len(row_slots))

    def _of_rows(self, staging: StagingBuffer, kind: str, rows: int) -> AdapterBlocks:
        return self._views(staging, kind, step_blocks(self._limits, rows, self._requests), rows)

    def _views(self, staging: StagingBuffer, kind: str, blocks: int, step_rows: int) -> AdapterBlocks:
        rows, slots, row_slots = (staging.device(kind + name) for name in (ADAPTED_ROWS, _BLOCK_SLOTS, _ROW_SLOTS))
        return AdapterBlocks(rows[: blocks * BLOCK_ROWS], slots[:blocks], row_slots[:step_rows])


def with_adapters(step: Step, blocks: AdapterBlocks, narrowed: AdapterBlocks | None) -> Step:
    """The step with these blocks of its rows, and of those of the narrowed one."""
    if step.narrowed is not None and narrowed is not None:
        return replace(step, adapters=blocks, narrowed=replace(step.narrowed, adapters=narrowed))
    return replace(step, adapters=blocks)
