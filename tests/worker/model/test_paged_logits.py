"""Through scheduler and paged cache the logits are the reference's, whatever the chunk, batch, pool or ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checkpoints import VARIANTS, WINDOW, random_tokens, reference_logits
from paged_logits import (
    Forced,
    Traffic,
    expected,
    geometry_of,
    model_of,
    replay,
    scarce,
    scarce_logits,
    sequences,
    session,
)
from rank_logits import on_every_rank
from run_length import share
from torch import Tensor

from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

TOLERANCE = 1e-4
GAP = 2e-4  # greedy tokens may differ where the reference's two best logits are this close

Checkpoint = Callable[[str], Path]


def check(directory: Path, traffic: Traffic, logits: list[Tensor]) -> None:
    for forced, rows in zip(traffic.requests, logits, strict=True):
        wanted = expected(directory, forced.token_ids)[: len(forced.token_ids) - 1]
        assert rows.shape == wanted.shape
        assert float((rows - wanted).abs().max()) <= TOLERANCE


def crowd(*, prompt: Callable[[int], int], **limits: int | None) -> Traffic:
    """All sequences at once, arriving one step apart."""
    requests = tuple(Forced(ids, prompt(len(ids)), arrives=i) for i, ids in enumerate(sequences()))
    return Traffic(requests, **limits)  # type: ignore[arg-type]


@pytest.mark.drawn
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1, 33, 64, 512])
def test_one_prompt_in_chunks(variant: str, chunk: int, checkpoint: Checkpoint) -> None:
    """The last token is sampled; every other position is computed in prefill chunks of `chunk` tokens."""
    directory, ids = checkpoint(variant), tuple(random_tokens(140, seed=4))
    traffic = Traffic((Forced(ids, len(ids) - 1),), chunk=chunk)
    check(directory, traffic, replay(model_of(directory), traffic).logits)


@pytest.mark.drawn
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_unequal_lengths_in_one_batch(variant: str, steps_in_flight: int, checkpoint: Checkpoint) -> None:
    directory = checkpoint(variant)
    traffic = crowd(prompt=lambda length: length // 2, chunk=24, steps_in_flight=steps_in_flight)
    check(directory, traffic, replay(model_of(directory), traffic).logits)


@pytest.mark.drawn
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preempted_and_recomputed(variant: str, steps_in_flight: int, checkpoint: Checkpoint) -> None:
    directory = checkpoint(variant)
    traffic = replace(scarce(model_of(directory)), steps_in_flight=steps_in_flight)
    done = replay(model_of(directory), traffic)
    assert done.preemptions > 0
    assert done.recomputed > 0
    assert done.largest_disagreement <= TOLERANCE
    check(directory, traffic, done.logits)


def test_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """TP 2, unequal lengths, preemption, two steps in flight, shared rows; each rank has its own scheduler and the same
    pages."""
    directories = [checkpoint(variant) for variant in VARIANTS]
    by_rank = on_every_rank(partial(scarce_logits, directories), size=2, scratch=tmp_path)
    for first, second in zip(*by_rank, strict=True):
        assert torch.equal(first, second), "ranks disagree"
    logits = iter(by_rank[0])
    for directory in directories:
        traffic = scarce(model_of(directory))
        check(directory, traffic, [next(logits) for _ in traffic.requests])
    alone = replay(model_of(directories[-1]), session(chunk=64)).logits
    for rows, wanted in zip(logits, alone, strict=True):
        assert torch.allclose(rows, wanted, atol=TOLERANCE), "rows that another request computed, on two ranks"


@settings(max_examples=share(40), deadline=None)
@given(data=st.data())
def test_logits_do_not_depend_on_company(data: st.DataObject, checkpoint: Checkpoint) -> None:
    """Any arrivals, prompt lengths, chunk, number of slots and pool: the same logits within 1e-4."""
    directory = checkpoint(data.draw(st.sampled_from(sorted(VARIANTS)), label="variant"))
    model = model_of(directory)
    forced = st.sampled_from(sequences()).flatmap(
        lambda ids: st.builds(Forced, st.just(ids), st.integers(1, len(ids) - 1), st.integers(0, 12))
    )
    requests = tuple(data.draw(st.lists(forced, min_size=1, max_size=6), label="requests"))
    geometry = geometry_of(model)
    least = max(geometry.held_bytes(len(r.token_ids)) for r in requests)
    spare = data.draw(st.integers(0, 2 * least), label="spare bytes") // 128 * 128
    traffic = Traffic(
        requests,
        chunk=data.draw(st.integers(1, 80), label="chunk"),
        max_num_seqs=data.draw(st.integers(1, 6), label="max_num_seqs"),
        steps_in_flight=data.draw(st.integers(1, 2), label="steps in flight"),
        pool_bytes=least + spare,
    )
    done = replay(model, traffic)
    assert done.largest_disagreement <= TOLERANCE
    check(directory, traffic, done.logits)


@pytest.mark.drawn
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_the_references(variant: str, checkpoint: Checkpoint) -> None:
    """Two steps in flight; a token may differ only where the reference's two best logits are within 2e-4."""
    directory = checkpoint(variant)
    model = model_of(directory)
    geometry = geometry_of(model)
    pool = sum(geometry.held_bytes(len(ids) + 40) for ids in sequences())
    scheduler = Scheduler(SchedulerLimits(24, 8, 400, ()), geometry, pool)
    cache_ = KVCache(geometry, pool, device=torch.device("cpu"), debug_stamps=True)
    runner = GPUModelRunner(model, cache_, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=400)
    requests = [
        Request(str(i), ids, SamplingParams(seed=i, max_tokens=24, temperature=0.0))
        for i, ids in enumerate(sequences())
    ]
    for request in requests:
        scheduler.add(request)
    launched = []
    while scheduler.has_requests or launched:
        batch = scheduler.schedule()
        if batch is not None:
            launched.append(runner.execute(batch))
        if launched and (batch is None or len(launched) == 2):
            scheduler.update(launched.pop(0).result())
    for request in requests:
        ids = request.prompt_token_ids + tuple(request.output_token_ids)
        assert len(request.output_token_ids) == 24
        logits = reference_logits(directory, list(ids))
        for position in range(len(request.prompt_token_ids) - 1, len(ids) - 1):
            assert float(logits[position].max() - logits[position, ids[position + 1]]) < GAP
