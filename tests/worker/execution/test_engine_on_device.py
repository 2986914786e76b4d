"""The real scheduler over the real runner in debug mode: a pool too small for the load, two steps in flight."""

from __future__ import annotations

import random

import pytest
import torch
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens

from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.engine.engine import Engine
from modelserve_worker.request import FinishReason, Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

CPU = torch.device("cpu")
LIMITS = SchedulerLimits(max_num_batched_tokens=48, max_num_seqs=6, max_model_len=400, eos_token_ids=())


def _engine(model, geometry, pool_bytes: int, limits: SchedulerLimits = LIMITS) -> Engine:
    cache = KVCache(geometry, pool_bytes // 128 * 128, device=CPU, debug_stamps=True)
    cache.arena.fill_(0xFF)
    runner = GPUModelRunner(
        model,
        cache,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    return Engine(Scheduler(limits, geometry, cache.pool_bytes), runner)


def _requests(rng: random.Random, count: int) -> list[Request]:
    return [
        Request(
            str(i),
            tuple(random_tokens(rng.randint(1, 20), seed=i)),
            SamplingParams(
                seed=i,
                max_tokens=rng.randint(260, 300),
                temperature=rng.choice([0.0, 1.0]),
                repetition_penalty=rng.choice([1.0, 1.4]),
            ),
        )
        for i in range(count)
    ]


def _run(engine: Engine, requests: list[Request], rng: random.Random | None = None) -> dict[str, list[int]]:
    """Add requests over time and step until all are done: tokens by request id."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    waiting, ended = list(requests), set()
    while waiting or engine.has_work:
        if waiting and (rng is None or rng.random() < 0.5):
            engine.scheduler.add(waiting.pop(0))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            assert output.finish_reason in (None, FinishReason.LENGTH), output.error
            if output.finish_reason:
                ended.add(output.request_id)
    assert ended == set(tokens)
    return tokens


@pytest.mark.drawn
@pytest.mark.parametrize(("variant", "moves"), [("31B", False), ("E4B", True)])
def test_a_pool_that_is_too_small_changes_no_token(tmp_path, geometry_of, variant, moves) -> None:
    """Preempted, batched, chunked and moved about, each request says what it says alone; every read was permitted."""
    make_checkpoint(variant, tmp_path, seed=8)
    model = load_checkpoint(tmp_path)
    geometry = geometry_of(model.architecture)
    rng = random.Random(2)
    requests = _requests(rng, 5)
    small = _engine(model, geometry, int(1.8 * geometry.held_bytes(300)))
    together = _run(small, requests, rng)
    assert small.scheduler.stats().preemptions_total > 0
    assert (small.scheduler.stats().page_moves_total > 0) is moves
    for original in _requests(random.Random(2), 5):
        single = SchedulerLimits(max_num_batched_tokens=256, max_num_seqs=1, max_model_len=400, eos_token_ids=())
        alone = _run(_engine(model, geometry, 2 * geometry.held_bytes(400), single), [original])
        assert alone[original.request_id] == together[original.request_id]
