"""Device arrays of one step, at addresses that do not change, so that a captured graph can read the next step's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from modelserve_worker.batch import ScheduledBatch


@dataclass(frozen=True)
class DecodeInputs:
    """Requests with one token: rows [0, B) of the step."""

    slots: Tensor  # int32 [B]; -1 for padding
    positions: Tensor  # int32 [B]; -1: a padded row, whose output stays as it is
    settled: bool  # whether earlier steps stored all keys but the row's own; not so of a chunk's last row


@dataclass(frozen=True)
class ExpansionGroup:
    """Chunks whose contexts are expanded together in a global layer; the others of the step have no blocks here."""

    blocks: Tensor  # int32 [C] running sum of query blocks
    pages: Tensor  # int32 [C] running sum of the pages of [0, end)
    key_rows: Tensor  # int32 [C] row of the expanded keys where each chunk's position 0 is, a multiple of a page
    most_blocks: int  # programs to launch
    most_pages: int


@dataclass(frozen=True)
class ChunkInputs:
    """Prefill chunks: rows [rows[i], rows[i] + lengths[i]) of the step hold positions from starts[i]."""

    rows: Tensor  # int32 [C]
    starts: Tensor  # int32 [C]
    lengths: Tensor  # int32 [C]
    slots: Tensor  # int32 [C]
    sliding_blocks: Tensor  # int32 [C] running sum of query blocks, constant past the last chunk
    most_sliding_blocks: int
    most_chunks: int  # of the C, those that may be chunks
    groups: tuple[ExpansionGroup, ...]


@dataclass(frozen=True)
class StepInputs:
    """One step of T rows: decodes first, then chunks, then padding."""

    positions: Tensor  # int32 [T]; -1 for padding
    global_slots: Tensor  # int32 [T] slot whose global page takes the row, -1 for padding
    sliding_slots: Tensor  # int32 [T] the same for sliding pages; -1 also for rows of chunks, which wait in buffers
    commit_slots: Tensor  # int32 [T] slot whose sliding page takes a waiting row that outlives the step, else -1
    decode: DecodeInputs | None
    chunks: ChunkInputs | None
    batch: ScheduledBatch | None  # the same on the host; None where a graph is captured


@dataclass(frozen=True)
class LastRows:
    """The last row of each request of a step with chunks: all that is computed once the last cache has its rows."""

    rows: Tensor  # int32 [R], of the step's T; 0 for padding
    count: Tensor  # int32 [1]: those that are not padding
    inputs: StepInputs  # of these R rows, as decodes whose keys and values have been stored
