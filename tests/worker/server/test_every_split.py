"""However the tokens of an answer are grouped on their way, whole or streamed, it says the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import FinishReason, Request, RequestOutput
from modelserve_worker.server.chat import ChatAnswer
from modelserve_worker.server.protocol import ChatCompletionRequest
from modelserve_worker.server.sequences import SequenceRunner
from modelserve_worker.tiny.tokenizer_files import build_tokenizer

TURN_END = 106
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<|tool_call>call:weather{city:<|"|>Pa"ris\n<|"|>,at:{x:[1,-2.5e3,true]},é:null}<tool_call|>'
TOKENIZER = build_tokenizer()
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Grüße, 世界 🎉!", {}),
    "a thought": ("<|channel>thought\nhm, 🤔\n<channel|>Yes.", {}),
    "a label alone": ("<|channel>thought<channel|>Yes.", {}),
    "a label that is none": ("<|channel>thoughtful<channel|>Yes.", {}),
    "a call": (CALL, {"tools": [TOOL]}),
    "thought, text, two calls": (f"<|channel>thought\na<channel|>Look: {CALL}{CALL}", {"tools": [TOOL]}),
    "one call alone": (f"{CALL}{CALL} more", {"tools": [TOOL], "parallel_tool_calls": False}),
    "a malformed call": ("<|tool_call>call:weather{city:Paris}<tool_call|>!", {"tools": [TOOL]}),
    "a call without its brace": ("<|tool_call>:weather{a:1}<tool_call|>", {"tools": [TOOL]}),
    "a call that is cut": ('a<|tool_call>call:weather{city:<|"|>Par', {"tools": [TOOL]}),
    "a call without tools": (CALL, {}),
    "a document": ('{"a": [1, "é"], "b": {"c": "\\u00e9"}}', {"response_format": {"type": "json_object"}}),
    "a stop string": ("one two STOP three", {"stop": ["STOP"]}),
    "stop strings that overlap": ("aaabaabab end", {"stop": ["aabab", "abax"]}),
    "a stop string in the answer": ("say ENDING", {"stop": ["END"], "include_stop_str_in_output": True}),
    "a stop string in a thought": ("<|channel>thought\na STOP b<channel|>c", {"stop": ["STOP"]}),
    "half of a stop string": ("wait, STO", {"stop": ["STOP"]}),
    "a loop": ("go " + "round " * 8, {"repetition_detection": {"max_pattern_size": 6, "min_count": 3}}),
}


class _Grouped:
    """An engine that answers with these groups of tokens."""

    max_model_len = 4096

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups

    async def generate(
        self,
        requests: Sequence[Request],
        *,
        client: str = "",
    ) -> AsyncGenerator[list[RequestOutput], None]:
        (request,) = requests
        for number, group in enumerate(self._groups, start=1):
            last = number == len(self._groups)
            ends = {"finish_reason": FinishReason.STOP, "stop_token_id": TURN_END} if last else {}
            yield [RequestOutput(request.request_id, tuple(group), **ends)]

    def abort(self, request_id: str) -> None: ...


def _groupings(tokens: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    yield [tokens[: len(tokens)]]
    for at in range(1, len(tokens)):
        yield [tokens[:at], tokens[at:]]
    for size in range(1, 9):
        for offset in range(size):
            cuts = [0, *range(offset or size, len(tokens), size), len(tokens)]
            yield [tokens[begin:end] for begin, end in pairwise(cuts) if begin < end]


def _runner(served: Any, groups: Sequence[Sequence[int]]) -> SequenceRunner:
    return SequenceRunner(_Grouped(groups), served.text.vocabulary, _METRICS)  # type: ignore[arg-type]


_METRICS = WorkerMetrics("tiny")


def _answer(served: Any, fields: dict[str, Any], *, stream: bool) -> ChatAnswer:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}
    return ChatAnswer(ChatCompletionRequest.model_validate(body), served, max_model_len=4096)


def _said(document: dict[str, Any]) -> dict[str, Any]:
    """What of a whole answer a client goes by: all but made-up ids."""
    (choice,) = document["choices"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "ends": (choice["finish_reason"], choice["stop_reason"]),
    }


def _streamed(events: bytes) -> dict[str, Any]:
    """The same, put together from deltas as clients do it: a call's name and id once, then its arguments."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ends": None}
    calls: dict[int, list[str]] = {}
    for event in events.decode().split("\n\n"):
        if not event:
            continue
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        said["content"] += delta.get("content") or ""
        said["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] not in calls, "a call begins once"
                assert call["type"] == "function"
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            said["ends"] = (choice["finish_reason"], choice["stop_reason"])
    assert list(calls) == list(range(len(calls)))
    said["calls"] = [tuple(call) for call in calls.values()]
    return said


async def _all(answer: ChatAnswer, runner: SequenceRunner) -> bytes:
    return b"".join([event async for event in answer.events(runner)])


def _tokens(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False).ids, TURN_END]


@pytest.mark.parametrize("name", FIXTURES)
def test_an_answer_says_the_same_at_every_split(served_model, name) -> None:
    text, fields = FIXTURES[name]
    tokens = _tokens(text)
    singly = [[token] for token in tokens]
    whole = _answer(served_model, fields, stream=False)
    expected = _said(json.loads(asyncio.run(whole.whole(_runner(served_model, singly)))))
    begun = _streamed(asyncio.run(_all(_answer(served_model, fields, stream=True), _runner(served_model, singly))))
    assert expected["content"] or expected["reasoning"] or expected["calls"], "nothing is swallowed"
    for groups in _groupings(tokens):
        answer = _answer(served_model, fields, stream=False)
        assert _said(json.loads(asyncio.run(answer.whole(_runner(served_model, groups))))) == expected, groups
        answer = _answer(served_model, fields, stream=True)
        assert _streamed(asyncio.run(_all(answer, _runner(served_model, groups)))) == begun, groups
    if name not in ("a call that is cut", "a malformed call", "a call without its brace"):  # begun, and no call
        assert begun == expected
    assert begun["content"] == expected["content"]
