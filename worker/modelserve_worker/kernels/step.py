"""A step as its device reads it: a table of segments, and what follows from it for every row.

A segment is some consecutive positions of one request. Arrays lie at addresses that do not change, so that a captured
graph finds the next step there; what a launch depends on, and the host alone knows, are plain numbers. All readers, the
kernels, their plain references and the sampler, take these types and know no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from modelserve_worker.kernels.adapters.terms import AdapterBlocks


class SegmentColumns(NamedTuple):
    """Segments as kernels take them, each int32 [S]: see `Segments`."""

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    firsts: Tensor


@dataclass(frozen=True)
class Segments:
    """S segments of one class, and padding; each column is int32 [S]. A segment sees its own earlier rows and, by the
    block tables of its slot, all positions before `starts`."""

    slots: Tensor  # row of block tables, of the tokens on the device, of sampling parameters; -1: padding
    starts: Tensor  # position of the first row; -1: padding, whose output stays as it is
    lengths: Tensor  # rows
    rows: Tensor  # the step's row that is the first one
    most: int  # of the S, those that may be segments
    most_rows: int  # of one segment
    settled: bool = True  # whether earlier steps stored all keys before `starts`; not so where a step is narrowed
    # Of chunks, the programs of their kernels, as running sums that are constant past the last chunk:
    sliding_blocks: Tensor | None = None  # query blocks in sliding layers
    most_sliding_blocks: int = 0  # programs to launch
    # And in one pass of a global layer, where the contexts of some are expanded together and others have no block:
    blocks: Tensor | None = None  # query blocks
    pages: Tensor | None = None  # pages of [0, end)
    key_rows: Tensor | None = None  # no sum: row of the expanded keys where position 0 is, a multiple of a page
    most_blocks: int = 0
    most_pages: int = 0

    def window_keys(self, tokens: int, window: int) -> int:
        """Of chunks in sliding layers: keys of a step's rows and of the window before each chunk."""
        return tokens + self.most * (window - 1)

    @property
    def columns(self) -> SegmentColumns:
        return SegmentColumns(self.slots, self.starts, self.lengths, self.rows)

    @property
    def positions(self) -> Tensor:
        """Of segments of one row, the row's."""
        return self.starts


class Draws(NamedTuple):
    """The S segments of a step that get tokens, each column int32 [S]."""

    slots: Tensor
    firsts: Tensor  # its first token among the N of the step
    lengths: Tensor  # tokens at most
    rows: Tensor  # the step's row that gets the first


class EmbeddedRows(NamedTuple):
    """The E rows of a step that begin from embeddings instead of tokens."""

    rows: Tensor  # int64 [E], rising
    values: Tensor  # [E, H] in the model's dtype, as the first layer gets them


@dataclass(frozen=True)
class Step:
    """One step of T rows, segment by segment and then padding: few-row segments (decodes, drafts) first, then chunks.

    A step with chunks is `narrowed` once the last cache has its rows: only those whose logits are wanted, or the last
    one of a segment that wants none, go on.
    """

    positions: Tensor  # int32 [T]; -1: padding
    num_rows: Tensor  # int32 [1]: rows that are not padding
    global_slots: Tensor  # int32 [T] slot whose global page takes the row, -1: padding
    sliding_slots: Tensor  # int32 [T] the same for sliding pages; -1 also for rows of chunks, which wait in buffers
    commit_slots: Tensor  # int32 [T] slot whose sliding page takes a waiting row that outlives the step, else -1
    decode: Segments | None  # of few rows, attended to by the decode kernels
    chunks: Segments | None
    passes: tuple[Segments, ...] = ()  # of chunks in global layers
    token_ids: Tensor | None = None  # int32 [T]; -1 - j: what the slot has on the device. None once narrowed
    narrowed: Step | None = None
    kept: Tensor | None = None  # int32 [T], of a narrowed step: its rows in the step, 0 for padding
    embedded: EmbeddedRows | None = None  # None: all rows are of tokens
    # int32 [T]: the last position that a row of a chunk sees in sliding layers, no earlier than its own and in its
    # chunk; global layers are causal. None: each its own.
    last_keys: Tensor | None = None
    # int32 [slots]: where the host assumed a slot whose drafts in flight may not all be accepted, -1: it knows. None:
    # there are no drafts. All positions are what they would be there, until `StepBackend.settle`.
    assumed: Tensor | None = None
    # int32 [T]: slot in whose ring of draft pages a row is stored, -1: none. None: a drafter stores none.
    ring_slots: Tensor | None = None
    adapters: AdapterBlocks | None = None  # None: no row has one
    draws: Draws | None = None
    # N rows that get a token; None: none does. `sampled_rows` None: they are the first of those with hidden states.
    sampled_rows: Tensor | None = None  # int32 [N]
    sampled_slots: Tensor | None = None  # int32 [N]
    sampled_positions: Tensor | None = None  # int32 [N] positions of the tokens
    output_counts: Tensor | None = None  # int32 [N] tokens that the request has sampled before
