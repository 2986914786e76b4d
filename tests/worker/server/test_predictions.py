"""A client's prediction of an answer: it reaches the engine, makes it come in fewer steps, and changes no token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from trained_answers import MODEL, TrainedModel

from modelserve.engine_args import EngineArgs
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.answers.sequences import Reply
from modelserve_worker.server.answers.usage import chat_usage

USER = [{"role": "user", "content": "say it again"}]
ASKED: dict[str, Any] = {"messages": USER, "max_tokens": 32, "seed": 3, "temperature": 1.0, "min_tokens": 28}


def _post(server: Any, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": USER, "max_tokens": 4} | fields
    return httpx.post(f"{server.url}/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    "content", ["a b", [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]], ids=["text", "parts"]
)
def test_a_prediction_reaches_the_engine_as_tokens(server: Any, content: Any) -> None:
    assert _post(server).status_code == 200
    assert not server.engine.requests[-1].predicted_token_ids
    answer = _post(server, prediction={"type": "content", "content": content}, n=2)
    assert answer.status_code == 200, answer.text
    encoded = httpx.post(f"{server.url}/tokenize", json={"prompt": "a b", "add_special_tokens": False}).json()["tokens"]
    for request in server.engine.requests[-2:]:
        assert list(request.predicted_token_ids) == encoded


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        ("a b", "prediction"),
        ({"type": "code", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "x"}]}, "of the user and results of tools"),
        ({"type": "content", "content": "a " * 9_000}, "prediction.content has at least"),
    ],
)
def test_what_is_no_prediction_is_refused(server: Any, prediction: Any, words: str) -> None:
    answer = _post(server, prediction=prediction)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])


@pytest.fixture(scope="module")
def plain() -> TrainedModel:
    return TrainedModel()


@pytest.fixture(scope="module", params=["auto", 5])
def looking_up(request: pytest.FixtureRequest) -> TrainedModel:
    return TrainedModel(prompt_lookup=True, num_speculative_tokens=request.param)


@pytest.fixture(scope="module")
def without(plain: TrainedModel) -> tuple[list[Reply], int]:
    return plain.run(plain.chat(**ASKED)), plain.engine.steps_done


def test_an_answer_that_was_predicted_comes_in_fewer_steps_and_is_the_same(
    without: tuple[list[Reply], int], looking_up: TrainedModel
) -> None:
    alone, before = without
    specs = looking_up.chat(**ASKED, prediction={"type": "content", "content": alone[0].content})
    start = looking_up.engine.steps_done
    replies = looking_up.run(specs)
    assert [reply.parts for reply in replies] == [reply.parts for reply in alone]
    assert [reply.num_tokens for reply in replies] == [reply.num_tokens for reply in alone]
    if looking_up.engine.scheduler.drafting.most == 5:  # with `auto` times decide
        assert looking_up.engine.steps_done - start < 0.9 * before
    counted = chat_usage(specs, replies, n=1)["completion_tokens_details"]
    stats = looking_up.engine.scheduler.stats()
    assert stats.draft_tokens_total > 0
    assert counted["accepted_prediction_tokens"] > 0
    assert counted["accepted_prediction_tokens"] + counted["rejected_prediction_tokens"] == stats.draft_tokens_total
    metrics = WorkerMetrics("tiny")
    metrics.observe_engine(looking_up.engine.scheduler.stats, cache_config={})
    place = {"model_name": "tiny", "position": "0"}
    first = metrics.registry.get_sample_value("vllm:spec_decode_num_accepted_tokens_per_pos_total", place)
    every = metrics.registry.get_sample_value("vllm:spec_decode_num_accepted_tokens_total", {"model_name": "tiny"})
    drafts = metrics.registry.get_sample_value("vllm:spec_decode_num_drafts_total", {"model_name": "tiny"})
    assert 0 < first <= drafts
    assert every == sum(stats.accepted_per_position)
    assert metrics.registry.get_sample_value("modelserve_low_draft_acceptance", {"model_name": "tiny"}) == 0.0


@pytest.mark.parametrize("again", [{}, {"n": 2}, {"temperature": 0.9}, {"min_tokens": 27}])
def test_what_was_answered_to_the_same_prompt_is_looked_up(looking_up: TrainedModel, again: dict[str, Any]) -> None:
    """By whoever asks it again, and by nobody with another salt; an answer that differs is its own."""
    asked = ASKED | {"messages": [{"role": "user", "content": f"again and {sorted(again)}"}]}
    (first,) = looking_up.run(looking_up.chat(**asked))

    def accepted(**fields: Any) -> tuple[list[Reply], int]:
        specs = looking_up.chat(**asked | again | fields)
        before = sum(looking_up.engine.scheduler.stats().accepted_per_position)
        replies = looking_up.run(specs)
        return replies, sum(looking_up.engine.scheduler.stats().accepted_per_position) - before

    alone, by_itself = accepted(cache_salt="another")
    replies, drafted = accepted()
    assert [reply.parts for reply in replies] == [reply.parts for reply in alone]
    if looking_up.engine.scheduler.drafting.most == 5 and replies[0].parts == first.parts:
        assert drafted >= 0.7 * first.num_tokens > by_itself / len(replies), (
            "five of six tokens, from the second one on"
        )


def test_without_a_drafter_nothing_is_told_of_drafts(plain: TrainedModel) -> None:
    specs = plain.chat(messages=USER, max_tokens=5, prediction={"type": "content", "content": "once"})
    details = chat_usage(specs, plain.run(specs), n=1)["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0}
    metrics = WorkerMetrics("tiny")
    metrics.observe_engine(plain.engine.scheduler.stats, cache_config={})
    assert not [family.name for family in metrics.registry.collect() if "spec_decode" in family.name]


def test_the_pool_beside_a_lookup_is_what_was_predicted() -> None:
    args = {"model": str(MODEL), "device": "cpu", "cpu_memory_bytes": 2 << 30, "max_num_seqs": 8}
    pools = []
    for more in ({}, {"prompt_lookup": True, "num_speculative_tokens": 16}):
        built = build_engine(EngineArgs.model_validate(args | more), lambda done, total: None)
        report = built.ready.plan_report
        pools.append(report["allocated"]["kvPoolBytes"])
        assert report["perGpu"]["kvPoolBytes"] == pools[-1]
        runner = built.engine.runner
        if more:
            longest = runner.model.architecture.max_position_embeddings
            assert runner._drafter._history.nbytes == 8 * longest * 4
            words = -(-runner.model.architecture.vocab_size // 32)
            assert runner._masks._staging._device.nbytes >= 8 * 17 * words * 4
            assert pools[0] - pools[1] >= 8 * longest * 4 + 8 * 16 * words * 4
