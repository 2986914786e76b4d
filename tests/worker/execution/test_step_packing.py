"""Packed steps against a reference that goes token by token; what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelserve.errors import InvalidInput
from modelserve.sizing.kernel_buffers import chunk_slots
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import IN_FLIGHT, ScheduledBatch, TableUpdates
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.staging import StagingBuffer
from modelserve_worker.step.step_size import QueryBlocks, StepSize

CPU = torch.device("cpu")
TOKENS, REQUESTS, LONGEST, VOCAB, WINDOW = 400, 6, 800, 512, 40
NOBODY = chunk_slots(REQUESTS)  # what a program finds that has no chunk
BLOCKS = QueryBlocks(global_tokens=8, sliding_tokens=16, expansion_keys=256)


def ints(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def batch_of(
    spans: list[tuple[int, int, int]],
    *,
    samples: list[int] | None = None,
    tokens: list[int] | None = None,
    spare: list[int] | None = None,
) -> ScheduledBatch:
    """A step of (slot, start, length) requests, decodes first."""
    nothing = TableUpdates(ints([]), ints([]), ints([]))
    count = sum(length for *_, length in spans)
    return ScheduledBatch(
        step=7,
        slots=ints(slot for slot, _, _ in spans),
        starts=ints(start for _, start, _ in spans),
        lengths=ints(length for *_, length in spans),
        sampled=ints(samples if samples is not None else [1] * len(spans)),
        output_counts=ints(10 * slot + 3 for slot, _, _ in spans),
        token_ids=ints(tokens if tokens is not None else range(1, count + 1)),
        admitted=(),
        page_moves=(),
        global_updates=nothing,
        sliding_updates=nothing,
        spare_slots=ints(spare or []),
    )


def test_a_step_sends_the_passes_that_it_has(geometry: CacheGeometry) -> None:
    """And no room of others: 3 words a request and chunk, of which there are 201 MB at 4,096 requests."""
    sent: list[dict[str, Any]] = []

    class Told(StagingBuffer):
        def send(self, **which: Any) -> None:
            sent.append(which)
            super().send(**which)

    packer = packer_of(geometry, staging=Told)
    sent.clear()
    one = packer.pack(batch_of([(0, 5, 1), (1, 0, 30)]))
    several = packer.pack(batch_of([(0, 5, 1), (1, 200, 30), (2, 200, 30)]))
    assert (len(one.passes), len(several.passes)) == (1, 2)
    assert sent == [{"last": "passes", "words": 3 * NOBODY}, {"last": "passes", "words": 6 * NOBODY}]
    assert packer._any.names[-1] == "passes"


@pytest.fixture
def geometry(small_architecture, geometry_of) -> CacheGeometry:
    return geometry_of(small_architecture("31b", sliding_window=WINDOW))


def packer_of(geometry: CacheGeometry, *, tokens: int = TOKENS, **more: Any) -> StepPacker:
    return StepPacker(
        geometry, max_num_batched_tokens=tokens, max_num_seqs=REQUESTS, max_model_len=LONGEST, vocab_size=VOCAB,
        blocks=BLOCKS, device=CPU, **more,
    )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> ScheduledBatch:
    decodes = draw(st.integers(0, REQUESTS))
    chunks = draw(st.integers(0 if decodes else 1, REQUESTS - decodes))
    slots = draw(st.permutations(range(REQUESTS)))[: decodes + chunks]
    lengths = [1] * decodes + draw(st.lists(st.integers(2, 60), min_size=chunks, max_size=chunks))
    spans = [(slot, draw(st.integers(0, 700)), length) for slot, length in zip(slots, lengths, strict=True)]
    tokens = [draw(st.integers(IN_FLIGHT, VOCAB - 1)) for _ in range(decodes)]
    tokens += [draw(st.integers(0, VOCAB - 1)) for _ in range(sum(lengths) - decodes)]
    samples = draw(st.lists(st.integers(0, 1), min_size=len(spans), max_size=len(spans)))
    free = draw(st.permutations([slot for slot in range(REQUESTS) if slot not in slots]))
    wanting = draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks))
    spare = [-1] * decodes + [free.pop() if wants and free else -1 for wants in wanting]
    return batch_of(spans, samples=samples, tokens=tokens, spare=spare if max(spare) >= 0 else None)


def check_rows(packed: Step, batch: ScheduledBatch, *, rows: int) -> None:
    """Every row of the step, one token after another."""
    step = packed
    assert packed.num_rows.tolist() == [batch.num_tokens]
    assert step.positions.numel() == step.global_slots.numel() == step.sliding_slots.numel() == rows
    row = 0
    spare_slots = batch.spare_slots.tolist() or [-1] * batch.num_requests
    for slot, start, length, spare in zip(
        *(a.tolist() for a in (batch.slots, batch.starts, batch.lengths)), spare_slots, strict=True
    ):
        window = max(0, start + length - WINDOW) // 32 * 32  # of the last row, in whole pages of 32
        behind = max(0, start + length - WINDOW - 63) // 32 * 32  # that of 64 positions earlier
        for position in range(start, start + length):
            assert packed.token_ids[row] == batch.token_ids[row]
            assert step.positions[row] == position
            assert step.global_slots[row] == slot
            assert step.sliding_slots[row] == (slot if length == 1 else -1)
            stored = slot if position >= window else spare if position >= behind else -1
            assert step.commit_slots[row] == (stored if length > 1 else -1)
            row += 1
    for padding in range(row, rows):
        assert packed.token_ids[padding] == 0
        for name in ("positions", "global_slots", "sliding_slots", "commit_slots"):
            assert getattr(step, name)[padding] == -1


def check_samples(packed: Step, batch: ScheduledBatch) -> None:
    which = [i for i in range(batch.num_requests) if batch.sampled[i]]
    if not which:
        assert packed.sampled_slots is None
        return
    assert packed.sampled_slots is not None
    last = which if packed.narrowed is not None else [int(batch.lengths[: i + 1].sum()) - 1 for i in which]
    rows = packed.sampled_rows
    assert (list(range(len(which))) if rows is None else rows.tolist()) == last
    assert packed.sampled_slots.tolist() == [int(batch.slots[i]) for i in which]
    assert packed.sampled_positions.tolist() == [int(batch.starts[i] + batch.lengths[i]) for i in which]
    assert packed.output_counts.tolist() == [int(batch.output_counts[i]) for i in which]


def check_chunks(packed: Step, batch: ScheduledBatch) -> None:
    """What a kernel's program finds for each of its blocks and pages, block by block and page by page."""
    first = int((batch.lengths == 1).sum())
    decode, chunks = packed.decode, packed.chunks
    if not first:
        assert decode is None
    if first == batch.num_requests:
        assert chunks is None
        return
    assert chunks is not None
    if decode is not None:
        assert decode.slots.tolist() == batch.slots[:first].tolist()
        assert decode.positions.tolist() == batch.starts[:first].tolist()
    spans = list(zip(*(a[first:].tolist() for a in (batch.slots, batch.starts, batch.lengths)), strict=True))
    for i, (slot, start, length) in enumerate(spans):
        assert (int(chunks.slots[i]), int(chunks.starts[i]), int(chunks.lengths[i])) == (slot, start, length)
        assert chunks.rows[i] == first + sum(n for *_, n in spans[:i])
    assert owners(chunks.sliding_blocks, chunks.most_sliding_blocks) == [
        i for i, (*_, length) in enumerate(spans) for _ in range(-(-length // BLOCKS.sliding_tokens))
    ]
    assert (chunks.sliding_blocks[len(spans) :] == chunks.most_sliding_blocks).all()
    grouped: list[int] = []
    for group in packed.passes:
        members = sorted(set(owners(group.blocks, group.most_blocks)))
        assert members == sorted(set(owners(group.pages, group.most_pages)))
        used = 0
        for i in members:
            _, start, length = spans[i]
            assert owners(group.blocks, group.most_blocks).count(i) == -(-length // BLOCKS.global_tokens)
            pages = -(-(start + length) // 64)
            assert owners(group.pages, group.most_pages).count(i) == pages
            assert group.key_rows[i] == used, "rows of the expansion are back to back"
            used += 64 * pages
        assert used <= BLOCKS.expansion_keys or len(members) == 1
        grouped += members
    assert grouped == list(range(len(spans))), "every chunk is in one group, in order"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=batches(), batch=batches(), padding=st.none() | st.integers(0, REQUESTS), scored=st.booleans())
def test_a_step_with_chunks_names_the_last_row_of_each_request(
    geometry: CacheGeometry, before: ScheduledBatch, batch: ScheduledBatch, padding: int | None, scored: bool
) -> None:
    """Of a captured step, as many as it has; those beyond the requests are padding, whatever the step before had."""
    last_rows = batch.num_requests if padding is None else min(batch.num_requests + padding, REQUESTS)
    packer = packer_of(geometry)
    packer.pack(before)
    if scored and padding is None:  # all rows of the longest but its last
        given = np.where(np.arange(batch.num_requests) == batch.lengths.argmax(), batch.lengths - 1, 0)
        given = given.astype(np.int32)
        batch = dataclasses.replace(
            batch, sampled=np.where(given > 0, given + 1, batch.sampled), given=given, targets=ints([1] * given.sum())
        )
        assert packer.pack(batch).narrowed is None
        return
    size = None if padding is None else StepSize(TOKENS, last_rows)
    packed = packer.pack(batch, padded_to=size)
    assert (packed.narrowed is None) == (packed.chunks is None)
    check_samples(packed, batch)
    if packed.narrowed is None:
        return
    last, count = packed.narrowed, batch.num_requests
    assert last.kept is not None
    assert len(last.kept) == last_rows
    assert last.num_rows.tolist() == [count]
    assert last.kept.tolist()[:count] == (np.cumsum(batch.lengths) - 1).tolist()
    assert last.chunks is None
    decode = last.decode
    assert decode is not None
    assert not decode.settled, "this step stored keys of chunks, which a kernel must not read early"
    assert packed.decode is None or packed.decode.settled
    for name, values in (("slots", batch.slots), ("starts", batch.starts + batch.lengths - 1)):
        assert getattr(decode, name).tolist()[:count] == values.tolist()
        assert getattr(decode, name).tolist()[count:] == [-1] * (last_rows - count)
    for name, values in (("positions", batch.starts + batch.lengths - 1), ("global_slots", batch.slots)):
        assert getattr(last, name).tolist() == values.tolist() + [-1] * (last_rows - count)
    assert decode.rows.tolist()[:count] == list(range(count))
    assert decode.lengths.tolist() == [1] * count + [0] * (last_rows - count)
    assert set(last.kept.tolist()[count:]) <= {0}


def owners(running: torch.Tensor, programs: int) -> list[int]:
    """The chunk of each program, as kernels find it: the first whose running sum is above the program's number."""
    return torch.searchsorted(running, torch.arange(programs, dtype=running.dtype), right=True).tolist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(batches(), min_size=1, max_size=3))
def test_steps_are_what_a_token_by_token_reference_says(geometry, steps: list[ScheduledBatch]) -> None:
    """Several steps through one packer: nothing of the step before is left where the next one is read."""
    packer = packer_of(geometry)
    for batch in steps:
        packed = packer.pack(batch)
        check_rows(packed, batch, rows=batch.num_tokens)
        check_samples(packed, batch)
        check_chunks(packed, batch)


@pytest.mark.parametrize("padded_to", [3, 4, REQUESTS])
def test_decodes_are_padded_for_a_graph_that_reads_fixed_addresses(geometry, padded_to: int) -> None:
    packer = packer_of(geometry)
    views = packer.decode_views(padded_to)
    assert views.sampled_slots is None
    assert views.num_rows.tolist() == [0]
    assert_nothing_is_stored(views, rows=padded_to)
    full = packer.pack(batch_of([(slot, 9, 1) for slot in range(REQUESTS)]))
    batch = batch_of([(5, 31, 1), (0, 32, 1), (2, 700, 1)], samples=[1, 0, 1], tokens=[IN_FLIGHT, 8, 9])
    packed = packer.pack(batch, padded_to=StepSize(padded_to, padded_to))
    check_rows(packed, batch, rows=padded_to)
    check_samples(packed, batch)
    decode = packed.decode
    assert decode is not None
    assert decode.positions.tolist() == [31, 32, 700] + [-1] * (padded_to - 3)
    for captured, filled, first in (
        (views.token_ids, packed.token_ids, full.token_ids),
        (views.num_rows, packed.num_rows, full.num_rows),
        (views.positions, packed.positions, full.positions),
        (views.global_slots, packed.global_slots, full.global_slots),
        (views.sliding_slots, packed.sliding_slots, full.sliding_slots),
        (views.commit_slots, packed.commit_slots, full.commit_slots),
    ):
        assert captured.data_ptr() == filled.data_ptr() == first.data_ptr()
        assert captured.tolist() == filled.tolist()


def assert_nothing_is_stored(views: Step, *, rows: int) -> None:
    for name in ("positions", "global_slots", "sliding_slots", "commit_slots"):
        assert getattr(views, name).tolist() == [-1] * rows, "a capture stores no row"


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=batches(), batch=batches().filter(lambda batch: (batch.lengths > 1).any()), padding=st.integers(0, 60),
    last_padding=st.integers(0, REQUESTS),
)  # fmt: skip
def test_a_captured_step_finds_any_step_with_chunks_that_fits(
    geometry, before: ScheduledBatch, batch: ScheduledBatch, padding: int, last_padding: int
) -> None:
    """The arrays that a capture saw hold the packed step, and its launches cover all of the step's programs."""
    packer, rows = packer_of(geometry), min(batch.num_tokens + padding, TOKENS)
    last_rows = min(batch.num_requests + last_padding, REQUESTS)
    views = packer.mixed_views(rows, last_rows)
    assert views.num_rows.tolist() == [0]
    assert_nothing_is_stored(views, rows=rows)
    captured = views.chunks
    assert captured is not None
    assert views.decode is not None
    assert owners(captured.sliding_blocks, captured.most_sliding_blocks) == [NOBODY] * captured.most_sliding_blocks
    assert views.narrowed is not None
    assert views.narrowed.global_slots.tolist() == [-1] * last_rows, "a capture attends to nothing"
    packer.pack(before)
    packed = packer.pack(batch, padded_to=StepSize(rows, last_rows))
    assert packed.narrowed is not None
    for name in ("kept", "num_rows", "positions", "global_slots"):
        seen_rows, packed_rows = (getattr(step.narrowed, name) for step in (views, packed))
        assert (seen_rows.data_ptr(), seen_rows.shape) == (packed_rows.data_ptr(), packed_rows.shape)
    check_rows(packed, batch, rows=rows)
    check_samples(packed, batch)
    check_chunks(packed, batch)
    pages = [-(-end // 64) for end, n in zip(batch.starts + batch.lengths, batch.lengths, strict=True) if n > 1]
    assert packer.fits_one_expansion(batch) == (64 * sum(pages) <= BLOCKS.expansion_keys)
    if not packer.fits_one_expansion(batch):
        return
    chunks = packed.chunks
    assert chunks is not None
    for name in ("positions", "global_slots", "sliding_slots", "commit_slots"):
        assert getattr(views, name).data_ptr() == getattr(packed, name).data_ptr()
    for name in ("rows", "starts", "lengths", "slots", "sliding_blocks"):
        assert getattr(captured, name).data_ptr() == getattr(chunks, name).data_ptr()
    (seen,), (filled,) = views.passes, packed.passes
    for name in ("blocks", "pages", "key_rows"):
        assert getattr(seen, name).data_ptr() == getattr(filled, name).data_ptr()
    for running, launched, used in (
        (captured.sliding_blocks, captured.most_sliding_blocks, chunks.most_sliding_blocks),
        (seen.blocks, seen.most_blocks, filled.most_blocks),
        (seen.pages, seen.most_pages, filled.most_pages),
    ):
        found = owners(running, launched)
        assert launched >= used
        assert max(found[:used]) < REQUESTS
        assert found[used:] == [NOBODY] * (launched - used), "programs too many find no chunk"
    decodes = int((batch.lengths == 1).sum())
    assert views.decode.slots[:decodes].tolist() == batch.slots[:decodes].tolist()
    padded = batch.starts[:decodes].tolist() + [-1] * (REQUESTS - decodes)
    assert views.decode.positions.tolist() == padded


def test_chunks_are_expanded_together_while_their_keys_fit(geometry) -> None:
    """256 keys: 3 + 1 pages; then one of 7 pages, which is too long for any company; then 2."""
    spans = [(0, 5, 1), (1, 130, 8), (2, 0, 64), (3, 400, 9), (4, 100, 8)]
    passes = packer_of(geometry).pack(batch_of(spans)).passes
    assert [one.most_pages for one in passes] == [4, 7, 2]
    assert [one.most_blocks for one in passes] == [1 + 8, 2, 1]
    assert [one.key_rows.tolist()[:4][i] for one, i in zip(passes, (1, 2, 3), strict=True)] == [192, 0, 0]


GOOD = batch_of([(0, 40, 1), (1, 0, 3)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampled": ints([1, 2])}, "step 7 draws tokens of rows that it does not have, or of more than 1"),
        ({"sampled": ints([2, 1])}, "step 7 draws tokens of rows that it does not have"),
        ({"given": ints([0, 2])}, "step 7 draws tokens of rows that it does not have"),
        ({"token_ids": ints([])}, "step 7 has no tokens, or not as many as"),
        ({"lengths": ints([1, 2])}, "step 7 has no tokens, or not as many as its requests' lengths add up to"),
        ({"lengths": ints([0, 4])}, "step 7 has no tokens, or not as many as"),
        ({"token_ids": ints([5, 6, VOCAB, 8])}, r"step 7: a token id outside 0\.\.511"),
        ({"token_ids": ints([5, 6, -2, 8])}, r"step 7: a token id outside 0\.\.511"),
        ({"token_ids": ints([5, 6, IN_FLIGHT, 8])}, r"step 7: a token id outside 0\.\.511"),
        ({"token_ids": ints([-2, 6, 7, 8])}, r"step 7: a token id outside 0\.\.511"),
        ({"slots": ints([0, REQUESTS])}, r"step 7: a slot outside 0\.\.5 or a position below 0"),
        ({"slots": ints([-1, 1])}, r"step 7: a slot outside 0\.\.5 or a position below 0"),
        ({"starts": ints([-1, 0])}, r"step 7: a slot outside 0\.\.5 or a position below 0"),
        ({"starts": ints([LONGEST, 0])}, "step 7 computes 801 positions; block tables are for 800"),
        ({"starts": ints([0, LONGEST - 2])}, "step 7 computes 801 positions; block tables are for 800"),
    ],
)
def test_a_step_that_breaks_the_contract_is_refused(geometry, change, message) -> None:
    packer = packer_of(geometry)
    before = packer.pack(GOOD)
    with pytest.raises(InvalidInput, match=message):
        packer.pack(dataclasses.replace(GOOD, **change))
    check_rows(before, GOOD, rows=4)  # what was sent is unhurt
    check_rows(packer.pack(GOOD), GOOD, rows=4)


@pytest.mark.parametrize(
    "spans", [[(slot, 0, 1) for slot in range(REQUESTS + 1)], [(0, 0, TOKENS + 1)]], ids=["requests", "tokens"]
)
def test_a_step_larger_than_the_runner_is_refused(geometry, spans) -> None:
    with pytest.raises(InvalidInput, match="the runner was made for 6 and 400"):
        packer_of(geometry).pack(batch_of(spans, tokens=[1] * sum(n for *_, n in spans)))
    largest = batch_of([(0, 0, TOKENS)])
    check_rows(packer_of(geometry).pack(largest), largest, rows=TOKENS)


def test_a_full_batch_of_decodes_fits_a_smaller_token_budget(geometry) -> None:
    batch = batch_of([(slot, 3, 1) for slot in range(REQUESTS)])
    check_rows(packer_of(geometry, tokens=2).pack(batch), batch, rows=REQUESTS)
