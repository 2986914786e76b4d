"""Drafts change nothing: with any drafter requests say what they say without one, and all pages come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model_checkpoints import load_checkpoint
from paged_logits import geometry_of
from trained_answers import MODEL, TrainedModel
from true_drafter import TrueDrafter

from modelserve.sizing.pages import CacheGeometry, KVCacheDtype
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.drafter import Drafter, LongestProposal
from modelserve_worker.drafters.prompt_lookup import PromptLookup
from modelserve_worker.engine.engine import Engine
from modelserve_worker.grammar import mask_time
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import PromptLogprobs, TokenConstraint, TokenLogprobs
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.step_costs import StepCosts
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.server.answers.preparation import SequenceSpec
from modelserve_worker.server.answers.sequences import Reply

LONGEST, SEQUENCES = 300, 5
TEXT = "the moon and the river and a small house of stone by the sea where they read old letters in the morning"
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0, "logprobs": 3, "max_tokens": 20},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.8, "logit_bias": {"300": 4.0}},
    {"temperature": 1.0, "stop": ["e"], "max_tokens": 60},
    {"temperature": 1.0, "min_tokens": 25, "stop_token_ids": list(range(300, 550))},
    {"temperature": 0.7, "min_tokens": 24, "ignore_eos": False},
    {"temperature": 0, "prompt_logprobs": 2, "max_tokens": 10},
    {"temperature": 1.0, "structured_outputs": {"regex": "[a-f]{3}( [0-9]{1,4}){2,9}"}},
    {"temperature": 0, "structured_outputs": {"json": {"type": "array", "items": {"enum": ["red", "green"]}}}},
)


@dataclass
class Said:
    tokens: list[int]
    text: str
    reason: str | None
    logprobs: list[tuple[int, TokenLogprobs]]
    prompt: PromptLogprobs | None


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    return TrainedModel()


@pytest.fixture(scope="module")
def model() -> Gemma4ForCausalLM:
    """In float32, as rounding to bfloat16 tells apart what was summed in another order."""
    return load_checkpoint(MODEL)


def specs(trained: TrainedModel) -> list[SequenceSpec]:
    """The same requests each time, some with prompts of several chunks."""
    found = []
    for number, body in enumerate(BODIES):
        words = TEXT.split()[number % 7 :] * (1 + number % 3)
        made = {"prompt": " ".join(words), "max_tokens": 28, "ignore_eos": number % 2 == 0, "seed": number}
        found += trained.completion(**made | body)
    for number, spec in enumerate(found):
        spec.request.request_id = f"r{number}"
    return found


def engine_of(
    trained: TrainedModel, model: Gemma4ForCausalLM, drafter: Drafter | None, *, pool_of: int, chunk: int = 24,
    caching: bool | None = None, geometry: CacheGeometry | None = None, costs: StepCosts | None = None,
) -> Engine:  # fmt: skip
    """`caching` None: beside more than one draft. `geometry`: with what a drafter of blocks keeps; `costs`: by which
    one of several drafters is asked."""
    geometry = geometry or geometry_of(model, dtype=KVCacheDtype(str(model.dtype).removeprefix("torch.")))
    pool = pool_of * geometry.held_bytes(LONGEST) // 128 * 128
    device = model.norm.weight.device
    stamped = device.type == "cpu" and drafter is not None and drafter.num_tokens == 3
    cache = KVCache(geometry, pool, device=device, debug_stamps=stamped)
    cache.arena.fill_(0xFF)
    runner = GPUModelRunner(
        model, cache, max_num_batched_tokens=chunk, max_num_seqs=SEQUENCES, max_model_len=LONGEST, drafter=drafter
    )
    runner.capture_graphs()  # on a GPU
    exact = model.operations.exact
    limits = SchedulerLimits(
        chunk, SEQUENCES, LONGEST, model.architecture.eos_token_ids, captured_rows=runner.captured_rows, exact=exact
    )
    drafts, asked = runner.draft_tokens, runner.asked_drafts
    caching = drafts > 1 if caching is None else caching
    scheduler = Scheduler(
        limits, geometry, pool, draft_tokens=drafts, asked_drafts=asked, prefix_caching=caching, step_costs=costs
    )
    return Engine(scheduler, runner, trained.engine._grammars)


def run(
    trained: TrainedModel,
    engine: Engine,
    wanted: Sequence[SequenceSpec],
    *,
    aborted: str | None = None,
    preempting: bool = False,
    seed: int = 0,
) -> dict[str, Said]:
    """All requests to their ends, but one that is aborted after 12 tokens; they arrive over time."""
    replies = {spec.request.request_id: Reply(spec, trained.vocabulary, trained._metrics) for spec in wanted}
    rng, waiting = random.Random(seed), list(wanted)
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.4:
            engine.add(waiting.pop(0).request)
        for output in engine.step():
            name, reply = output.request_id, replies[output.request_id]
            if reply.finish_reason is None and output.finish_reason != "abort":
                reply.read(output)
                if reply.finish_reason is not None and output.finish_reason is None:
                    engine.abort(name)
            if name == aborted and reply.num_tokens >= 12:
                engine.abort(name)
        running = list(engine.scheduler._running.by_id.values())
        if preempting and len(running) > 1 and engine.steps_done % 7 == 0:
            engine.scheduler._preempt(running[-1])  # as when the pool is out
        engine.scheduler.check_integrity()
    assert engine.scheduler.arena.held_bytes == 0
    return {
        name: Said(
            spec.request.output_token_ids, reply.content, reply.finish_reason, reply.take_logprobs(),
            reply.prompt_logprobs,
        )
        for (name, reply), spec in zip(replies.items(), wanted, strict=True)
    }  # fmt: skip


@pytest.fixture(scope="module")
def without(trained: TrainedModel, model: Gemma4ForCausalLM) -> dict[str, Said]:
    return run(trained, engine_of(trained, model, None, pool_of=SEQUENCES), specs(trained))


def assert_same(said: Said, alone: Said, name: str, *, apart: float = 2e-4) -> None:
    """But for log probabilities that may be so far `apart`."""
    stopped = alone.reason == "stop" and len(said.tokens) != len(alone.tokens)  # by a string: others came behind it
    count = min(len(said.tokens), len(alone.tokens)) if stopped or said.reason is None else len(alone.tokens)
    assert said.tokens[:count] == alone.tokens[:count], name
    if said.reason is None:  # aborted
        return
    assert (said.text, said.reason) == (alone.text, alone.reason), name
    assert [token for token, _ in said.logprobs] == [token for token, _ in alone.logprobs], name
    for place, ((_, mine), (_, theirs)) in enumerate(zip(said.logprobs, alone.logprobs, strict=True)):
        told = f"{name}, log probabilities of token {place}: {mine}, alone {theirs}"
        assert mine.logprob == pytest.approx(theirs.logprob, abs=apart, rel=min(apart, 1e-6)), told
        assert mine.rank == theirs.rank, told
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top], told
    assert (said.prompt is None) == (alone.prompt is None), name
    if said.prompt is not None and alone.prompt is not None:
        same = said.prompt.logprobs == pytest.approx(alone.prompt.logprobs, abs=apart, rel=min(apart, 1e-6))
        assert same, f"{name}, of its prompt: {said.prompt.logprobs}, alone {alone.prompt.logprobs}"


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("k", "right", "ahead"),
    [(1, 0.5, True), (2, 1.0, False), (3, 0.5, False), (4, 0.0, True), (4, 0.6, True)],
)
def test_requests_say_what_they_say_without_drafts(trained, model, without, k: int, right: float, ahead: bool) -> None:
    """Chunked prompts, n answers, penalties, filters, stop strings and tokens, grammars, scores, an abort, and
    requests that are preempted and recomputed, in a pool that is too small for all. `ahead`: each step is launched
    before it is known how many drafts of the one before are accepted."""
    answers = {name: said.tokens for name, said in without.items()}
    drafter = TrueDrafter(
        answers, num_tokens=k, right=right, slots=SEQUENCES, longest=LONGEST, vocab_size=model.architecture.vocab_size
    )
    engine, told = engine_of(trained, model, drafter, pool_of=2), []
    engine.runner.launches_ahead = ahead
    update = engine.scheduler.update
    engine.scheduler.update = lambda sampled: told.append(int(sampled.counts.max(initial=0))) or update(sampled)
    take, with_bans = engine.scheduler._take, []

    def taken(running, token_ids, scores, **more):
        if len(running.request.output_token_ids) < running.request.sampling.min_tokens:
            with_bans.append(len(token_ids))
        return take(running, token_ids, scores, **more)

    engine.scheduler._take = taken
    said = run(trained, engine, specs(trained), aborted="r1", preempting=True, seed=k)
    assert engine.scheduler.stats().preemptions_total > 0
    assert max(told) == (1 if right == 0 else k + 1), "as many drafts are accepted as the drafter gets right"
    assert max(with_bans) == max(told), "also while some tokens may not come"
    assert sorted(said) == sorted(without)
    for name, alone in without.items():
        assert_same(said[name], alone, name)
    assert said["r1"].reason is None


def test_an_answer_whose_masks_are_dear_takes_no_drafts(trained, model, without, monkeypatch) -> None:
    """The masks behind drafts are computed while all others wait."""
    monkeypatch.setattr(mask_time, "DEAR_S", -1.0)
    wanted = [spec for spec in specs(trained) if spec.request.grammar is not None]
    answers = {name: said.tokens for name, said in without.items()}
    drafter = TrueDrafter(
        answers, num_tokens=3, right=1.0, slots=SEQUENCES, longest=LONGEST, vocab_size=model.architecture.vocab_size
    )
    engine, drafted = engine_of(trained, model, drafter, pool_of=SEQUENCES), []
    constraints = engine.scheduler.constraints

    def watched(batch: ScheduledBatch) -> list[tuple[TokenConstraint | None, tuple[int, ...]]]:
        drafted.extend((each.dear, len(drafts)) for each, drafts in constraints(batch) if each is not None)
        return constraints(batch)

    monkeypatch.setattr(engine.scheduler, "constraints", watched)
    said = run(trained, engine, wanted)
    assert sum(dear for dear, _ in drafted) > 30
    assert [each for each in drafted if each[0] and each[1]] == []
    for name, each in said.items():
        assert_same(each, without[name], name)


@pytest.mark.drawn
@pytest.mark.parametrize(("with_assistant", "ahead"), [(False, False), (True, True)])
def test_requests_say_what_they_say_without_a_lookup(
    trained, model, without, with_assistant: bool, ahead: bool
) -> None:
    """Alone, and beside a drafter that is mostly wrong; some requests come with a prediction, right or not."""
    sizes = {"max_num_seqs": SEQUENCES, "max_model_len": LONGEST, "device": torch.device("cpu")}
    drafter: Drafter = PromptLookup(num_tokens=6, **sizes)
    if with_assistant:
        answers = {name: said.tokens for name, said in without.items()}
        vocab_size = model.architecture.vocab_size
        other = TrueDrafter(answers, num_tokens=2, right=0.2, slots=SEQUENCES, longest=LONGEST, vocab_size=vocab_size)
        drafter = LongestProposal([other, drafter])
    engine, wanted = engine_of(trained, model, drafter, pool_of=2), specs(trained)
    engine.runner.launches_ahead = ahead
    for number, spec in enumerate(wanted):
        tokens = without[spec.request.request_id].tokens
        spec.request.predicted_token_ids = [(), tokens, tokens[3:] * 40, [*tokens[: number // 2], 7, 8]][number % 4]
    counts, update = [], engine.scheduler.update
    engine.scheduler.update = lambda sampled: counts.extend(sampled.counts.tolist()) or update(sampled)
    said = run(trained, engine, wanted, aborted="r1", preempting=True, seed=1)
    for name, alone in without.items():
        assert_same(said[name], alone, name)
    assert max(counts) == 7
    assert sum(count > 4 for count in counts) > 10
