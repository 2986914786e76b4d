"""Drafts on a device that replays captured steps: launched ahead, settled on the device, and no other token is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from assisted import Between, assistant_for, write_assistant
from full_logits import teacher_forced_logits
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens, read_architecture
from torch import Tensor
from true_drafter import TrueDrafter

from modelserve.engine_args import EngineArgs
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import Asked
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.assistant_drafter import AssistantDrafter
from modelserve_worker.drafters.drafter import Accepted, Drafter, Proposal
from modelserve_worker.engine.engine import Engine
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.startup.device import device_facts, kernel_table

K, SLOTS, CHUNK, LONGEST, POOL = 4, 3, 64, 256, 1 << 26
PROMPTS = (5, 130, 64, 17, 90)
NEAR = 0.1  # of logits: what bfloat16 rows may differ by when they are computed beside others
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@dataclass
class Told:
    tokens: dict[str, list[int]]
    most: int  # tokens of one request in one step
    steps: int


def requests(count: int) -> list[Request]:
    return [
        Request(str(n), tuple(random_tokens(n, seed=n)), SamplingParams(seed=n, max_tokens=count, temperature=0.0))
        for n in PROMPTS
    ]


def run(runner: GPUModelRunner, wanted: Sequence[Request]) -> Told:
    scheduler = Scheduler(
        SchedulerLimits(CHUNK, SLOTS, LONGEST, ()),
        runner.cache.geometry,
        POOL,
        draft_tokens=runner.draft_tokens,
        asked_drafts=runner.asked_drafts,
    )
    engine, most, update = Engine(scheduler, runner), [0], scheduler.update
    scheduler.update = lambda sampled: most.append(int(sampled.counts.max(initial=0))) or update(sampled)
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
    assert scheduler.arena.held_bytes == 0
    return Told({request.request_id: request.output_token_ids for request in wanted}, max(most), engine.steps_done)


def runner_of(
    model: Gemma4ForCausalLM, geometry: CacheGeometry, drafter: Drafter | None, *, captured: bool = True
) -> GPUModelRunner:
    """Whose kernels have all run, as those of a start's profile have, and whose steps are captured."""
    cache = KVCache(geometry, POOL, device=model.norm.weight.device)
    runner = GPUModelRunner(
        model, cache, max_num_batched_tokens=CHUNK, max_num_seqs=SLOTS, max_model_len=LONGEST, drafter=drafter
    )
    if captured and cache.arena.is_cuda:
        run(runner, requests(12))
        runner.capture_graphs()
    return runner


def logits_after(model: Gemma4ForCausalLM, geometry: CacheGeometry, text: Sequence[int], driver: type) -> Tensor:
    runner = runner_of(model, geometry, None, captured=False)
    pages, rows = driver(geometry, POOL), []
    for first in range(0, len(text), CHUNK):
        share = pages.share("r", list(text[first : first + CHUNK]))
        rows.append(teacher_forced_logits(runner, pages.batch(share))[-1])
    return rows[-1].float().cpu()


def target_of(variant: str, kv: str, device: torch.device, directory: Path) -> tuple[Gemma4ForCausalLM, CacheGeometry]:
    """In bfloat16 and with heads that the kernels take, on a GPU."""
    on_gpu, dtype = device.type == "cuda", torch.float32
    shape: dict[str, int] = {}
    if on_gpu:
        dtype, shape = torch.bfloat16, {"head_dim": 256, "global_head_dim": 512}
    make_checkpoint(variant, directory, seed=2, dtype=dtype, **shape)
    architecture, default = read_architecture(directory), KVCacheDtype.BFLOAT16 if on_gpu else KVCacheDtype.FLOAT32
    geometry = cache_geometry(
        architecture, dtype=default if kv == "auto" else KVCacheDtype(kv), tensor_parallel_size=1,
        layout=KVCacheLayout.least(architecture),
    )  # fmt: skip
    table = kernel_table(device_facts(device), architecture, geometry, EngineArgs(model=""))
    assert table.on_kernels == on_gpu
    return load_checkpoint(directory, dtype=dtype, device=device, operations=Operations(table, device)), geometry


def test_a_captured_step_with_chunks_has_room_for_last_rows_of_as_many_requests(tmp_path: Path) -> None:
    """Of which each may have one, where nobody drafts: rows that no program attends for hold anything."""
    model, geometry = target_of("E4B", "auto", CPU, tmp_path)
    drafter = TrueDrafter({}, num_tokens=K, right=1.0, slots=SLOTS, longest=LONGEST, vocab_size=256)
    views = runner_of(model, geometry, drafter)._packer.mixed_views(CHUNK, SLOTS)
    assert views.narrowed is not None
    assert views.narrowed.decode is not None
    assert views.narrowed.decode.most == views.narrowed.decode.slots.numel() == SLOTS


