"""Log probabilities of prompts: those of transformers, whatever the chunks, and in the shapes that clients read."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from teacher_forcing import reference_model
from trained_answers import MODEL, MODEL_LEN, TrainedModel

from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.answers.completions import CompletionAnswer
from modelserve_worker.server.answers.sequences import SequenceRunner
from modelserve_worker.server.bodies.protocol import CompletionRequest

TEXTS = ["The colour of the sky is blue and the river is cold.", "one two three four five six seven eight nine ten"]
LONG = " ".join(TEXTS * 5)


@pytest.fixture(scope="module")
def exact() -> TrainedModel:
    """Float32, and chunks so small that every prompt takes several."""
    return TrainedModel(dtype="float32", max_num_batched_tokens=48)


def _scores(model: TrainedModel, *texts: str, **fields):
    specs = [spec for text in texts for spec in model.completion(prompt=text, max_tokens=0, echo=True, **fields)]
    return [(reply.prompt_token_ids, reply.prompt_logprobs) for reply in model.run(specs)]


def _reference(token_ids) -> torch.Tensor:
    reference = reference_model(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0].float().log_softmax(dim=-1)


def test_loglikelihoods_are_those_of_transformers(exact: TrainedModel) -> None:
    """As lm-eval adds them up: the sum over a continuation, and whether greedy decoding would have said it."""
    for token_ids, scores in _scores(exact, *TEXTS, LONG, logprobs=1):
        expected = _reference(token_ids)
        targets = torch.tensor(token_ids[1:])
        by_token = expected[:-1].gather(1, targets[:, None])[:, 0].numpy()
        assert len(scores) == len(token_ids) - 1
        np.testing.assert_allclose(scores.logprobs, by_token, atol=1e-4)
        half = len(token_ids) // 2
        assert scores.logprobs[half:].sum() == pytest.approx(by_token[half:].sum(), abs=1e-4 * (len(token_ids) - half))
        greedy = (expected[:-1].argmax(dim=-1) == targets).numpy()
        assert ((scores.ranks == 1) == greedy).all()
        np.testing.assert_allclose(scores.top_logprobs[:, 0], expected[:-1].amax(dim=-1).numpy(), atol=1e-4)


def test_neither_neighbours_nor_preemption_change_a_score_or_lose_one(exact: TrainedModel) -> None:
    ((_, alone),) = _scores(exact, LONG, logprobs=2)
    together = _scores(exact, *TEXTS, LONG, *TEXTS, logprobs=2)
    np.testing.assert_allclose(together[2][1].logprobs, alone.logprobs, atol=1e-5)
    (spec,) = exact.completion(prompt=LONG, max_tokens=4, echo=True, logprobs=2)
    engine, found = exact.engine, []
    engine.add(spec.request)
    for step in range(10_000):
        found += [output.prompt_logprobs for output in engine.step() if output.prompt_logprobs is not None]
        running = list(engine.scheduler._running.by_id.values())
        if step in (2, 7):  # in the prompt, and again behind its first token
            engine.scheduler._preempt(running[0])
        if not engine.has_work:
            break
    (scores,) = found
    np.testing.assert_allclose(scores.logprobs, alone.logprobs, atol=1e-5)
    assert (scores.ranks == alone.ranks).all()


async def _document(model: TrainedModel, **body):
    answer = CompletionAnswer(
        CompletionRequest.model_validate({"model": "tiny", **body}), model.served, max_model_len=2048
    )

    class Runner:
        async def collect(self, specs):
            return model.run(specs)

    return json.loads(await answer.whole(Runner()))


async def test_echo_puts_the_prompt_before_the_answer(exact: TrainedModel) -> None:
    body = {"prompt": [TEXTS[0], TEXTS[1]], "echo": True, "logprobs": 3, "temperature": 0}
    document = await _document(exact, **body, max_tokens=1)
    for choice, text in zip(document["choices"], TEXTS, strict=True):
        scores = choice["logprobs"]
        ids = exact.served.text.encoder.encode(text, add_special_tokens=True, most_tokens=4096)
        assert choice["text"].startswith(text)
        assert len(scores["tokens"]) == len(ids) + 1
        assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
        assert all(-30 < value < 0 for value in scores["token_logprobs"][1:])
        assert all(3 <= len(top) <= 4 for top in scores["top_logprobs"][1:])
        assert scores["text_offset"] == sorted(scores["text_offset"])
    nothing = await _document(exact, **body, max_tokens=0)
    for choice, longer, text in zip(nothing["choices"], document["choices"], TEXTS, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert choice["logprobs"]["tokens"] == longer["logprobs"]["tokens"][:-1]
    assert nothing["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_have_vllms_shape(exact: TrainedModel) -> None:
    ids = list(exact.served.text.encoder.encode(TEXTS[0], add_special_tokens=True, most_tokens=4096))
    document = await _document(exact, prompt=ids, prompt_logprobs=2, max_tokens=1, logprobs=0)
    first, *others = document["choices"][0]["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip(ids[1:], others, strict=True):
        own = entry[str(token_id)]
        assert 2 <= len(entry) <= 3
        assert sorted(each["rank"] for each in entry.values())[:2] == [1, 2]
        assert own["logprob"] <= max(each["logprob"] for each in entry.values())
        assert own["decoded_token"] == exact.vocabulary.bytes_of(token_id).decode()
        assert sum(math.exp(each["logprob"]) for each in entry.values()) <= 1.001
    assert document["choices"][0]["logprobs"]["tokens"], "the answer's own token is scored beside"


class LastFirst:
    """An EngineClient that takes the last request first, and counts the prompts that it scored."""

    def __init__(self, model: TrainedModel) -> None:
        self.engine = model.engine
        self.scored = 0

    async def generate(self, requests, *, client=""):
        for request in reversed(requests):
            self.engine.add(request)
        while self.engine.has_work:
            outputs = self.engine.step()
            self.scored += sum(output.prompt_logprobs is not None for output in outputs)
            yield outputs

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)


async def _answered(model: TrainedModel, **body) -> tuple[list[dict], int]:
    """The choices of a body, streamed ones put together, and how many prompts were scored for them."""
    request = CompletionRequest.model_validate({"model": "tiny", **body})
    answer, client = CompletionAnswer(request, model.served, max_model_len=MODEL_LEN), LastFirst(model)
    runner = SequenceRunner(client, model.vocabulary, WorkerMetrics("tiny"))
    if not request.stream:
        return json.loads(await answer.whole(runner))["choices"], client.scored
    choices: dict[int, dict] = {}
    events = b"".join([await answer.events(replies) async for replies in runner.stream(answer.specs)])
    for event in filter(None, events.decode().split("\n\n")):
        for part in json.loads(event.removeprefix("data: "))["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
            choice["text"] += part["text"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
            choice["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)], client.scored


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_of_several_choices_is_scored_once_and_each_has_the_scores(
    exact: TrainedModel, stream: bool
) -> None:
    """Also where a choice has its first token before the scores are there."""
    body = {"prompt": [TEXTS[0], LONG], "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}
    body |= {"ignore_eos": True}
    choices, scored = await _answered(exact, **body, n=3, stream=stream)
    assert (len(choices), scored) == (6, 2)
    alone, _ = await _answered(exact, **body, n=1)
    for index, choice in enumerate(choices):
        first, prompt = alone[index // 3], body["prompt"][index // 3]
        num_prompt = len(first["logprobs"]["tokens"]) - 3
        assert choice["text"].startswith(prompt)
        assert choice["text"] == first["text"]
        for name in ("tokens", "text_offset"):
            assert choice["logprobs"][name] == first["logprobs"][name]
        values, expected = (each["logprobs"]["token_logprobs"] for each in (choice, first))
        assert values[0] is None
        np.testing.assert_allclose(values[1:num_prompt], expected[1:num_prompt], atol=1e-4)
        assert len(values) == len(choice["logprobs"]["top_logprobs"]) == num_prompt + 3
        assert choice["finish_reason"] == "length"


async def test_choices_have_prompt_logprobs_of_one_computation(exact: TrainedModel) -> None:
    choices, scored = await _answered(exact, prompt=TEXTS[0], prompt_logprobs=1, n=3, max_tokens=1)
    assert scored == 1
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"] == choices[2]["prompt_logprobs"]
    assert len(choices[0]["prompt_logprobs"]) > 5
    unscored, scored = await _answered(exact, prompt=TEXTS[0], n=3, max_tokens=2, stream=True, ignore_eos=True)
    assert (len(unscored), scored) == (3, 0), "without scores nobody waits for the first choice"


async def test_a_prompt_of_one_token_has_no_scores_and_holds_no_choice_back(exact: TrainedModel) -> None:
    body = {"prompt": [[5]], "echo": True, "logprobs": 0, "max_tokens": 2, "n": 2, "ignore_eos": True}
    for stream in (False, True):
        choices, scored = await _answered(exact, **body, stream=stream)
        assert ([choice["finish_reason"] for choice in choices], scored) == (["length"] * 2, 0)
