"""An idle engine measures what an int8 cache costs: bit for bit as one would compute, in slices, and gives way."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelserve.engine_args import EngineArgs
from modelserve.quality.cache_quality import CacheQuality
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine.process import EngineProcess
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.quality.measurement import measure_cache_quality
from modelserve_worker.quality.texts import COMPARED_TOKENS, FACT_TOKENS, FACTS, TrialText, trial_texts
from modelserve_worker.request import (
    CacheTrial,
    FinishReason,
    PromptLogprobs,
    Request,
    RequestOutput,
    SamplingParams,
)
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

MODELS = Path(__file__).resolve().parents[2] / "models"
SLICE = 16
SCORED = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=20)


def texts_of(checkpoint: str, max_model_len: int) -> list[TrialText]:
    tokenizer = load_checkpoint_text(MODELS / checkpoint).tokenizer
    return trial_texts(
        lambda words: tokenizer.encode(words, add_special_tokens=False).ids,
        first=tokenizer.encode("", add_special_tokens=True).ids,
        max_model_len=max_model_len,
    )


def built(checkpoint: str, dtype: str = "auto", *, chunk: int = SLICE) -> Engine:
    args = EngineArgs(
        model=str(MODELS / checkpoint), device="cpu", dtype="float32", cpu_memory_bytes=1 << 30, kv_cache_dtype=dtype,
        max_num_batched_tokens=chunk, max_num_mixed_tokens=chunk, max_num_seqs=4, max_model_len=512,
    )  # fmt: skip
    return build_engine(args, lambda done, total: None).engine


def scored(engine: Engine, tokens: tuple[int, ...], trial: CacheTrial | None) -> PromptLogprobs:
    engine.add(Request("a", tokens, SCORED, trial=trial))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    (output,) = outputs
    assert output.finish_reason is FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def test_rounded_rows_say_bit_for_bit_what_an_int8_cache_says_and_leave_nothing() -> None:
    """Over a context of many windows, with what earlier requests left in the pages; who comes finds none of it, and it
    counts nowhere."""
    tokens = texts_of("gemma4-tiny-keqv", 300)[-1].tokens
    kept, int8 = built("gemma4-tiny-keqv", "float32", chunk=64), built("gemma4-tiny-keqv", "int8")
    exact = scored(kept, tokens, CacheTrial(SLICE))
    rounded = scored(kept, tokens, CacheTrial(SLICE, KVCacheDtype.INT8))
    wanted = scored(int8, tokens, None)
    np.testing.assert_array_equal(rounded.logprobs, wanted.logprobs)
    np.testing.assert_array_equal(rounded.top_logprobs, wanted.top_logprobs)
    assert np.abs(exact.logprobs - wanted.logprobs).max() > 1e-4
    np.testing.assert_array_equal(scored(kept, tokens, CacheTrial(SLICE)).logprobs, exact.logprobs)
    stats, events = kept.scheduler.stats(), kept.take_events()
    assert (stats.prompt_tokens_total, stats.cached_bytes, stats.held_bytes) == (0, 0, 0)
    assert events.timed_steps == []
    assert max(events.step_tokens) <= SLICE + 1
    request = Request("b", tokens, SamplingParams(seed=0, max_tokens=1))
    kept.add(request)
    while kept.has_work:
        kept.step()
    assert request.cached_tokens == 0
    assert kept.take_events().timed_steps


def test_who_comes_waits_for_one_slice(runner: Any, build_engine: Callable[..., Engine]) -> None:
    """A GPU is given the next step while it computes one; of a trial it is not."""
    engine = build_engine()
    engine.add(Request("trial", tuple(range(90)), SCORED, trial=CacheTrial(8)))
    for _ in range(3):
        engine.step()
        assert runner.most_in_flight == 1
    slices = len(runner.batches)
    assert slices >= 2
    engine.abort("trial")
    engine.add(Request("user", tuple(range(20)), SamplingParams(seed=0, max_tokens=2)))
    while not engine.step():
        pass
    assert [batch.trial for batch in runner.batches[:slices]] == [CacheTrial(8)] * slices
    assert [(batch.trial, batch.num_tokens) for batch in runner.batches[slices : slices + 1]] == [(None, 20)]


class _Noted(EngineProcess):
    """With what trials came to."""

    ended: list[bool]

    async def run_trial(self, request: Request) -> RequestOutput | None:
        output = await super().run_trial(request)
        self.ended.append(output is not None)
        return output


@pytest.fixture
async def engine() -> AsyncIterator[_Noted]:
    args = EngineArgs(
        model=str(MODELS / "gemma4-tiny-keqv"), device="cpu", dtype="float32", cpu_memory_bytes=1 << 30, max_num_seqs=4,
        max_model_len=512, max_num_batched_tokens=64,
    )  # fmt: skip
    process = _Noted(functools.partial(build_engine, args))
    process.ended = []
    await process.start(lambda done, total: None)
    yield process
    await process.shutdown()


async def _answer(engine: EngineProcess, name: str) -> list[int]:
    request = Request(name, (2, 5, 6, 7), SamplingParams(seed=1, max_tokens=6, temperature=0.0, ignore_eos=True))
    return [token async for outputs in engine.generate([request]) for output in outputs for token in output.token_ids]


async def _begun(engine: EngineProcess, measuring: asyncio.Task[None]) -> None:
    """Until a trial is computed."""
    while engine.idle:
        assert not measuring.done(), "there are trials to end"
        await asyncio.sleep(0.001)


async def test_a_trained_checkpoint_is_measured_and_requests_go_before(engine: _Noted) -> None:
    """From the texts to /v1/plan; each request that comes meanwhile ends a trial, which begins anew."""
    before = await _answer(engine, "before")
    assert "cacheQuality" not in engine.plan_report()
    texts = texts_of("gemma4-tiny-keqv", engine.max_model_len)
    measuring = asyncio.create_task(
        measure_cache_quality(engine, texts, layout=KVCacheLayout.V_ONLY, slice_tokens=64, idle_seconds=0.01)
    )
    for number in range(3):
        await _begun(engine, measuring)
        assert await _answer(engine, f"during-{number}") == before
    await asyncio.wait_for(measuring, 120)
    assert engine.ended.count(False) == 3
    assert engine.ended.count(True) == 2 * len(texts)
    told = json.loads(json.dumps(engine.plan_report()))["cacheQuality"]
    found = CacheQuality.model_validate(told)
    assert (found.dtype, found.layout) == (KVCacheDtype.INT8, KVCacheLayout.V_ONLY)
    assert 0 < found.kl < 0.01
    assert found.same > 0.95
    assert found.context == max(len(text.tokens) for text in texts)
    assert found.tokens == sum(len(text.tokens) - text.compared for text in texts)
    assert await _answer(engine, "after") == before


class _Scripted:
    """Scores as a function of whether rows are rounded."""

    def __init__(self, scores: Callable[[Request], PromptLogprobs]) -> None:
        self.cache_quality: CacheQuality | None = None
        self.idle = True
        self._scores = scores

    async def run_trial(self, request: Request) -> RequestOutput | None:
        return RequestOutput("a", (1,), FinishReason.LENGTH, prompt_logprobs=self._scores(request))


def _certain(request: Request, *, wrong: frozenset[int] = frozenset()) -> PromptLogprobs:
    """Every token is as good as certain, but those at `wrong` positions."""
    tokens = np.array(request.prompt_token_ids[1:], dtype=np.int32)
    missed = np.isin(np.arange(1, len(tokens) + 1), list(wrong))
    logprobs = np.where(missed, np.log(0.1), np.log(0.9)).astype(np.float32)
    others = np.where(missed, np.log(0.9), np.log(0.1)).astype(np.float32)
    tops = np.stack([np.where(missed, tokens + 1, tokens), np.where(missed, tokens, tokens + 1)], 1).astype(np.int32)
    rows = np.stack([np.where(missed, others, logprobs), np.where(missed, logprobs, others)], 1)
    return PromptLogprobs(logprobs, (1 + missed).astype(np.int32), tops, rows)


@pytest.mark.parametrize(("lost", "holds"), [(0, True), (1, False)])
async def test_a_fact_that_8_bits_lose_fails_the_contract(*, lost: int, holds: bool) -> None:
    text = TrialText(tuple(range(2, 3000)), 1974, facts=(2000, 2300))

    def scores(request: Request) -> PromptLogprobs:
        rounded = request.trial is not None and request.trial.rounded_to is not None
        return _certain(request, wrong=frozenset(range(2300, 2300 + lost)) if rounded else frozenset())

    engine = _Scripted(scores)
    await measure_cache_quality(engine, [text], layout=KVCacheLayout.KV, idle_seconds=0)
    found = engine.cache_quality
    assert found is not None
    assert (found.needles, found.found, found.tokens, found.context) == (2, 2 - lost, 1024, 2998)
    kl = lost * (0.9 * np.log(9) - 0.1 * np.log(9)) / 1024
    assert found.kl == pytest.approx(kl, abs=1e-6)
    assert found.same == pytest.approx(1 - lost / 1024)
    assert found.holds is holds


async def test_a_dead_engine_ends_the_measurement_alone() -> None:
    def dead(_: Request) -> PromptLogprobs:
        raise EngineDead("a rank is gone")

    engine = _Scripted(dead)
    await measure_cache_quality(engine, [TrialText((1, 2, 3), 1)], layout=KVCacheLayout.KV, idle_seconds=0)
    assert engine.cache_quality is None


async def test_the_text_that_comes_off_worst_counts() -> None:
    texts = [TrialText(tuple(range(2, 102)), 1), TrialText(tuple(range(5, 205)), 1)]

    def scores(request: Request) -> PromptLogprobs:
        rounded = request.trial is not None and request.trial.rounded_to is not None
        broken = rounded and len(request.prompt_token_ids) == 100
        return _certain(request, wrong=frozenset(range(10, 20)) if broken else frozenset())

    engine = _Scripted(scores)
    await measure_cache_quality(engine, texts, layout=KVCacheLayout.KV, idle_seconds=0)
    assert engine.cache_quality is not None
    assert engine.cache_quality.same == pytest.approx(89 / 99)


def test_texts_are_the_same_everywhere_and_their_facts_are_told_once_before() -> None:
    def encode(words: str) -> list[int]:
        return [ord(letter) for letter in words]

    texts = trial_texts(encode, first=[2], max_model_len=20_000)
    assert texts == trial_texts(encode, first=[2], max_model_len=20_000)
    *short, long = texts
    assert {len(text.tokens) for text in short} == {769}
    assert len(long.tokens) <= 19_999
    assert len(long.tokens) - long.compared == COMPARED_TOKENS
    assert len(long.facts) == FACTS
    spoken = long.tokens
    for at in long.facts:
        assert at >= long.compared
        fact = spoken[at : at + FACT_TOKENS]
        told = [i for i in range(long.compared) if spoken[i : i + FACT_TOKENS] == fact]
        assert len(told) == 1
        assert spoken[told[0] - 20 : told[0]] == spoken[at - 20 : at], "behind the same words"
    assert [text for text in trial_texts(encode, first=[2], max_model_len=20) if text] == []
    assert trial_texts(lambda words: [], first=[2], max_model_len=9000) == []
