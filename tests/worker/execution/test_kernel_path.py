"""The attention backend of GPUs and its kernels as one, in Triton's interpreter: whole models against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import paged_logits
import pytest
import torch
from attention_tables import attention_table
from exact_traffic import Exactly, differing
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens, reference_logits
from ordered_dots import ordered_dots  # noqa: F401 - a fixture
from paged_logits import Forced, Replay, Traffic, geometry_of, replay
from span_reference import prompt_of, random_span, spanned_logits
from torch import Tensor
from true_drafter import TrueDrafter

from modelserve.sizing import kernel_buffers
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.engine.engine import Engine
from modelserve_worker.kernels.attention import triton_launches
from modelserve_worker.kernels.operations import PLAIN_EXACT
from modelserve_worker.request import CacheTrial, Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.step.step_size import StepSize


@pytest.fixture(autouse=True)
def padding_rows_hold_anything() -> Iterator[None]:
    """What memory held."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def check(done: Replay, requests: list[Forced], checkpoint: Path) -> None:
    for forced, positions, rows in zip(requests, done.positions, done.logits, strict=True):
        expected = reference_logits(checkpoint, list(forced.token_ids))[positions]
        assert float((rows - expected).abs().max()) < 1e-4


@pytest.mark.drawn
@pytest.mark.parametrize(("variant", "max_num_seqs"), [("31B", 3), ("E4B", 2)])
def test_steps_through_the_kernels_say_what_the_reference_says(variant: str, max_num_seqs: int, tmp_path: Path) -> None:
    """Prompts in chunks and decodes of two requests, of which last rows go on alone; every row is stamped."""
    make_checkpoint(variant, tmp_path, seed=2, head_dim=64, global_head_dim=128)  # narrow, for the interpreter
    requests = [Forced(tuple(random_tokens(length, seed=length)), length - 1) for length in (31, 5)]
    model = load_checkpoint(tmp_path)
    table = attention_table(model.architecture, geometry_of(model))
    done = replay(
        model, Traffic(tuple(requests), chunk=24, max_num_seqs=max_num_seqs), narrowed=True, audited=True,
        table=table,
    )  # fmt: skip
    check(done, requests, tmp_path)


def test_images_through_the_kernels_say_what_the_reference_says(tmp_path: Path) -> None:
    """Beside a text: rows of embeddings that see each other, of more than a window, and some that do not."""
    make_checkpoint("31B", tmp_path, seed=2, head_dim=64, global_head_dim=128)
    model, text = load_checkpoint(tmp_path), Forced(tuple(random_tokens(3, seed=9)), 2)
    hidden = model.architecture.hidden_size
    spans = random_span(1, 11, hidden=hidden, seed=1), random_span(13, 2, hidden=hidden, seed=2, mutual=False)
    image = Forced(prompt_of(17, spans, seed=3), 16, spans=spans)
    table = attention_table(model.architecture, geometry_of(model))
    traffic = Traffic((text, image), chunk=32, max_num_seqs=2)
    done = replay(model, traffic, narrowed=True, audited=True, table=table)
    check(replace(done, logits=done.logits[:1], positions=done.positions[:1]), [text], tmp_path)
    wanted = spanned_logits(tmp_path, image.token_ids, spans)[done.positions[1]]
    assert float((done.logits[1] - wanted).abs().max()) < 1e-4


def told(runner: GPUModelRunner, requests: list[Request], pool_bytes: int) -> dict[str, list[int]]:
    limits = SchedulerLimits(24, 2, 60, ())
    scheduler = Scheduler(
        limits, runner.cache.geometry, pool_bytes, draft_tokens=runner.draft_tokens, asked_drafts=runner.asked_drafts
    )
    engine = Engine(scheduler, runner)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert scheduler.arena.held_bytes == 0
    return {request.request_id: request.output_token_ids for request in requests}


