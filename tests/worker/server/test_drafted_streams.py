"""Steps that bring several tokens of an answer: one event each, and drafts are counted streamed as they are whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from every_split import CALL, MAX_MODEL_LEN, TOOL, TURN_END, streamed_events

from modelserve_tools.tiny.tokenizer_files import build_tokenizer
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import FinishReason, Request, RequestOutput
from modelserve_worker.server.answers.chat import ChatAnswer
from modelserve_worker.server.answers.completions import CompletionAnswer
from modelserve_worker.server.answers.sequences import SequenceRunner
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.inference import Answer
from modelserve_worker.server.responses.answer import ResponsesAnswer
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.state import ServedModel

AT_ONCE, DRAFTS = 4, 5
TEXT = "one two three four five six seven eight nine ten"
_IDS = build_tokenizer().encode


class Drafted:
    """An engine that verifies DRAFTS drafts in each step but the first, and accepts AT_ONCE - 1 of them."""

    max_model_len = MAX_MODEL_LEN

    def __init__(self, text: str) -> None:
        ids = [*_IDS(text, add_special_tokens=False).ids, TURN_END]
        self.steps = [ids[:1], *(ids[at : at + AT_ONCE] for at in range(1, len(ids), AT_ONCE))]

    async def generate(
        self, requests: Sequence[Request], *, client: str = ""
    ) -> AsyncGenerator[list[RequestOutput], None]:
        for number, tokens in enumerate(self.steps):
            ends = (FinishReason.STOP, TURN_END) if number == len(self.steps) - 1 else (None, None)
            drafts = DRAFTS if number else 0
            yield [RequestOutput(each.request_id, tuple(tokens), *ends, drafts=drafts) for each in requests]

    def abort(self, request_id: str) -> None: ...

    def counted(self, answers: int) -> dict[str, int]:
        accepted = answers * sum(len(tokens) - 1 for tokens in self.steps[1:])
        rejected = answers * DRAFTS * (len(self.steps) - 1) - accepted
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def _chat(body: dict[str, Any], model: ServedModel) -> Answer:
    messages = [{"role": "user", "content": "hi"}]
    asked = {"model": "tiny", "messages": messages, "prediction": {"type": "content", "content": TEXT}, **body}
    return ChatAnswer(ChatCompletionRequest.model_validate(asked), model, max_model_len=MAX_MODEL_LEN)


def _completion(body: dict[str, Any], model: ServedModel) -> Answer:
    asked = CompletionRequest.model_validate({"model": "tiny", "prompt": "hi", **body})
    return CompletionAnswer(asked, model, max_model_len=MAX_MODEL_LEN)


def _response(body: dict[str, Any], model: ServedModel) -> Answer:
    asked = {name: value for name, value in body.items() if name not in ("n", "stream_options")}
    request = ResponsesRequest.model_validate({"model": "tiny", "input": "hi", **asked})
    return ResponsesAnswer(request, model, max_model_len=MAX_MODEL_LEN)


def _runner(engine: Drafted, model: ServedModel) -> SequenceRunner:
    return SequenceRunner(engine, model.text.vocabulary, WorkerMetrics("tiny"))  # type: ignore[arg-type]


async def _streamed(answer: Answer, runner: SequenceRunner) -> list[dict[str, Any]]:
    told = (await streamed_events(answer, runner)).decode()
    data = [line.removeprefix("data: ") for line in told.split("\n") if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@pytest.mark.parametrize(
    ("make", "answers"), [(_chat, 1), (_chat, 3), (_completion, 1), (_completion, 2), (_response, 1)]
)
def test_drafts_are_counted_streamed_as_they_are_whole(served_model: ServedModel, make: Any, answers: int) -> None:
    engine = Drafted(TEXT)
    whole = json.loads(asyncio.run(make({"n": answers}, served_model).whole(_runner(engine, served_model))))
    name = "output_tokens_details" if make is _response else "completion_tokens_details"
    body = {"n": answers, "stream": True, "stream_options": {"include_usage": True}}
    events = asyncio.run(_streamed(make(body, served_model), _runner(engine, served_model)))
    last = events[-1]["response"] if make is _response else events[-1]
    assert last["usage"] == whole["usage"]
    details = {key: value for key, value in whole["usage"][name].items() if "prediction" in key}
    assert details == ({} if make is _response else engine.counted(answers))


@pytest.mark.parametrize("make", [_chat, _completion])
def test_what_a_step_says_is_one_event_of_each_answer(served_model: ServedModel, make: Any) -> None:
    engine = Drafted(TEXT)
    events = asyncio.run(_streamed(make({"n": 2, "stream": True}, served_model), _runner(engine, served_model)))
    for index in range(2):
        choices = [
            event["choices"][0] for event in events if event["choices"] and event["choices"][0]["index"] == index
        ]
        texts = [each.get("text") or each.get("delta", {}).get("content") for each in choices]
        assert "".join(filter(None, texts)) == TEXT
        assert len(list(filter(None, texts))) <= len(engine.steps)


def test_a_call_whose_steps_have_several_tokens_comes_in_as_many_deltas_at_most(served_model: ServedModel) -> None:
    """Its name with the step that completes it; arguments with those that say them; two calls in one step are told
    apart."""
    engine = Drafted(CALL + CALL)
    body = {"stream": True, "tools": [TOOL]}
    events = asyncio.run(_streamed(_chat(body, served_model), _runner(engine, served_model)))
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    carrying = [event for event in events if event["choices"][0]["delta"].get("tool_calls")]
    assert len(carrying) <= len(engine.steps)
    arguments = ["".join(each["function"]["arguments"] for each in deltas if each["index"] == at) for at in (0, 1)]
    assert arguments[0] == arguments[1]
    assert json.loads(arguments[0])["city"] == 'Pa"ris\n'
    assert [each["index"] for each in deltas if "id" in each] == [0, 1]
