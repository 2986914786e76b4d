"""The kernel path's audit: right steps pass, and a wrong table entry, store or order of stores is named."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from attention_tables import attention_table

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve_worker.attention import fast_attention
from modelserve_worker.attention.fast_attention import KernelAttention
from modelserve_worker.attention.table_audit import TableAudit
from modelserve_worker.batch import ScheduledBatch, commit_first_tokens
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.runner import model_runner
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.step_size import QueryBlocks

CPU = torch.device("cpu")
POOL, REQUESTS, TOKENS, LONGEST, WINDOW = 1 << 24, 8, 512, 600, 40
BLOCKS = QueryBlocks(global_tokens=8, sliding_tokens=8, expansion_keys=1 << 16)

Change = Callable[[Step], Step]


@dataclass
class Run:
    """Steps through an audit, in the order of stores and reads that the kernels have, or in another one."""

    architecture: ModelArchitecture
    cache: KVCache
    tables: BlockTables
    early: bool = False  # chunks' sliding rows are stored before the layers that share them have read
    packer: StepPacker = field(init=False)
    audit: TableAudit = field(init=False)

    def __post_init__(self) -> None:
        self.producers = [self.architecture.producer(i) for i in range(self.architecture.num_hidden_layers)]
        self.last_reader = {producer: layer for layer, producer in enumerate(self.producers)}
        self.audit = TableAudit(self.cache, self.tables, self.producers)
        self.packer = StepPacker(
            self.cache.geometry, max_num_batched_tokens=TOKENS, max_num_seqs=REQUESTS, max_model_len=LONGEST,
            vocab_size=512, blocks=BLOCKS, device=CPU,
        )  # fmt: skip

    def step(self, batch: ScheduledBatch, *, change: Change = lambda step: step) -> None:
        for kind, updates in ((LayerKind.GLOBAL, batch.global_updates), (LayerKind.SLIDING, batch.sliding_updates)):
            self.tables.apply({kind: updates})
        self.audit.begin(change(self.packer.pack(batch)), batch)
        sliding = self.cache.geometry.sliding_page.layers
        for layer, producer in enumerate(self.producers):
            self.audit.prepared(layer)
            self.audit.check(layer)
            at = producer if self.early else self.last_reader[producer]
            if (batch.lengths > 1).any() and producer in sliding and layer == at:
                self.audit.committed(producer)


@pytest.fixture
def run_of(small_architecture, geometry_of) -> Callable[..., Run]:
    def build(variant: str, *, window: int = WINDOW, early: bool = False) -> Run:
        architecture = small_architecture(variant, sliding_window=window)
        cache = KVCache(geometry_of(architecture), POOL, device=CPU, debug_stamps=True)
        tables = BlockTables(cache.geometry, max_num_seqs=REQUESTS, max_model_len=LONGEST, device=CPU)
        return Run(architecture, cache, tables, early=early)

    return build


@pytest.mark.parametrize("variant", ["31b", "e4b"])
@pytest.mark.parametrize("window", [1, 2, 33, 40])
def test_steps_of_any_cut_pass(run_of, driver_for, variant, window) -> None:
    """Requests come, are preempted and come again; pages change hands."""
    run = run_of(variant, window=window)
    driver, rng = driver_for(run.cache.geometry, POOL, seed=window), random.Random(window)
    for _ in range(40):
        for name in list(driver.tables):
            if rng.random() < 0.05 or driver.tables[name].computed > 400:
                driver.release(name)
        names = rng.sample("abcdef", k=rng.randint(1, 5))
        run.step(driver.batch(*(driver.share(name, [5] * rng.choice([1, 1, 1, 2, 9, 33, 80])) for name in names)))
    assert driver.reused_in_place >= 4, "pages were reused while their old rows were read"


@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize("count", [1, 30])
def test_an_entry_of_another_request_is_caught(run_of, driver_for, kind, count) -> None:
    run = run_of("31b")
    driver = driver_for(run.cache.geometry, POOL)
    run.step(driver.batch(driver.share("a", [5] * 90), driver.share("b", [5] * 90)))
    a, b = driver.tables["a"].slot, driver.tables["b"].slot
    table = run.tables.host[kind]
    table[[a, b], 1] = table[[b, a], 1]
    with pytest.raises(AssertionError, match=r"request #\d+ would read position \d+ of request #\d+"):
        run.step(driver.batch(driver.share("a", [5] * count)))


@pytest.mark.parametrize(("tokens", "caught"), [([5] * 90, False), ([5] * 20 + [6] * 70, True)])
def test_rows_of_another_request_are_read_where_the_tokens_are_the_same(run_of, driver_for, tokens, caught) -> None:
    """The second one begins behind 64 rows of the first, and says the same up to there, or does not."""
    run = run_of("31b")
    driver = driver_for(run.cache.geometry, POOL)

    def sharing(batch: ScheduledBatch, tokens: list[int]) -> ScheduledBatch:
        admitted = (dataclasses.replace(batch.admitted[0], prompt_token_ids=tuple(tokens), shares_rows_as="all"),)
        return dataclasses.replace(batch, admitted=admitted)

    run.step(sharing(driver.batch(driver.share("a", [5] * 64)), [5] * 64))
    a = driver.tables["a"]
    b = driver.share("b", tokens[:1])
    driver.tables["b"] = dataclasses.replace(
        a, slot=b.slot, computed=64, global_pages=a.global_pages[:1], sliding_pages=a.sliding_pages[:2]
    )
    for kind in LayerKind:
        run.tables.host[kind][b.slot] = run.tables.host[kind][a.slot]
    batch = dataclasses.replace(driver.batch(driver.share("b", tokens[64:])), admitted=(b.admitted,))
    if not caught:
        run.step(sharing(batch, tokens))
        return
    with pytest.raises(AssertionError, match=r"would read position \d+ of request #\d+"):
        run.step(sharing(batch, tokens))


def test_entries_of_one_request_in_the_wrong_order_are_caught(run_of, driver_for) -> None:
    run = run_of("31b")
    driver = driver_for(run.cache.geometry, POOL)
    run.step(driver.batch(driver.share("a", [5] * 150)))
    table = run.tables.host[LayerKind.GLOBAL][driver.tables["a"].slot]
    table[[0, 1]] = table[[1, 0]]
    with pytest.raises(AssertionError, match=r"would read position 64 of .* at position 0"):
        run.step(driver.batch(driver.share("a", [5])))


def test_a_page_never_written_is_caught_and_bystanders_are_not_blamed(run_of, driver_for) -> None:
    run = run_of("31b")
    driver = driver_for(run.cache.geometry, POOL)
    run.step(driver.batch(driver.share("a", [5] * 90), driver.share("b", [5] * 90)))
    run.tables.host[LayerKind.GLOBAL][driver.tables["a"].slot, 0] = driver.free[LayerKind.GLOBAL][-1]
    run.step(driver.batch(driver.share("b", [5])))
    with pytest.raises(AssertionError, match="would read a row never written at position 0"):
        run.step(driver.batch(driver.share("a", [5]), driver.share("b", [5])))


def test_a_commit_before_the_last_reader_is_caught(run_of, driver_for) -> None:
    """With the same steps in the right order nothing is."""
    for early in (False, True):
        run = run_of("e4b", early=early)
        driver = driver_for(run.cache.geometry, POOL)
        longer = commit_first_tokens(run.cache.geometry) + 60
        run.step(driver.batch(driver.share("a", [5] * 90)))
        batch = driver.batch(driver.share("a", [5] * longer))
        if not early:
            run.step(batch)
            continue
        with pytest.raises(AssertionError, match=r"layer \d+: request #\d+ would read position \d+ of request"):
            run.step(batch)


@pytest.mark.parametrize(
    ("name", "count", "at_once"),
    [("global_slots", 1, True), ("global_slots", 30, True), ("sliding_slots", 1, True), ("commit_slots", 30, False)],
)
def test_rows_that_are_not_stored_are_missed_by_their_reader(run_of, driver_for, name, count, at_once) -> None:
    """The step itself reads what it stores at once; a chunk's sliding rows are stored late, for the next step."""
    run = run_of("31b")
    driver = driver_for(run.cache.geometry, POOL)
    run.step(driver.batch(driver.share("a", [5] * 90)))

    def without(step: Step) -> Step:
        return dataclasses.replace(step, **{name: torch.full_like(getattr(step, name), -1)})

    batch = driver.batch(driver.share("a", [5] * count))
    if not at_once:
        run.step(batch, change=without)
        batch, without = driver.batch(driver.share("a", [5])), lambda step: step
    with pytest.raises(AssertionError, match="would read"):
        run.step(batch, change=without)


