"""A chat stream says what the whole answer says, however many tokens each engine step hands over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

from every_split import streamed_events
from hypothesis import given
from hypothesis import strategies as st

from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import FIRST_BYTE_ID, SPECIAL_TOKENS, build_tokenizer
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import FinishReason, Request, RequestOutput, TokenLogprobs
from modelserve_worker.server.answers.chat import ChatAnswer
from modelserve_worker.server.answers.sequences import SequenceRunner
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.chat_template import ChatTemplate
from modelserve_worker.text.checkpoint_text import CheckpointText, SamplingDefaults
from modelserve_worker.text.vocabulary import Vocabulary

METRICS = WorkerMetrics("tiny")
TOKENIZER = build_tokenizer()
TEXT = CheckpointText(
    tokenizer=build_tokenizer(),  # its own: a prompt encoder switches the special tokens of its tokenizer off
    vocabulary=Vocabulary.from_tokenizer(TOKENIZER),
    chat_template=ChatTemplate(chat_template("e4b"), special_tokens={"bos_token": "<bos>"}),
    defaults=SamplingDefaults(),
)
MODEL = ServedModel("tiny", TEXT, vocab_size=512)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
PIECES = st.sampled_from(
    [
        "<|channel>thought\n", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "hm", "é👩‍🚀", "END", "\n",
        '<|tool_call>call:f{x:<|"|>}é<|"|>}<tool_call|>', "<|tool_call>call:g{}<tool_call|>", "call:f{", '<|"|>',
    ]
)  # fmt: skip
SAID = st.lists(PIECES.map(lambda text: TOKENIZER.encode(text, add_special_tokens=False).ids), max_size=8).map(
    lambda pieces: [token_id for piece in pieces for token_id in piece]
)


class ScriptedEngine:
    """Says `token_ids`, cut before the positions `cuts`, and stops with `<|tool_response>` or for length.

    A caller is handed the outputs up to each of `wakes` at once, as one that is slower than the engine.
    """

    max_model_len = 4096

    def __init__(self, token_ids: Sequence[int], cuts: Sequence[int], *, wakes: Sequence[int], stops: bool) -> None:
        ends = [50] if stops else [FIRST_BYTE_ID + ord(".")]
        tokens = [*token_ids, *ends]
        borders = [0, *sorted(min(cut, len(tokens) - 1) for cut in cuts), len(tokens)]
        self._groups = [tokens[start:end] for start, end in pairwise(borders)]
        self._stops = stops
        self._wakes = wakes

    async def generate(
        self, requests: Sequence[Request], *, client: str = ""
    ) -> AsyncGenerator[list[RequestOutput], None]:
        (request,) = requests
        outputs = [self._output(request, position) for position in range(len(self._groups))]
        for start, end in pairwise(sorted({0, *(min(wake, len(outputs)) for wake in self._wakes), len(outputs)})):
            yield outputs[start:end]

    def _output(self, request: Request, position: int) -> RequestOutput:
        group = tuple(self._groups[position])
        logprobs = (TokenLogprobs(-0.5, 1, ()),) * len(group)
        if position < len(self._groups) - 1:
            return RequestOutput(request.request_id, group, logprobs=logprobs)
        if self._stops:
            return RequestOutput(request.request_id, group, FinishReason.STOP, stop_token_id=50, logprobs=logprobs)
        return RequestOutput(request.request_id, group, FinishReason.LENGTH, logprobs=logprobs)

    def abort(self, request_id: str) -> None:
        raise AssertionError(f"{request_id} is ended by closing its stream")

    def is_alive(self) -> bool:
        return True

    def plan_report(self) -> dict[str, Any]:
        return {}


def _whole(answer: ChatAnswer, runner: SequenceRunner) -> dict[str, Any]:
    """Choice and usage of the answer, the calls without their random ids."""
    document = json.loads(asyncio.run(answer.whole(runner)))
    (choice,) = document["choices"]
    for call in choice["message"].get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return {**choice, "usage": document["usage"]}


async def _events(answer: ChatAnswer, runner: SequenceRunner) -> list[dict[str, Any]]:
    sent = await streamed_events(answer, runner)
    return [json.loads(event.removeprefix(b"data: ")) for event in sent.split(b"\n\n")[:-1]]


def _streamed(answer: ChatAnswer, runner: SequenceRunner) -> dict[str, Any]:
    """The same, put together from the stream; no field of a delta is empty."""
    *events, last = asyncio.run(_events(answer, runner))
    message: dict[str, Any] = {}
    logprobs: list[Any] = []
    for position, event in enumerate(events):
        (choice,) = event["choices"]
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                _add_calls(message.setdefault(name, []), value)
            else:
                assert value or position == 0 or choice["logprobs"]
                message[name] = message.get(name, "") + value
    message["tool_calls"] = [call for call in message.get("tool_calls", []) if _is_json(call["function"]["arguments"])]
    if not message["tool_calls"]:  # a call that was cut or malformed leaves arguments that are no JSON
        del message["tool_calls"]
    if message["content"] == "" and "tool_calls" in message:
        message["content"] = None
    return {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None},
        "finish_reason": events[-1]["choices"][0]["finish_reason"],
        "stop_reason": events[-1]["choices"][0]["stop_reason"],
        "usage": last["usage"],
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _add_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        if delta["index"] == len(calls):
            assert delta["id"].startswith("call_")
            calls.append({"type": delta["type"], "function": delta["function"]})
        else:
            assert delta["index"] == len(calls) - 1
            assert set(delta) == {"index", "function"}
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


@given(
    said=SAID,
    cuts=st.lists(st.integers(0, 120), max_size=12),
    wakes=st.lists(st.integers(0, 120), max_size=12),
    stops=st.booleans(),
    options=st.fixed_dictionaries(
        {}, optional={"tools": st.just(TOOLS), "parallel_tool_calls": st.just(False), "stop": st.just(["END", "m\n"])}
    ),
)
def test_every_grouping_of_the_tokens_says_the_same(
    said: list[int], cuts: list[int], wakes: list[int], stops: bool, options: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "logprobs": True} | options

    def runner(cuts: Sequence[int], wakes: Sequence[int] = range(1000)) -> SequenceRunner:
        return SequenceRunner(ScriptedEngine(said, cuts, wakes=wakes, stops=stops), TEXT.vocabulary, METRICS)

    def answer(**fields: Any) -> ChatAnswer:
        request = ChatCompletionRequest.model_validate(body | fields)
        return ChatAnswer(request, MODEL, max_model_len=4096)

    whole = _whole(answer(), runner([]))
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    assert _whole(answer(), runner(cuts)) == whole
    assert _streamed(answer(**streaming), runner(cuts)) == whole
    assert _streamed(answer(**streaming), runner(range(len(said) + 1))) == whole
    assert _streamed(answer(**streaming), runner(range(len(said) + 1), wakes)) == whole
    assert _whole(answer(), runner(range(len(said) + 1), wakes)) == whole
    message = whole["message"]
    assert not any(name in json.dumps(message, ensure_ascii=False) for name in SPECIAL_TOKENS.values())
    assert whole["finish_reason"] == ("tool_calls" if message.get("tool_calls") and stops else whole["finish_reason"])
    assert len(whole["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
