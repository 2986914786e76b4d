"""Packed steps against a reference that goes token by token; what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelserve.errors import InvalidInput
from modelserve.sizing.kernel_buffers import chunk_slots
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import IN_FLIGHT, ScheduledBatch, TableUpdates
from modelserve_worker.execution.input_batch import PackedStep, QueryBlocks, StepPacker, StepSize

CPU = torch.device("cpu")
TOKENS, REQUESTS, LONGEST, VOCAB, WINDOW = 400, 6, 800, 512, 40
NOBODY = chunk_slots(REQUESTS)  # what a program finds that has no chunk
BLOCKS = QueryBlocks(global_tokens=8, sliding_tokens=16, expansion_keys=256)


def ints(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def batch_of(
    spans: list[tuple[int, int, int]],
    *,
    samples: list[bool] | None = None,
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
        samples=np.array(samples if samples is not None else [True] * len(spans), dtype=np.bool_),
        output_counts=ints(10 * slot + 3 for slot, _, _ in spans),
        token_ids=ints(tokens if tokens is not None else range(1, count + 1)),
        admitted=(),
        page_moves=(),
        global_updates=nothing,
        sliding_updates=nothing,
        spare_slots=ints(spare or []),
    )


@pytest.fixture
def geometry(small_architecture, geometry_of) -> CacheGeometry:
    return geometry_of(small_architecture("31b", sliding_window=WINDOW))


def packer_of(geometry: CacheGeometry, *, tokens: int = TOKENS) -> StepPacker:
    return StepPacker(
        geometry, max_num_batched_tokens=tokens, max_num_seqs=REQUESTS, max_model_len=LONGEST, vocab_size=VOCAB,
        blocks=BLOCKS, device=CPU,
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
    samples = draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    free = draw(st.permutations([slot for slot in range(REQUESTS) if slot not in slots]))
    wanting = draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks))
    spare = [-1] * decodes + [free.pop() if wants and free else -1 for wants in wanting]
    return batch_of(spans, samples=samples, tokens=tokens, spare=spare if max(spare) >= 0 else None)


def check_rows(packed: PackedStep, batch: ScheduledBatch, *, rows: int) -> None:
    """Every row of the step, one token after another."""
    step = packed.inputs
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


def check_samples(packed: PackedStep, batch: ScheduledBatch) -> None:
    which = [i for i in range(batch.num_requests) if batch.samples[i]]
    sampled = packed.sampled
    if not which:
        assert sampled is None
        return
    assert sampled is not None
    last = which if packed.last is not None else [int(batch.lengths[: i + 1].sum()) - 1 for i in which]
    assert (list(range(len(which))) if sampled.rows is None else sampled.rows.tolist()) == last
    assert sampled.slots.tolist() == sampled.host_slots.tolist() == [int(batch.slots[i]) for i in which]
    assert sampled.positions.tolist() == [int(batch.starts[i] + batch.lengths[i]) for i in which]
    counts = [int(batch.output_counts[i]) for i in which]
    assert sampled.output_counts.tolist() == sampled.host_output_counts.tolist() == counts


def check_chunks(packed: PackedStep, batch: ScheduledBatch) -> None:
    """What a kernel's program finds for each of its blocks and pages, block by block and page by page."""
    first = int((batch.lengths == 1).sum())
    decode, chunks = packed.inputs.decode, packed.inputs.chunks
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
    for group in chunks.groups:
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
@given(before=batches(), batch=batches(), padding=st.none() | st.integers(0, REQUESTS), all_rows=st.booleans())
def test_a_step_with_chunks_names_the_last_row_of_each_request(
    geometry: CacheGeometry, before: ScheduledBatch, batch: ScheduledBatch, padding: int | None, all_rows: bool
) -> None:
    """Of a captured step, as many as it has; those beyond the requests are padding, whatever the step before had."""
    last_rows = batch.num_requests if padding is None else min(batch.num_requests + padding, REQUESTS)
    packer = packer_of(geometry)
    packer.pack(before)
    size = None if padding is None else StepSize(TOKENS, last_rows)
    packed = packer.pack(batch, padded_to=size, all_rows=all_rows)
    assert (packed.last is None) == (all_rows or packed.inputs.chunks is None)
    check_samples(packed, batch)
    if packed.last is None:
        return
    last, count = packed.last, batch.num_requests
    assert len(last.rows) == last_rows
    assert last.count.tolist() == [count]
    assert last.rows.tolist()[:count] == (np.cumsum(batch.lengths) - 1).tolist()
    assert last.inputs.chunks is None
    decode = last.inputs.decode
    assert decode is not None
    assert not decode.settled, "this step stored keys of chunks, which a kernel must not read early"
    assert packed.inputs.decode is None or packed.inputs.decode.settled
    for name, values in (("slots", batch.slots), ("positions", batch.starts + batch.lengths - 1)):
        assert getattr(decode, name).tolist()[:count] == values.tolist()
        assert getattr(decode, name).tolist()[count:] == [-1] * (last_rows - count)
    assert set(last.rows.tolist()[count:]) <= {0}
    assert packed.inputs.batch is batch, "the step itself is as it was"


def owners(running: torch.Tensor, programs: int) -> list[int]:
    """The chunk of each program, as kernels find it: the first whose running sum is above the program's number."""
    return torch.searchsorted(running, torch.arange(programs, dtype=running.dtype), right=True).tolist()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(batches(), min_size=1, max_size=3))
