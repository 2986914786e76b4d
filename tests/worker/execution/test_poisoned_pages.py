"""A cached page that holds rows which are not numbers, through the engine: one error, then what a cold one says."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens

from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.batch import FailedStep, PageCheck, SampledTokens
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.engine.engine import Engine
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.request import FinishReason, Request, SamplingParams
from modelserve_worker.runner.launched_step import CheckedStep
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.pages.page_checks import CheckedRows
from modelserve_worker.scheduling.prefix_reuse import PrefixReuse
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.startup.replica import launch

CPU = torch.device("cpu")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
LIMITS = SchedulerLimits(max_num_batched_tokens=512, max_num_seqs=4, max_model_len=400, eos_token_ids=())
DTYPES = [KVCacheDtype.FLOAT32, KVCacheDtype.BFLOAT16, KVCacheDtype.FP8_E4M3, KVCacheDtype.FP8_E5M2, KVCacheDtype.INT8]
TAKEN = {"head_dim": 256, "global_head_dim": 512}  # by the kernels of GPUs
SHARED = random_tokens(200, seed=1)


def poison(cache: KVCache, kind: LayerKind, page: int, token: int) -> None:
    """Write a NaN into one row of one layer."""
    layer = max(each for each in cache._layers if cache._layers[each].kind is kind)
    planes, (row,) = cache._layers[layer], cache.page_rows(kind, [page]).tolist()
    name = next(iter(planes.rows))
    width = planes.rows[name].shape[-1]
    stored = cache.encode(torch.full((width,), torch.nan, device=cache.arena.device))
    planes.rows[name][row, -1, token] = stored.values
    if stored.scale is not None:
        planes.scales[name][row, -1, token] = stored.scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_finds_rows_that_are_no_numbers_among_those_named(
    device: str, dtype: KVCacheDtype, small_architecture, geometry_of
) -> None:
    geometry = geometry_of(small_architecture("e4b"), dtype=dtype)
    cache = KVCache(geometry, geometry.held_bytes(1_000) // 128 * 128, device=torch.device(device))
    cache.arena.zero_()
    checks = [PageCheck(kind, page, 20) for kind in LayerKind for page in (0, 2, 3)]
    assert cache.unsound(checks).tolist() == [False] * 6
    for kind in LayerKind:
        poison(cache, kind, 2, 19)
        poison(cache, kind, 3, 20)
    assert cache.unsound(checks).tolist() == [False, True, False] * 2, "what is behind the rows may be anything"


class Served:
    """An engine over a runner, with a prefix cache or none."""

    def __init__(self, runner: GPUModelRunner, *, prefix_caching: bool = True) -> None:
        self.cache = runner.cache
        self.geometry = self.cache.geometry
        scheduler = Scheduler(LIMITS, self.geometry, self.cache.pool_bytes, prefix_caching=prefix_caching)
        self.engine, self.asked = Engine(scheduler, runner), 0

    @property
    def prefixes(self) -> PrefixReuse:
        return self.engine.scheduler.prefixes

    def ask(self, prompt: list[int], *, tenant: str = "") -> tuple[list[int], FinishReason | None, int]:
        """Tokens, why it ended, and how much of its prompt was found."""
        self.asked += 1
        sampling = SamplingParams(seed=0, max_tokens=6, temperature=0.0)
        request = Request(str(self.asked), tuple(prompt), sampling, tenant=tenant)
        self.engine.add(request)
        tokens, reason = [], None
        while self.engine.has_work:
            for output in self.engine.step():
                tokens, reason = [*tokens, *output.token_ids], output.finish_reason or reason
        self.engine.scheduler.check_integrity()
        return tokens, reason, request.cached_tokens


@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize("dtype", [KVCacheDtype.FLOAT32, KVCacheDtype.INT8])
def test_a_poisoned_page_costs_one_error_and_then_says_what_a_cold_engine_says(
    kind: LayerKind, dtype: KVCacheDtype, tmp_path: Path, geometry_of
) -> None:
    make_checkpoint("E4B", tmp_path, seed=8)
    model = load_checkpoint(tmp_path)
    geometry = geometry_of(model.architecture, dtype=dtype)
    cache = KVCache(geometry, 20 * geometry.held_bytes(400) // 128 * 128, device=CPU)
    cache.arena.zero_()
    one_error_and_then_the_answer(
        GPUModelRunner(model, cache, max_num_batched_tokens=512, max_num_seqs=4, max_model_len=400), kind
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_captured_steps_and_two_in_flight_do_the_same(kind: LayerKind, dtype: str, tmp_path: Path) -> None:
    make_checkpoint("E4B", tmp_path, seed=8, **TAKEN)
    args = EngineArgs(
        model=str(tmp_path), device="cuda", dtype="bfloat16", kv_cache_dtype=dtype, gpu_memory_utilization=0.2
    )
    runner = launch(args).runner
    assert isinstance(runner, GPUModelRunner)
    assert runner.captured_rows
    one_error_and_then_the_answer(runner, kind)
    del runner  # the next one's pool is sized by what is free
    gc.collect()
    torch.cuda.empty_cache()


def test_what_any_rank_finds_is_told(tmp_path: Path, geometry_of) -> None:
    """Of a page each rank has the rows of its heads."""
    make_checkpoint("E4B", tmp_path, seed=8)
    model = load_checkpoint(tmp_path)
    geometry = geometry_of(model.architecture)
    cache = KVCache(geometry, 4 * geometry.held_bytes(400) // 128 * 128, device=CPU)
    cache.arena.zero_()
    runner = GPUModelRunner(model, cache, max_num_batched_tokens=512, max_num_seqs=4, max_model_len=400)
    scheduler = Scheduler(LIMITS, geometry, cache.pool_bytes, prefix_caching=True)
    scheduler.prefixes.cache.checks._due = dict.fromkeys(
        scheduler.arena.allocate_kept(LayerKind.GLOBAL, 3), CheckedRows(0, 64)
    )
    batch = scheduler.schedule()
    assert batch is not None
    poison(cache, LayerKind.GLOBAL, 0, 5)

    class BesideAnother(TensorParallel):
        def all_gather(self, own: torch.Tensor) -> torch.Tensor:
            return torch.cat((own, torch.tensor([[0.0], [0.0], [1.0]])), dim=-1)

    model.parallel = BesideAnother()
    assert runner.execute(batch).result().unsound == (0, 2)


def one_error_and_then_the_answer(runner: GPUModelRunner, kind: LayerKind) -> None:
    served, size = Served(runner), runner.cache.geometry.sliding_page.page_tokens
    for tenant in ("a", "b"):
        assert served.ask(SHARED, tenant=tenant)[1:] == (FinishReason.LENGTH, 0)
    prefix = next(each for each in served.prefixes.cache.prefixes if each.end == len(SHARED))
    page = prefix.block.page if kind is LayerKind.GLOBAL else prefix.sliding[(len(SHARED) - 1) // size]
    assert page is not None
    poison(served.cache, kind, page.number, 3)
    question = [*SHARED, *random_tokens(20, seed=2)]
    tokens, reason, found = served.ask(question, tenant="a")
    assert (tokens, reason, found) == ([], FinishReason.ERROR, len(SHARED))
    tokens, reason, found = served.ask(question, tenant="a")
    assert (reason, found) == (FinishReason.LENGTH, 0)
    assert served.ask(question, tenant="a")[1:] == (FinishReason.LENGTH, len(question) - 1), "and is cached again"
    assert served.ask(question, tenant="b")[1:] == (FinishReason.LENGTH, len(SHARED)), "nobody else has lost anything"
    assert Served(runner, prefix_caching=False).ask(question)[0] == tokens


class _Constrained:
    """A step whose sampling fails."""

    def constrain(self, masks: object) -> FailedStep:
        assert masks is not None
        return FailedStep(RuntimeError("no memory"))

    def result(self) -> SampledTokens:
        raise AssertionError("it is sampled first")


def test_a_step_that_fails_when_it_is_sampled_is_told_as_such_to_the_group() -> None:
    step = CheckedStep(_Constrained(), torch.zeros(1, dtype=torch.bool))
    assert isinstance(step.constrain(np.zeros((1, 1), dtype=np.int32)), FailedStep)
