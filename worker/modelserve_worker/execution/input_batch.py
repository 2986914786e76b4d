"""A ScheduledBatch as device arrays: filled on the host in whole-array operations, sent in one copy.

Two layouts at fixed addresses: one for steps of decodes alone, which captured graphs read, and one for any step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.sizing.kernel_buffers import chunk_slots
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import IN_FLIGHT, ScheduledBatch, TableUpdates, spare_from, stored_from
from modelserve_worker.execution.staging import StagingBuffer
from modelserve_worker.kernels.step_inputs import ChunkInputs, DecodeInputs, ExpansionGroup, LastRows, StepInputs

Ints = NDArray[np.int32]
Number = TypeVar("Number", bound=np.generic)
_PADDING = -1
_NOTHING = np.zeros(0, dtype=np.int32)
_NO_UPDATES = TableUpdates(_NOTHING, _NOTHING, _NOTHING)


@dataclass(frozen=True)
class QueryBlocks:
    """Tokens of one query block of the chunk kernels, by page kind, and keys that one expansion may hold."""

    global_tokens: int
    sliding_tokens: int
    expansion_keys: int


@dataclass(frozen=True, order=True)
class StepSize:
    """Rows of a captured step and how many of them have hidden states, both with padding."""

    rows: int
    last: int  # one of each request; all, in a step of decodes alone


@dataclass(frozen=True)
class SampledRows:
    """The S requests that sample, in batch order; device arrays int32 [S] and their host copies."""

    rows: Tensor | None  # which rows of the hidden states; None: the first S
    slots: Tensor
    positions: Tensor  # of the sampled tokens
    output_counts: Tensor
    host_slots: Ints
    host_output_counts: Ints


@dataclass(frozen=True)
class PackedStep:
    """One step of T rows, padded to `inputs.positions`' length."""

    token_ids: Tensor  # int32 [T]; IN_FLIGHT where the token is the slot's last one on the device
    num_rows: Tensor  # int32 [1], rows that are not padding
    inputs: StepInputs
    sampled: SampledRows | None
    last: LastRows | None  # the rows of which there are hidden states; None: of all


