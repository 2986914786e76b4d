"""Segments of several rows as the device reads them: drafts beside a chunk, and what goes on of both."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_step_packing import BLOCKS, LONGEST, REQUESTS, TOKENS, VOCAB, WINDOW, batch_of, ints

from modelserve.errors import InvalidInput
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.step.input_batch import StepPacker

# A decode with two drafts that is launched ahead, one with none whose start is known, a chunk that ends its prompt, and
# one that does not.
DRAFTED = batch_of(
    [(3, 50, 3), (0, 9, 1), (5, 100, 60), (1, 0, 7)],
    samples=[3, 1, 1, 0],
    tokens=[-1, -2, -3, 8, *range(2, 62), *range(2, 9)],
)


@pytest.fixture
def packer(small_architecture, geometry_of) -> StepPacker:
    geometry = geometry_of(small_architecture("31b", sliding_window=WINDOW))
    return StepPacker(
        geometry, max_num_batched_tokens=TOKENS, max_num_seqs=REQUESTS, max_model_len=LONGEST, vocab_size=VOCAB,
        blocks=BLOCKS, device=torch.device("cpu"), most_rows=5,
    )  # fmt: skip


def test_segments_of_few_rows_come_first_and_keep_their_rows(packer: StepPacker) -> None:
    step = packer.pack(DRAFTED)
    few, chunks, kept = step.decode, step.chunks, step.narrowed
    assert few is not None
    assert chunks is not None
    assert kept is not None
    assert kept.decode is not None
    columns = [getattr(few, name).tolist() for name in ("slots", "starts", "lengths", "rows")]
    assert columns == [[3, 0], [50, 9], [3, 1], [0, 3]]
    assert [chunks.slots[:2].tolist(), chunks.lengths[:2].tolist(), chunks.rows[:2].tolist()] == [
        [5, 1],
        [60, 7],
        [4, 64],
    ]
    assert step.sliding_slots.tolist() == [3, 3, 3, 0] + [-1] * 67, "drafts are stored before they are attended to"
    assert step.assumed is not None
    assert step.assumed.tolist() == [-1, -1, -1, 50, -1, -1], "what is in flight is where the device says"
    assert kept.kept is not None
    assert kept.kept.tolist() == [0, 1, 2, 3, 63, 70]
    assert kept.positions.tolist() == [50, 51, 52, 9, 159, 6]
    columns = [getattr(kept.decode, name).tolist() for name in ("slots", "starts", "lengths", "rows")]
    assert columns == [[3, 0, 5, 1], [50, 9, 159, 6], [3, 1, 1, 1], [0, 3, 4, 5]]
    assert step.sampled_rows is None, "the first rows that go on"
    assert step.sampled_positions is not None
    assert step.sampled_positions.tolist() == [51, 52, 53, 10, 160]
    assert step.output_counts is not None
    assert step.output_counts.tolist() == [33, 34, 35, 3, 53]
    assert step.draws is not None
    assert [column.tolist() for column in step.draws] == [[3, 0, 5], [0, 3, 4], [3, 1, 1], [0, 3, 63]]


def test_what_a_kept_row_reads_from_pages_outlives_the_step(packer: StepPacker) -> None:
    """A chunk of which three rows go on keeps the window of the first of them, and its first page whole."""
    chunk = batch_of([(5, 100, 60)], samples=[3])
    step = packer.pack(chunk)
    kept = np.flatnonzero(step.commit_slots.numpy() >= 0) + 100
    first = 160 - 3 - WINDOW + 1
    assert kept.tolist() == list(range(max(100, min(first, (160 - WINDOW) // 32 * 32)), 160))
    assert kept[0] <= first
    assert step.narrowed is not None
    assert step.narrowed.positions.tolist() == [157, 158, 159]


@pytest.mark.parametrize(
    "change",
    [{"sampled": ints([3, 1, 6, 0])}, {"token_ids": ints([-6, *DRAFTED.token_ids[1:]])}],
    ids=["draws", "drafts"],
)
def test_more_drafts_than_there_may_be_are_refused(packer: StepPacker, change: dict[str, np.ndarray]) -> None:
    wrong: ScheduledBatch = dataclasses.replace(DRAFTED, **change)
    with pytest.raises(InvalidInput, match="step 7"):
        packer.pack(wrong)
    assert packer.pack(DRAFTED).num_rows.tolist() == [71]