def test_a_padded_row_that_is_stored_is_caught(run_of, driver_for) -> None:
    run = run_of("31b")
    driver = driver_for(run.cache.geometry, POOL)

    def padded(step: Step) -> Step:
        def more(values: torch.Tensor) -> torch.Tensor:
            return torch.cat((values, values[-1:]))

        return dataclasses.replace(step, positions=more(step.positions), global_slots=more(step.global_slots))

    with pytest.raises(AssertionError, match="a padded row is stored"):
        run.step(driver.batch(driver.share("a", [5])), change=padded)


@pytest.fixture
def kernels_done(monkeypatch) -> list[str]:
    """The kernels' launches, by name; nothing runs, as on a device of compute capability 9.0."""
    launched: list[str] = []
    for name in ("prepare", "decode_attention", "chunk_attention", "commit"):
        monkeypatch.setattr(fast_attention.kernels, name, lambda *_, name=name, **__: launched.append(name))
    return launched


@pytest.mark.parametrize("all_rows", [False, True])
def test_the_kernel_path_is_audited_at_every_layer(
    small_architecture, geometry_of, driver_for, kernels_done: list[str], all_rows: bool
) -> None:
    """The backend itself, its kernels replaced by nothing: a wrong entry stops the step before any kernel reads it."""
    architecture = small_architecture("e4b", sliding_window=WINDOW)
    model = Gemma4ForCausalLM(architecture, Placement(CPU, torch.float32))
    cache = KVCache(geometry_of(architecture), POOL, device=CPU, debug_stamps=True)
    tables = BlockTables(cache.geometry, max_num_seqs=REQUESTS, max_model_len=LONGEST, device=CPU)
    table = attention_table(architecture, cache.geometry, capability=90)
    backend = KernelAttention(model, cache, tables, table, max_model_len=LONGEST, few_rows=REQUESTS)
    packer = StepPacker(
        cache.geometry, max_num_batched_tokens=TOKENS, max_num_seqs=REQUESTS, max_model_len=LONGEST,
        vocab_size=512, blocks=backend.blocks, device=CPU,
    )  # fmt: skip
    driver = driver_for(cache.geometry, POOL)

    def step(count: int) -> None:
        batch = driver.batch(driver.share("a", [5] * count))
        for kind, updates in ((LayerKind.GLOBAL, batch.global_updates), (LayerKind.SLIDING, batch.sliding_updates)):
            tables.apply({kind: updates})
        if all_rows:
            batch = dataclasses.replace(batch, sampled=batch.lengths, given=batch.lengths, targets=batch.token_ids)
        packed = packer.pack(batch)
        backend.begin(packed, batch)
        assert (packed.narrowed is None) == (all_rows or count == 1)
        for layer in range(architecture.num_hidden_layers):
            attention = model.decoder_layer(layer).attention
            projected = torch.zeros(count, sum(shard.size for shard in attention.qkv.shards))
            angles = torch.zeros(count, attention.head_dim // 2)
            narrowing = packed.narrowed if layer == architecture.first_shared_layer - 1 else None
            count = len(backend.attend(attention, projected, (angles, angles), narrowing))

    for count in (90, 1, 90, 7, 1):
        step(count)
    sliding = len(cache.geometry.sliding_page.layers)
    assert kernels_done.count("commit") == 3 * sliding
    assert kernels_done.count("prepare") == 5 * architecture.num_hidden_layers
    chunked = architecture.num_hidden_layers if all_rows else architecture.first_shared_layer - 1
    assert kernels_done.count("chunk_attention") == 3 * chunked
    tables.host[LayerKind.SLIDING][driver.tables["a"].slot] = driver.free[LayerKind.SLIDING][-1]
    kernels_done.clear()
    with pytest.raises(AssertionError, match="layer 0: request #"):
        step(1)
    assert kernels_done == ["prepare"]


@pytest.mark.parametrize("audited", [False, True])
def test_audited_steps_are_not_captured(small_architecture, geometry_of, monkeypatch, audited) -> None:
    """A replay would show the audit no layer."""
    architecture = small_architecture("e4b")
    model = Gemma4ForCausalLM(architecture, Placement(CPU, torch.float32))
    cache = KVCache(geometry_of(architecture), 1 << 20, device=CPU, debug_stamps=audited)
    runner = model_runner.GPUModelRunner(model, cache, max_num_batched_tokens=8, max_num_seqs=40, max_model_len=64)
    captured: list[tuple[int, ...]] = []
    monkeypatch.setattr(model_runner, "StepGraphs", lambda *_, last_rows, **__: captured.append(last_rows))
    monkeypatch.setattr(runner, "_kernels", SimpleNamespace())
    runner.capture_graphs()
    assert captured == ([] if audited else [(32, 40)])