class StepPacker:
    """Packs steps for one runner."""

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
    ) -> None:
        self._geometry = geometry
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._chunk_slots = chunk_slots(max_num_seqs)
        self._max_tokens = max(max_num_batched_tokens, max_num_seqs)
        self._blocks = blocks
        self._numbers = np.arange(self._max_tokens, dtype=np.int32)
        by_request = ("rows", "sample_slots", "sample_positions", "output_counts", "decode_slots", "decode_positions")
        requests = dict.fromkeys(by_request, max_num_seqs)
        rows = ("token_ids", "positions", "global_slots", "sliding_slots", "commit_slots")
        chunks = dict.fromkeys(("chunk_rows", "starts", "lengths", "slots", "sliding_blocks"), self._chunk_slots)
        last = dict.fromkeys(("last_rows", "last_slots", "last_positions"), max_num_seqs)
        groups = dict.fromkeys(("group_blocks", "group_pages", "key_rows"), max_num_seqs * self._chunk_slots)
        self._decodes = StagingBuffer({"num_rows": 1, **dict.fromkeys(rows, max_num_seqs), **requests}, device)
        self._any = StagingBuffer(
            {
                "num_rows": 1, **dict.fromkeys(rows, self._max_tokens), **requests, **chunks, "num_last": 1, **last,
                **groups,
            },
            device,
        )  # fmt: skip

    def fits_one_expansion(self, batch: ScheduledBatch) -> bool:
        """Whether the contexts of all chunks are expanded together, as a captured step has it."""
        page = self._geometry.global_page.page_tokens
        ends = (batch.starts + batch.lengths)[batch.lengths > 1]
        return int((-(-ends // page) * page).sum()) <= self._blocks.expansion_keys

    def pack(self, batch: ScheduledBatch, *, padded_to: StepSize | None = None, all_rows: bool = False) -> PackedStep:
        """Fill and send one step. `padded_to`: the captured step that is to take it.

        `all_rows`: hidden states of all, where a step with chunks has them of each request's last row alone. Raises
        InvalidInput when the batch breaks the contract of `modelserve_worker.batch`.
        """
        self._check(batch)
        longer = np.flatnonzero(batch.lengths > 1)
        decodes = int(longer[0]) if len(longer) else batch.num_requests
        staging = self._any if len(longer) else self._decodes
        staging.begin()
        rows = batch.num_tokens if padded_to is None else padded_to.rows
        self._fill_rows(staging, batch, decodes, rows)
        narrowed = len(longer) > 0 and not all_rows
        sampled = self._fill_samples(staging, batch, narrowed=narrowed)
        chunks = self._fill_chunks(staging, batch, decodes) if len(longer) else None
        last = None
        if narrowed:
            self._fill_last(staging, batch)
            last = self._last_rows(batch.num_requests if padded_to is None else padded_to.last, batch)
        staging.send()
        return self._packed(staging, rows, decodes, chunks, batch, sampled, last)

    def decode_views(self, rows: int) -> PackedStep:
        """The step of `rows` decodes that `pack` fills, all of it padding for now: what a graph is captured over."""
        self._clear(self._decodes)
        return self._packed(self._decodes, rows, rows, None, None, None, None)

    def mixed_views(self, rows: int, last: int) -> PackedStep:
        """The same for a step of `rows` rows with chunks, of at most `last` requests: its launches cover whatever such
        a step may hold."""
        self._clear(self._any)
        size, blocks, view = self._max_num_seqs, self._blocks, self._any.device
        group = ExpansionGroup(
            blocks=view("group_blocks")[: self._chunk_slots],
            pages=view("group_pages")[: self._chunk_slots],
            key_rows=view("key_rows")[: self._chunk_slots],
            most_blocks=-(-rows // blocks.global_tokens) + size,
            most_pages=blocks.expansion_keys // self._geometry.global_page.page_tokens,
        )
        most = -(-rows // blocks.sliding_tokens) + size
        chunks = self._chunk_inputs(most, size, (group,))
        return self._packed(self._any, rows, size, chunks, None, None, self._last_rows(last, None))

    def _clear(self, staging: StagingBuffer) -> None:
        staging.begin()
        for name in staging.names:
            staging.host(name)[:] = _PADDING if name.endswith(("positions", "slots")) else 0
        staging.send()

    def _packed(
        self,
        staging: StagingBuffer,
        rows: int,
        decodes: int,
        chunks: ChunkInputs | None,
        batch: ScheduledBatch | None,
        sampled: SampledRows | None,
        last: LastRows | None,
    ) -> PackedStep:
        slots, positions = staging.device("global_slots")[:rows], staging.device("positions")[:rows]
        decode = DecodeInputs(slots, positions, settled=True)  # with its padding
        if chunks is not None:
            views = [staging.device(name)[:decodes] for name in ("decode_slots", "decode_positions")]
            decode = DecodeInputs(views[0], views[1], settled=True)
        inputs = StepInputs(
            positions=positions,
            global_slots=slots,
            sliding_slots=staging.device("sliding_slots")[:rows],
            commit_slots=staging.device("commit_slots")[:rows],
            decode=decode if decodes else None,
            chunks=chunks,
            batch=batch,
        )
        return PackedStep(staging.device("token_ids")[:rows], staging.device("num_rows"), inputs, sampled, last)

    def _last_rows(self, count: int, batch: ScheduledBatch | None) -> LastRows:
        """The sections that `_fill_last` fills, of `count` requests with padding."""
        rows, slots, positions = (self._any.device(f"last_{name}")[:count] for name in ("rows", "slots", "positions"))
        decode = DecodeInputs(slots, positions, settled=False)
        inputs = StepInputs(positions, slots, slots, slots, decode, None, batch and _last_tokens(batch))
        return LastRows(rows, self._any.device("num_last"), inputs)

    def _check(self, batch: ScheduledBatch) -> None:
        """On a GPU an index outside an array ends the process; here it ends one step."""
        name = f"step {batch.step}"
        if not batch.num_tokens or (batch.lengths < 1).any() or batch.lengths.sum() != batch.num_tokens:
            raise InvalidInput(f"{name} has no tokens, or not as many as its requests' lengths add up to")
        if batch.num_requests > self._max_num_seqs or batch.num_tokens > self._max_tokens:
            raise InvalidInput(
                f"{name} has {batch.num_requests} requests and {batch.num_tokens} tokens; the runner was made for "
                f"{self._max_num_seqs} and {self._max_tokens}"
            )
        single = batch.lengths == 1
        lowest: Ints | int = np.where(_of_rows(batch, single), np.int32(IN_FLIGHT), np.int32(0)) if single.any() else 0
        if (batch.token_ids < lowest).any() or batch.token_ids.max() >= self._vocab_size:
            raise InvalidInput(f"{name}: a token id outside 0..{self._vocab_size - 1}")
        if batch.slots.min() < 0 or batch.slots.max() >= self._max_num_seqs or batch.starts.min() < 0:
            raise InvalidInput(f"{name}: a slot outside 0..{self._max_num_seqs - 1} or a position below 0")
        if (last := int((batch.starts + batch.lengths).max())) > self._max_model_len:
            raise InvalidInput(f"{name} computes {last} positions; block tables are for {self._max_model_len}")

    def _fill_rows(self, staging: StagingBuffer, batch: ScheduledBatch, decodes: int, rows: int) -> None:
        tokens = batch.num_tokens
        staging.host("num_rows")[0] = tokens
        positions, slots = batch.starts, batch.slots
        commits: Ints | int = _PADDING
        if decodes < batch.num_requests:
            staging.host("decode_slots")[:decodes] = slots[:decodes]
            staging.host("decode_positions")[:decodes] = positions[:decodes]
            staging.host("decode_positions")[decodes:] = _PADDING
            firsts = np.cumsum(batch.lengths) - batch.lengths
            positions = self._numbers[:tokens] + _of_rows(batch, batch.starts - firsts)
            slots = _of_rows(batch, batch.slots)
            ends = batch.starts + batch.lengths
            commits = np.where(positions >= _of_rows(batch, stored_from(self._geometry, ends)), slots, _PADDING)
            if len(batch.spare_slots):
                spare = (commits < 0) & (positions >= _of_rows(batch, spare_from(self._geometry, ends)))
                commits = np.where(spare, _of_rows(batch, batch.spare_slots), commits)
            commits[:decodes] = _PADDING
        sliding = staging.host("sliding_slots")
        sliding[:decodes] = batch.slots[:decodes]
        sliding[decodes:rows] = _PADDING
        for name, values, padding in (
            ("token_ids", batch.token_ids, 0),
            ("positions", positions, _PADDING),
            ("global_slots", slots, _PADDING),
            ("commit_slots", commits, _PADDING),
        ):
            section = staging.host(name)
            section[:tokens] = values
            section[tokens:rows] = padding

    def _fill_last(self, staging: StagingBuffer, batch: ScheduledBatch) -> None:
        count = batch.num_requests
        staging.host("num_last")[0] = count
        for name, values, padding in (
            ("last_rows", np.cumsum(batch.lengths) - 1, 0),
            ("last_slots", batch.slots, _PADDING),
            ("last_positions", batch.starts + batch.lengths - 1, _PADDING),
        ):
            section = staging.host(name)
            section[:count] = values
            section[count:] = padding

    def _fill_samples(self, staging: StagingBuffer, batch: ScheduledBatch, *, narrowed: bool) -> SampledRows | None:
        which = np.flatnonzero(batch.samples)
        count = len(which)
        if not count:
            return None
        host_slots, host_counts = batch.slots[which], batch.output_counts[which]
        rows = which if narrowed else (np.cumsum(batch.lengths) - 1)[which]
        staging.host("rows")[:count] = rows
        staging.host("sample_slots")[:count] = host_slots
        staging.host("sample_positions")[:count] = (batch.starts + batch.lengths)[which]
        staging.host("output_counts")[:count] = host_counts
        first_rows = bool(rows[-1] == count - 1)  # rows rise, so these are the first ones
        return SampledRows(
            rows=None if first_rows else staging.device("rows")[:count],
            slots=staging.device("sample_slots")[:count],
            positions=staging.device("sample_positions")[:count],
            output_counts=staging.device("output_counts")[:count],
            host_slots=host_slots,
            host_output_counts=host_counts,
        )

    def _fill_chunks(self, staging: StagingBuffer, batch: ScheduledBatch, decodes: int) -> ChunkInputs:
        lengths, starts = batch.lengths[decodes:], batch.starts[decodes:]
        count, size = len(lengths), self._chunk_slots
        values = {
            "chunk_rows": decodes + np.cumsum(lengths) - lengths,
            "starts": starts,
            "lengths": lengths,
            "slots": batch.slots[decodes:],
            "sliding_blocks": np.cumsum(-(-lengths // self._blocks.sliding_tokens)),
        }
        for name, array in values.items():
            staging.host(name)[:count] = array
        staging.host("sliding_blocks")[count:] = values["sliding_blocks"][-1]
        groups = []
        page = self._geometry.global_page.page_tokens
        pages, blocks = -(-(starts + lengths) // page), -(-lengths // self._blocks.global_tokens)
        for number, members in enumerate(_groups(pages * page, self._blocks.expansion_keys)):
            span = slice(number * size, (number + 1) * size)
            of_group = np.zeros(size, dtype=np.int32)
            of_group[members] = pages[members]
            page_ends = np.cumsum(of_group)
            staging.host("group_pages")[span] = page_ends
            staging.host("key_rows")[span] = (page_ends - of_group) * page
            of_group[members] = blocks[members]
            staging.host("group_blocks")[span] = np.cumsum(of_group)
            groups.append(
                ExpansionGroup(
                    blocks=staging.device("group_blocks")[span],
                    pages=staging.device("group_pages")[span],
                    key_rows=staging.device("key_rows")[span],
                    most_blocks=int(blocks[members].sum()),
                    most_pages=int(pages[members].sum()),
                )
            )
        return self._chunk_inputs(int(values["sliding_blocks"][-1]), count, tuple(groups))

    def _chunk_inputs(
        self, most_sliding_blocks: int, most_chunks: int, groups: tuple[ExpansionGroup, ...]
    ) -> ChunkInputs:
        view = self._any.device
        return ChunkInputs(
            rows=view("chunk_rows"),
            starts=view("starts"),
            lengths=view("lengths"),
            slots=view("slots"),
            sliding_blocks=view("sliding_blocks"),
            most_sliding_blocks=most_sliding_blocks,
            most_chunks=most_chunks,
            groups=groups,
        )


def _of_rows(batch: ScheduledBatch, values: NDArray[Number]) -> NDArray[Number]:
    """What each request has, for each of its rows; that of a lone request is left to broadcast."""
    return values if len(values) == 1 else np.repeat(values, batch.lengths)


def _last_tokens(batch: ScheduledBatch) -> ScheduledBatch:
    """Each request's last token of a step as a step of its own, whose rows have been stored."""
    ends = batch.starts + batch.lengths
    return dataclasses.replace(
        batch, starts=ends - 1, lengths=np.ones_like(ends), token_ids=batch.token_ids[np.cumsum(batch.lengths) - 1],
        admitted=(), page_moves=(), global_updates=_NO_UPDATES, sliding_updates=_NO_UPDATES, spare_slots=_NOTHING,
    )  # fmt: skip


def _groups(keys: Ints, capacity: int) -> list[slice]:
    """Runs of consecutive chunks whose keys together fit in `capacity`; a chunk alone always does."""
    found, first, total = [], 0, 0
    for index, count in enumerate(keys.tolist()):
        if index > first and total + count > capacity:
            found.append(slice(first, index))
            first, total = index, 0
        total += count
    return [*found, slice(first, len(keys))]