@pytest.mark.drawn
@pytest.mark.parametrize(("device", "variant", "kv"), [
    (CPU, "31B", "auto"), *(pytest.param(CUDA, *case, marks=ON_GPU) for case in (
        ("31B", "auto"), ("31B", "int8"), ("31B", "fp8_e4m3"), ("E4B", "auto"), ("E4B", "int8"))),
])  # fmt: skip
def test_captured_steps_with_drafts_say_what_steps_of_one_row_say(
    device: torch.device, variant: str, kv: str, tmp_path: Path, driver_for: type
) -> None:
    """Of drafts that are all right, and of such of which a third is wrong. In bfloat16 two tokens may change places
    where the model's own choice between them is nearer than rounding."""
    on_gpu = device.type == "cuda"
    model, geometry = target_of(variant, kv, device, tmp_path)
    alone = run(runner_of(model, geometry, None), requests(48))
    for right in (1.0, 0.67):
        drafter = TrueDrafter(
            alone.tokens, num_tokens=K, right=right, slots=SLOTS, longest=LONGEST, device=device,
            vocab_size=model.architecture.vocab_size,
        )  # fmt: skip
        runner = runner_of(model, geometry, drafter)
        replayed = count_replays(runner)
        drafted = run(runner, requests(48))
        assert len(replayed) > 0 or not on_gpu
        assert drafted.most == K + 1
        assert drafted.steps < alone.steps * (0.6 if right == 1.0 else 0.8)
        assert_told_alike(model, geometry, alone, drafted, driver_for)


@pytest.mark.drawn
@pytest.mark.parametrize(("device", "variant", "kv", "centroids"), [
    (CPU, "E4B", "auto", 32), *(pytest.param(CUDA, *case, marks=ON_GPU) for case in (
        ("31B", "auto", 0), ("31B", "int8", 0), ("31B", "fp8_e4m3", 0), ("E4B", "auto", 32), ("E4B", "int8", 32))),
])  # fmt: skip
def test_a_captured_assistant_proposes_what_it_proposes_launch_by_launch(
    device: torch.device, variant: str, kv: str, centroids: int, tmp_path: Path, driver_for: type
) -> None:
    """A random one, and bit by bit: of the same inputs, at the same sizes, with the same padding. Between two engines
    rounding may part the texts, behind which there is nothing to compare."""
    model, geometry = target_of(variant, kv, device, tmp_path / "target")
    write_assistant(tmp_path / "drafter", tmp_path / "target", seed=3, centroids=centroids, hidden=64)
    alone = run(runner_of(model, geometry, None), requests(24))
    drafter = BothWays(assistant_for(model, tmp_path / "drafter", num_tokens=K, slots=SLOTS + 2))
    runner = runner_of(model, geometry, drafter)
    drafter.compared.clear()
    assert_told_alike(model, geometry, alone, run(runner, requests(24)), driver_for)
    captured = drafter.inner._graphs
    assert bool(captured) == (device.type == "cuda")
    assert sum(drafter.compared) > 60
    assert SLOTS in drafter.compared
    assert SLOTS not in captured, "three requests take the graph of four"


class BothWays(Between):
    """Makes each proposal twice, by captured launches and one by one, and `compared` are the requests of each."""

    def __init__(self, inner: AssistantDrafter) -> None:
        super().__init__(inner, lambda names, positions, proposed: proposed)
        self.compared: list[int] = []

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        inner, draft = self.inner, self.inner._draft
        first = inner.propose(accepted, asked).tokens.clone()
        inner._draft = lambda size, place: (inner._following if place else inner._first)(size)
        second = inner.propose(accepted, asked)
        inner._draft = draft
        assert torch.equal(first[:, : asked.drafts], second.tokens[:, : asked.drafts])
        self.compared.append(len(first) if asked.drafts else 0)
        return second


def count_replays(runner: GPUModelRunner) -> list[int]:
    counted: list[int] = []
    if (graphs := runner._graphs) is not None:
        replay = graphs.replay
        graphs.replay = lambda step, size: counted.append(size.rows) or replay(step, size)
    return counted


def assert_told_alike(
    model: Gemma4ForCausalLM, geometry: CacheGeometry, alone: Told, drafted: Told, driver: type
) -> None:
    for name, tokens in alone.tokens.items():
        if drafted.tokens[name] != tokens:
            assert model.norm.weight.is_cuda, "plain rows do not depend on the rows beside them"
            assert_near(model, geometry, name, tokens, drafted.tokens, driver)


def assert_near(
    model: Gemma4ForCausalLM, geometry: CacheGeometry, name: str, tokens: list[int],
    drafted: Mapping[str, list[int]], driver: type,
) -> None:  # fmt: skip
    first = next(i for i, (mine, theirs) in enumerate(zip(drafted[name], tokens, strict=True)) if mine != theirs)
    logits = logits_after(model, geometry, [*random_tokens(int(name), seed=int(name)), *tokens[:first]], driver)
    apart = abs(float(logits[tokens[first]] - logits[drafted[name][first]]))
    print(f"request {name}: token {first} of {len(tokens)} is another, {apart:.4f} apart")
    assert apart < NEAR
