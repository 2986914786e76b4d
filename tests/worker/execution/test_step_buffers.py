"""Block tables, staged metadata, graph buckets and steps on their way: the parts of a step that need no model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.cuda_graphs import decode_graph_sizes, mixed_graph_sizes
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import NO_UPDATES, NOT_A_NUMBER, FailedStep, ScheduledBatch, TableUpdates
from modelserve_worker.kernels.step import Step
from modelserve_worker.request import TokenLogprobs
from modelserve_worker.runner.launched_step import LaunchedStep
from modelserve_worker.runner.step_graphs import StepGraphs
from modelserve_worker.step import staging as staging_module
from modelserve_worker.step.block_tables import BlockTables, table_entries
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.sampler import SampledLogprobs, SamplerOutput
from modelserve_worker.step.staging import StagingBuffer
from modelserve_worker.step.step_size import QueryBlocks, StepSize

CPU = torch.device("cpu")


def updates(*entries: tuple[int, int, int]) -> TableUpdates:
    slots, indices, pages = (np.array(column, dtype=np.int32) for column in zip(*entries, strict=True))
    return TableUpdates(slots, indices, pages)


@pytest.fixture
def tables(small_architecture, geometry_of) -> BlockTables:
    geometry = geometry_of(small_architecture("31b", sliding_window=40))
    return BlockTables(geometry, max_num_seqs=3, max_model_len=2000, device=CPU)


def test_updates_write_their_entries_and_no_other(tables: BlockTables) -> None:
    tables.apply({LayerKind.GLOBAL: updates((0, 0, 7), (2, 31, 9), (1, 3, 5))})
    tables.apply({LayerKind.GLOBAL: updates((2, 31, 4), (0, 1, 8))})
    expected = np.zeros_like(tables.host[LayerKind.GLOBAL])
    expected[0, 0], expected[0, 1], expected[1, 3], expected[2, 31] = 7, 8, 5, 4
    assert (tables.host[LayerKind.GLOBAL] == expected).all()
    assert (tables.device[LayerKind.GLOBAL].numpy() == expected).all()
    assert tables.device[LayerKind.GLOBAL].dtype == torch.int32
    assert not tables.host[LayerKind.SLIDING].any()
    nothing = np.zeros(0, dtype=np.int32)
    tables.apply({LayerKind.GLOBAL: TableUpdates(nothing, nothing, nothing)})
    assert (tables.host[LayerKind.GLOBAL] == expected).all()


def test_updates_of_any_size_cross_in_buffers_made_once(small_architecture, geometry_of) -> None:
    """As on a GPU: the host's table and the device's are two, and updates larger than a buffer cross in several."""
    geometry = geometry_of(small_architecture("31b", sliding_window=40))
    tables = BlockTables(geometry, max_num_seqs=64, max_model_len=20_000, device=CPU)
    tables._all = tables._all.clone()
    tables._staging = StagingBuffer({"places": 4096, "pages": 2048}, CPU)
    random = np.random.default_rng(0)

    def some(count: int, entries: int) -> TableUpdates:
        slots, indices = np.divmod(random.permutation(64 * entries)[:count].astype(np.int32), np.int32(entries))
        return TableUpdates(slots, indices, random.integers(1, 99, count, dtype=np.int32))

    for count in (1, 2048, 2049, 9000, 3):
        tables.apply({LayerKind.GLOBAL: some(count, 313), LayerKind.SLIDING: some(min(count, 64), 2)})
        assert (tables._all.numpy() == tables._all_host).all()
    assert np.count_nonzero(tables.host[LayerKind.GLOBAL]) > 9000


def test_rows_are_padded_to_whole_strides_and_hold_the_longest_request(small_architecture, geometry_of) -> None:
    geometry = geometry_of(small_architecture("31b", sliding_window=1024))
    for length, pages in ((1, 16), (64 * 16, 16), (64 * 16 + 1, 32), (100_000, 1568)):
        assert table_entries(geometry, LayerKind.GLOBAL, max_model_len=length) == pages >= geometry.global_pages(length)
    assert geometry.sliding_table_entries == 33
    assert table_entries(geometry, LayerKind.SLIDING, max_model_len=5) == 48
    made = BlockTables(geometry, max_num_seqs=3, max_model_len=1025, device=CPU)
    assert made.device[LayerKind.GLOBAL].stride() == (32, 1)
    assert made.device[LayerKind.SLIDING].stride() == (48, 1)


@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((3, 0, 0), r"slot 0\.\.3 is outside 0\.\.2"),
        ((-1, 0, 0), r"slot -1\.\.1 is outside 0\.\.2"),
        ((0, 1000, 0), r"table entry 0\.\.1000 is outside 0\.\."),
        ((0, -1, 0), r"table entry -1\.\.0 is outside 0\.\."),
        ((0, 0, 50), r"page 0\.\.50 is outside 0\.\.49"),
        ((0, 0, -1), r"page -1\.\.0 is outside 0\.\.49"),
    ],
)
def test_an_update_outside_tables_or_arena_is_refused(tables: BlockTables, kind, entry, message) -> None:
    tables.check(kind, updates((0, 0, 0), (1, 0, 0), (2, 0, 49)), num_pages=50)
    with pytest.raises(InvalidInput, match=f"{kind.value} {message}"):
        tables.check(kind, updates((0, 0, 0), (1, 0, 0), entry), num_pages=50)
    assert not tables.host[kind].any(), "a check writes nothing"


def test_sections_are_apart_aligned_and_at_one_address() -> None:
    staging = StagingBuffer({"a": 1, "b": 5, "c": 4}, CPU)
    addresses = {name: staging.device(name).data_ptr() for name in "abc"}
    assert {name: staging.device(name).numel() for name in "abc"} == {"a": 1, "b": 5, "c": 4}
    assert all((address - addresses["a"]) % 16 == 0 for address in addresses.values())
    for turn in range(5):
        staging.begin()
        for number, name in enumerate("abc"):
            staging.host(name)[:] = 10 * turn + number
        staging.send()
        for number, name in enumerate("abc"):
            assert staging.device(name).data_ptr() == addresses[name]
            assert set(staging.device(name).tolist()) == {10 * turn + number}


class FakeEvent:
    """An event of a device that passes it only when it is waited for."""

    log: list[str]

    def __init__(self, log: list[str]) -> None:
        self.log, self.recorded = log, False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.log.append("waited")


def test_a_host_buffer_is_filled_again_only_after_its_copy_has_passed(monkeypatch) -> None:
    """The ring as on a GPU, over memory of the CPU: two steps may be on their way, the third waits for the first."""
    log: list[str] = []
    monkeypatch.setattr(staging_module.torch.cuda, "Event", lambda: FakeEvent(log))
    zeros = torch.zeros
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda count, *, dtype, device=None, pin_memory=False: zeros(count, dtype=dtype))
        staging = StagingBuffer({"a": 4}, torch.device("cuda"))
    filled = []
    for turn in range(4):
        staging.begin()
        assert len(log) == max(0, turn - 1), "it waits for the step two before, and for no later one"
        section = staging.host("a")
        section[:] = turn
        filled.append(section)
        if turn:
            assert filled[turn - 1].tolist() == [turn - 1] * 4, "the step before is still on its way"
            assert staging.device("a").tolist() == [turn - 1] * 4, "the device has the step before until `send`"
        staging.send()
        assert staging.device("a").tolist() == [turn] * 4
    assert not np.shares_memory(filled[0], filled[1])
    assert np.shares_memory(filled[0], filled[2])


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9, 16, 20, 64, 100, 256, 300, 1024])
def test_buckets_waste_little_and_reach_the_largest_batch(most: int) -> None:
    sizes = decode_graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert sizes[0] == 1
    for batch in range(1, most + 1):
        bucket = next(size for size in sizes if size >= batch)
        apart = 8 if batch <= 64 else 16 if batch <= 128 else 32 if batch <= 256 else 64
        assert bucket < 2 * batch if batch < 4 else bucket < batch + apart
        assert batch <= 32 or bucket - batch < bucket / 5


@pytest.mark.parametrize("most", [1, 64, 65, 300, 2048, 2049, 8192, 10_000])
def test_buckets_of_rows_end_at_the_largest_step(most: int) -> None:
    sizes = mixed_graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1, 13):
        bucket = next(size for size in sizes if size >= rows)
        assert bucket - rows < (64 if rows <= 128 else 256 if rows <= 2048 else 1024)


class RecordedGraph:
    """Stands for a captured graph: a replay runs the same work again on what its arrays hold by then."""

    def __init__(self, run: Callable[[Step], torch.Tensor], step: Step) -> None:
        self.run, self.step = run, step
        self.output = run(step)

    def replay(self) -> None:
        self.output.copy_(self.run(self.step))


def step_size(step: Step) -> StepSize:
    rows = step.positions.numel()
    return StepSize(rows, rows if step.narrowed is None else step.narrowed.positions.numel())


def all_positions(step: Step) -> torch.Tensor:
    """Stands for logits."""
    return step.positions.float()


def last_positions(step: Step) -> torch.Tensor:
    """Stands for hidden states."""
    assert step.narrowed is not None
    return step.narrowed.positions + 0.5


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[StepSize]:
    """Sizes in the order of their captures, which are recorded."""
    sizes: list[StepSize] = []

    def capture(_: StepGraphs, step: Step, run: Callable[[Step], torch.Tensor]):
        sizes.append(step_size(step))
        graph = RecordedGraph(run, step)
        return graph, graph.output

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: SimpleNamespace(id=(0, 0)))
    return sizes


def graphs_over(
    geometry: CacheGeometry, *, tokens: int, last_rows: tuple[int, ...], most_rows: int = 1
) -> tuple[StepPacker, StepGraphs]:
    most = {"max_num_batched_tokens": tokens, "max_num_seqs": last_rows[-1] // most_rows}
    packer = StepPacker(
        geometry, **most, max_model_len=600, vocab_size=512, blocks=QueryBlocks(8, 8, 256), device=CPU,
        most_rows=most_rows,
    )  # fmt: skip
    return packer, StepGraphs(packer, **most, last_rows=last_rows, logits=all_positions, hidden=last_positions)


def test_a_batch_replays_the_next_bucket_of_its_kind(driver_for, small_architecture, geometry_of, captured) -> None:
    geometry = geometry_of(small_architecture("31b"))
    packer, graphs = graphs_over(geometry, tokens=200, last_rows=(12,))
    mixed_sizes, decode_sizes = [(200, 12), (128, 12), (64, 12)], [(12, 12), (8, 8), (4, 4), (2, 2), (1, 1)]
    expected_sizes = [StepSize(*size) for size in mixed_sizes + decode_sizes]
    assert captured == expected_sizes, "the largest first: the others fit in its memory"
    assert graphs.mixed_rows == (64, 128, 200)
    driver = driver_for(geometry, 1 << 24)
    decodes = [driver.share(str(i), [5]) for i in range(13)]
    found = [graphs.size_for(driver.batch(*decodes[:n])) for n in (1, 3, 5, 9, 12)]
    assert found == [StepSize(rows, rows) for rows in (1, 4, 8, 12, 12)]
    assert graphs.size_for(driver.batch(*decodes)) is None, "more than any graph takes"
    mixed = driver.batch(*decodes[:2], driver.share("p", [5] * 63, slot=11))
    assert graphs.size_for(mixed) == StepSize(128, 12)
    assert graphs.size_for(driver.batch(driver.share("q", [5] * 201))) is None, "more than any graph takes"
    driver.share("r", [5] * 260)
    assert graphs.size_for(driver.batch(driver.share("r", [5] * 2))) is None, "more keys than one expansion holds"
    for batch, expected in ((driver.batch(*decodes[:3]), [0.0] * 3), (mixed, [0.5, 0.5, 62.5])):
        size = graphs.size_for(batch)
        assert size is not None
        replayed = graphs.replay(packer.pack(batch, padded_to=size), size)
        assert replayed.shape == (size.last,)
        assert replayed[: len(expected)].tolist() == expected
        assert (replayed[len(expected) :] < 0).all(), "padding"


def test_a_step_takes_drafts_by_its_rows_and_without_any_it_is_that_of_no_drafter(
    small_architecture, geometry_of, captured
) -> None:
    """Whoever has how many of them."""
    packer, graphs = graphs_over(
        geometry_of(small_architecture("31b")), tokens=64, last_rows=(24,), most_rows=3
    )  # fmt: skip

    def size_of(*lengths: int) -> StepSize | None:
        rows = np.array(lengths, dtype=np.int32)
        slots, starts = np.arange(len(rows), dtype=np.int32), np.full(len(rows), 40, dtype=np.int32)
        token_ids = np.full(rows.sum(), 7, dtype=np.int32)
        batch = ScheduledBatch(
            1, slots, starts, rows, rows, np.ones_like(rows), token_ids, (), (), NO_UPDATES, NO_UPDATES
        )  # fmt: skip
        size = graphs.size_for(batch)
        assert size is not None
        replayed = graphs.replay(packer.pack(batch, padded_to=size), size)
        assert replayed[: rows.sum()].tolist() == [40.0 + i for length in lengths for i in range(length)]
        assert (replayed[rows.sum() :] < 0).all(), "padding"
        return size

    assert size_of(1, 1, 1) == StepSize(4, 4, 1)
    assert size_of(*[1] * 8) == StepSize(8, 8, 1)
    assert size_of(3) == StepSize(3, 3, 3)
    assert size_of(1, 2) == StepSize(3, 3, 3)
    assert size_of(1, 1, 1, 1, 1, 3, 1) == StepSize(12, 12, 3), "more segments than proposals fit in"
    assert size_of(*[1] * 7, 2) == StepSize(12, 12, 3)
    assert size_of(1, 1, 1, 1, 2) == StepSize(12, 12, 3), "in 6 rows there is room for 4 segments"
    assert size_of(*[3] * 8) == StepSize(24, 24, 3)


def test_few_requests_take_the_step_of_few_last_rows(driver_for, small_architecture, geometry_of, captured) -> None:
    geometry = geometry_of(small_architecture("e4b"))
    packer, graphs = graphs_over(geometry, tokens=128, last_rows=(32, 40))
    mixed = [StepSize(*size) for size in ((128, 40), (128, 32), (64, 40), (64, 32))]
    assert captured[:4] == mixed, "the largest first: the others fit in its memory"
    assert [size.rows for size in captured[4:]] == [40, 32, 24, 16, 8, 4, 2, 1], "decodes are captured once"
    assert graphs.mixed_rows == (64, 128), "as the scheduler sees them"
    driver = driver_for(geometry, 1 << 24)
    decodes = [driver.share(str(i), [5]) for i in range(39)]
    prompt = driver.share("p", [5] * 9, slot=39)
    for requests, last in ((40, 40), (33, 40), (32, 32), (2, 32)):  # larger ones leave behind what padding must cover
        batch = driver.batch(*decodes[: requests - 1], prompt)
        size = graphs.size_for(batch)
        assert size == StepSize(64, last)
        replayed = graphs.replay(packer.pack(batch, padded_to=size), size)
        assert replayed.tolist() == [0.5] * (requests - 1) + [8.5] + [-0.5] * (last - requests)


@pytest.mark.parametrize("warm_rows", [0, 64])
def test_what_ranks_launch_for_few_last_rows_runs_before_any_capture(
    small_architecture, geometry_of, captured, warm_rows: int
) -> None:
    """In the smallest step, since a large one finds no memory beside the graphs."""
    ran: list[tuple[int, StepSize]] = []  # captures until then, size

    def hidden(step: Step) -> torch.Tensor:
        ran.append((len(captured), step_size(step)))
        return last_positions(step)

    most = {"max_num_batched_tokens": 128, "max_num_seqs": 40}
    packer = StepPacker(
        geometry_of(small_architecture("e4b")), **most, max_model_len=600, vocab_size=512,
        blocks=QueryBlocks(8, 8, 256), device=CPU,
    )  # fmt: skip
    StepGraphs(packer, **most, last_rows=(32, 40), logits=all_positions, hidden=hidden, warm_rows=warm_rows)
    assert [size for captures, size in ran if not captures] == ([StepSize(64, 32)] if warm_rows else [])


def test_a_failed_step_raises_when_it_is_asked() -> None:
    error = ValueError("no room")
    for shared in (False, True):
        failed = FailedStep(error, before_collectives=shared)
        assert failed.before_collectives is shared
        with pytest.raises(ValueError, match="no room"):
            failed.result()


def logprobs(wanted: list[int]) -> SampledLogprobs:
    rows, most = len(wanted), max(wanted)
    return SampledLogprobs(
        chosen=torch.arange(rows) * -0.5,
        rank=torch.arange(rows) + 1,
        top_tokens=torch.arange(rows * most).view(rows, most),
        top_logprobs=-torch.arange(rows * most).view(rows, most).float(),
        wanted=np.array(wanted, dtype=np.int32),
    )


def test_tokens_and_logprobs_go_to_the_rows_that_asked() -> None:
    """A row of NaN reports nothing, whatever it asked for; its neighbours are unhurt."""
    tokens = torch.tensor([4, NOT_A_NUMBER, 6, 7])
    done = LaunchedStep(3, SamplerOutput(tokens, logprobs([2, 2, -1, 0])), on_gpu=False)
    sampled = done.result()
    assert (sampled.step, sampled.token_ids.dtype) == (3, np.int32)
    assert sampled.token_ids.tolist() == [4, NOT_A_NUMBER, 6, 7]
    assert sampled.logprobs == {
        0: TokenLogprobs(0.0, 1, ((0, 0.0), (1, -1.0))),
        3: TokenLogprobs(-1.5, 4, ()),
    }
    plain = LaunchedStep(4, SamplerOutput(tokens, None), on_gpu=False).result()
    assert plain.logprobs == {}
    assert plain.token_ids.tolist() == tokens.tolist()


def test_a_step_that_samples_nothing_is_answered_when_the_device_has_passed_it(monkeypatch) -> None:
    log: list[str] = []
    event = FakeEvent(log)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    step = LaunchedStep(9, None, on_gpu=True)
    assert event.recorded
    assert log == []
    sampled = step.result()
    assert log == ["waited"]
    assert (sampled.step, sampled.token_ids.size, sampled.logprobs) == (9, 0, {})