@pytest.mark.drawn
@pytest.mark.parametrize(("variant", "prompts"), [("31B", (13,)), ("E4B", (9, 4))])
def test_drafts_that_the_kernels_verify_change_no_token(
    variant: str, prompts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of five rows, launched ahead of the answer before; every row is stamped."""
    make_checkpoint(variant, tmp_path, seed=2, head_dim=64, global_head_dim=128)
    model = load_checkpoint(tmp_path)
    geometry = geometry_of(model)
    pool = 2 * geometry.held_bytes(60)

    def requests() -> list[Request]:
        return [
            Request(str(n), tuple(random_tokens(n, seed=n)), SamplingParams(seed=n, max_tokens=6, temperature=1.0))
            for n in prompts
        ]

    table = attention_table(model.architecture, geometry)

    def runner(drafter: TrueDrafter | None = None, table: KernelTable | None = table) -> GPUModelRunner:
        cache = KVCache(geometry, pool, device=torch.device("cpu"), debug_stamps=True)
        return GPUModelRunner(
            model,
            cache,
            max_num_batched_tokens=24,
            max_num_seqs=2,
            max_model_len=60,
            drafter=drafter,
            table=table,
        )

    monkeypatch.setattr(triton_launches, "most_splits", lambda _: 2)
    answers = told(runner(table=None), requests(), pool)
    drafter = TrueDrafter(answers, num_tokens=4, right=0.8, slots=2, longest=60, vocab_size=256)
    drafted = runner(drafter)
    drafted.launches_ahead = True
    assert told(drafted, requests(), pool) == answers


@torch.inference_mode()
def as_captured(runner: GPUModelRunner, batch: ScheduledBatch, *, every_row: bool) -> Tensor:
    """Hidden states of last rows by the launches that a graph has: over the arrays of a larger step, with padding."""
    packer, chunks = runner._packer, bool((batch.lengths > 1).any())
    size = StepSize(16 if chunks else 2, 2)
    views = packer.mixed_views(size.rows, size.last) if chunks else packer.decode_views(size.rows)
    if batch.step > 1:  # what the steps before left behind the step's own
        for name in ("decode_slots", "kept_slots", "kept_segment_slots"):
            packer._any.host(name)[:] = 1
        for name in ("decode_starts", "kept_positions", "kept_segment_starts"):
            packer._any.host(name)[:] = 3
    runner._pack(batch, padded_to=size)
    return runner._hidden(views)[: batch.num_requests]


@pytest.mark.drawn
@pytest.mark.parametrize(("variant", "max_num_seqs"), [("31B", 2), ("E4B", 3)])
def test_steps_in_arrays_of_larger_ones_say_what_the_reference_says(
    variant: str, max_num_seqs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that begins beside a decode, and one that comes when all have ended; padding holds what memory held.

    Of E4B as one that is captured for fewer last rows than there may be.
    """
    monkeypatch.setattr(paged_logits, "forward_hidden", as_captured)
    monkeypatch.setattr(kernel_buffers, "LEAST_EXPANSION_KEYS", 64)  # few programs for the interpreter
    monkeypatch.setattr(triton_launches, "most_splits", lambda _: 2)
    make_checkpoint(variant, tmp_path, seed=2, head_dim=64, global_head_dim=128)
    requests = [
        Forced(tuple(random_tokens(length, seed=length)), length - 2, arrives)
        for length, arrives in ((11, 0), (7, 1), (9, 6))
    ]
    model = load_checkpoint(tmp_path)
    table = attention_table(model.architecture, geometry_of(model))
    done = replay(
        model, Traffic(tuple(requests), chunk=16, max_num_seqs=max_num_seqs), narrowed=True, audited=False,
        table=table,
    )  # fmt: skip
    check(done, requests, tmp_path)


@pytest.mark.usefixtures("ordered_dots")
def test_exact_rows_do_not_depend_on_chunks_neighbours_or_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the kernels: a window of 9 and chunks that begin anywhere in a tile."""
    monkeypatch.setattr(triton_launches, "most_splits", lambda _: 2)
    make_checkpoint("26B-A4B", tmp_path, seed=2, head_dim=64, global_head_dim=128)
    model = load_checkpoint(tmp_path, operations=PLAIN_EXACT)
    table = attention_table(model.architecture, geometry_of(model), profile="exact")
    engines = Exactly(model, geometry_of(model), 48, 2, torch.device("cpu"), table)

    def asked(*lengths: int) -> list[Request]:
        return [
            Request(str(n), tuple(random_tokens(n, seed=n)), SamplingParams(seed=n, max_tokens=3, logprobs=1))
            for n in lengths
        ]

    alone = engines.run(asked(36), chunk=40)
    answers = {"36": alone["36"].tokens, "3": [5, 5, 5]}
    drafter = TrueDrafter(answers, num_tokens=2, right=1.0, slots=2, longest=48, vocab_size=256)
    assert differing(engines.run(asked(3, 36), chunk=20, drafter=drafter), alone) == []


@pytest.mark.parametrize("variant", ["31B"])
def test_rows_that_a_trial_rounds_behind_the_kernels_say_what_an_int8_cache_says(variant: str, tmp_path: Path) -> None:
    """Of V-only global layers and of K and V, of sliding ones in step buffers and in pages, in slices of a prompt."""
    make_checkpoint(variant, tmp_path, seed=2, head_dim=64, global_head_dim=128)
    model, prompt = load_checkpoint(tmp_path), tuple(random_tokens(19, seed=3))
    scored = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def scores(dtype: KVCacheDtype, trial: CacheTrial, *, kernels: bool) -> np.ndarray:
        geometry = geometry_of(model, dtype=dtype)
        cache = KVCache(geometry, 2 * geometry.held_bytes(60), device=torch.device("cpu"))
        runner = GPUModelRunner(
            model, cache, max_num_seqs=2, max_num_batched_tokens=24, max_model_len=60,
            table=attention_table(model.architecture, geometry) if kernels else None,
        )  # fmt: skip
        scheduler = Scheduler(SchedulerLimits(24, 2, 60, ()), geometry, cache.pool_bytes)
        engine, outputs = Engine(scheduler, runner), []
        engine.add(Request("a", prompt, scored, trial=trial))
        while engine.has_work:
            outputs += engine.step()
        (output,) = outputs
        return output.prompt_logprobs.logprobs

    wanted = scores(KVCacheDtype.INT8, CacheTrial(10), kernels=False)
    exact, rounded = (
        scores(KVCacheDtype.FLOAT32, CacheTrial(10, to), kernels=True) for to in (None, KVCacheDtype.INT8)
    )
    assert np.abs(rounded - wanted).max() < 1e-4
    assert np.abs(exact - wanted).max() > 10 * np.abs(rounded - wanted).max()