def test_steps_are_what_a_token_by_token_reference_says(geometry, steps: list[ScheduledBatch]) -> None:
    """Several steps through one packer: nothing of the step before is left where the next one is read."""
    packer = packer_of(geometry)
    for batch in steps:
        packed = packer.pack(batch)
        assert packed.inputs.batch is batch
        check_rows(packed, batch, rows=batch.num_tokens)
        check_samples(packed, batch)
        check_chunks(packed, batch)


@pytest.mark.parametrize("padded_to", [3, 4, REQUESTS])
def test_decodes_are_padded_for_a_graph_that_reads_fixed_addresses(geometry, padded_to: int) -> None:
    packer = packer_of(geometry)
    views = packer.decode_views(padded_to)
    assert views.sampled is None
    assert views.inputs.batch is None
    assert views.num_rows.tolist() == [0]
    assert_nothing_is_stored(views, rows=padded_to)
    full = packer.pack(batch_of([(slot, 9, 1) for slot in range(REQUESTS)]))
    batch = batch_of([(5, 31, 1), (0, 32, 1), (2, 700, 1)], samples=[True, False, True], tokens=[IN_FLIGHT, 8, 9])
    packed = packer.pack(batch, padded_to=StepSize(padded_to, padded_to))
    check_rows(packed, batch, rows=padded_to)
    check_samples(packed, batch)
    decode = packed.inputs.decode
    assert decode is not None
    assert decode.positions.tolist() == [31, 32, 700] + [-1] * (padded_to - 3)
    for captured, filled, first in (
        (views.token_ids, packed.token_ids, full.token_ids),
        (views.num_rows, packed.num_rows, full.num_rows),
        (views.inputs.positions, packed.inputs.positions, full.inputs.positions),
        (views.inputs.global_slots, packed.inputs.global_slots, full.inputs.global_slots),
        (views.inputs.sliding_slots, packed.inputs.sliding_slots, full.inputs.sliding_slots),
        (views.inputs.commit_slots, packed.inputs.commit_slots, full.inputs.commit_slots),
    ):
        assert captured.data_ptr() == filled.data_ptr() == first.data_ptr()
        assert captured.tolist() == filled.tolist()


def assert_nothing_is_stored(views: PackedStep, *, rows: int) -> None:
    for name in ("positions", "global_slots", "sliding_slots", "commit_slots"):
        assert getattr(views.inputs, name).tolist() == [-1] * rows, "a capture stores no row"


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
    captured = views.inputs.chunks
    assert captured is not None
    assert views.inputs.decode is not None
    assert owners(captured.sliding_blocks, captured.most_sliding_blocks) == [NOBODY] * captured.most_sliding_blocks
    assert views.last is not None
    assert views.last.inputs.global_slots.tolist() == [-1] * last_rows, "a capture attends to nothing"
    packer.pack(before)
    packed = packer.pack(batch, padded_to=StepSize(rows, last_rows))
    assert packed.last is not None
    for seen_rows, packed_rows in (
        (views.last.rows, packed.last.rows),
        (views.last.count, packed.last.count),
        (views.last.inputs.positions, packed.last.inputs.positions),
        (views.last.inputs.global_slots, packed.last.inputs.global_slots),
    ):
        assert (seen_rows.data_ptr(), seen_rows.shape) == (packed_rows.data_ptr(), packed_rows.shape)
    check_rows(packed, batch, rows=rows)
    check_samples(packed, batch)
    check_chunks(packed, batch)
    pages = [-(-end // 64) for end, n in zip(batch.starts + batch.lengths, batch.lengths, strict=True) if n > 1]
    assert packer.fits_one_expansion(batch) == (64 * sum(pages) <= BLOCKS.expansion_keys)
    if not packer.fits_one_expansion(batch):
        return
    chunks = packed.inputs.chunks
    assert chunks is not None
    for name in ("positions", "global_slots", "sliding_slots", "commit_slots"):
        assert getattr(views.inputs, name).data_ptr() == getattr(packed.inputs, name).data_ptr()
    for name in ("rows", "starts", "lengths", "slots", "sliding_blocks"):
        assert getattr(captured, name).data_ptr() == getattr(chunks, name).data_ptr()
    (seen,), (filled,) = captured.groups, chunks.groups
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
    assert views.inputs.decode.slots[:decodes].tolist() == batch.slots[:decodes].tolist()
    padded = batch.starts[:decodes].tolist() + [-1] * (REQUESTS - decodes)
    assert views.inputs.decode.positions.tolist() == padded


def test_chunks_are_expanded_together_while_their_keys_fit(geometry) -> None:
    """256 keys: 3 + 1 pages; then one of 7 pages, which is too long for any company; then 2."""
    spans = [(0, 5, 1), (1, 130, 8), (2, 0, 64), (3, 400, 9), (4, 100, 8)]
    chunks = packer_of(geometry).pack(batch_of(spans)).inputs.chunks
    assert chunks is not None
    assert [group.most_pages for group in chunks.groups] == [4, 7, 2]
    assert [group.most_blocks for group in chunks.groups] == [1 + 8, 2, 1]
    assert [group.key_rows.tolist()[:4][i] for group, i in zip(chunks.groups, (1, 2, 3), strict=True)] == [192, 0, 0]


GOOD = batch_of([(0, 40, 1), (1, 0, 3)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
