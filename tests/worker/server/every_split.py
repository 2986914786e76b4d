"""Answers to read at every split of their tokens, and the engine that sends them so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from modelserve_tools.tiny.tokenizer_files import build_tokenizer
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import FinishReason, Request, RequestOutput
from modelserve_worker.server.answers.sequences import SequenceRunner
from modelserve_worker.server.inference import Answer
from modelserve_worker.server.state import ServedModel

Steps = Sequence[Sequence[Sequence[int]]]
TURN_END = 106
MAX_MODEL_LEN = 4096
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<|tool_call>call:weather{city:<|"|>Pa"ris\n<|"|>,at:{x:[1,-2.5e3,true]},é:null}<tool_call|>'
OBJECT = {"type": "json_schema", "json_schema": {"name": "object", "schema": {"type": "object"}}}
_TOKENIZER = build_tokenizer()
_METRICS = WorkerMetrics("tiny")


def _token_ids(text: str) -> list[int]:
    return list(_TOKENIZER.encode(text, add_special_tokens=False).ids)


def _cut(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """An answer that `max_tokens` cuts behind this text."""
    return text, {"max_tokens": len(_token_ids(text)), **fields}


# By name, what the model writes and the fields of the chat completion that it answers.
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Grüße, 世界 🎉!", {}),
    "a thought": ("<|channel>thought\nhm, 🤔\n<channel|>Yes.", {}),
    "a label alone": ("<|channel>thought<channel|>Yes.", {}),
    "a label that is none": ("<|channel>thoughtful<channel|>Yes.", {}),
    "thoughts and texts": ("a<|channel>thought\nb<channel|><|channel>thought\nc<channel|>d", {}),
    "a thought alone": ("<|channel>thought\nhm<channel|>", {}),
    "a call": (CALL, {"tools": [TOOL]}),
    "thought, text, two calls": (f"<|channel>thought\na<channel|>Look: {CALL}{CALL}", {"tools": [TOOL]}),
    "one call alone": (f"{CALL}{CALL} more", {"tools": [TOOL], "parallel_tool_calls": False}),
    "a malformed call": ("<|tool_call>call:weather{city:Paris}<tool_call|>!", {"tools": [TOOL]}),
    "a call without its brace": ("<|tool_call>:weather{a:1}<tool_call|>", {"tools": [TOOL]}),
    "a call that is cut": ('a<|tool_call>call:weather{city:<|"|>Par', {"tools": [TOOL]}),
    "a call without tools": (CALL, {}),
    "a document": ('{"a": [1, "é"], "b": {"c": "\\u00e9"}}', {"response_format": OBJECT}),
    "a stop string": ("one two STOP three", {"stop": ["STOP"]}),
    "stop strings that overlap": ("aaabaabab end", {"stop": ["aabab", "abax"]}),
    "a stop string in the answer": ("say ENDING", {"stop": ["END"], "include_stop_str_in_output": True}),
    "a stop string in a thought": ("<|channel>thought\na STOP b<channel|>c", {"stop": ["STOP"]}),
    "half of a stop string": ("wait, STO", {"stop": ["STOP"]}),
    "a loop": ("go " + "round " * 8, {"repetition_detection": {"max_pattern_size": 6, "min_count": 3}}),
    "text that its length cuts": _cut("Grüße, 世"),
    "a thought that its length cuts": _cut("<|channel>thought\nhm, 🤔"),
    "a call that its length cuts": _cut(f'Look: {CALL}<|tool_call>call:weather{{city:<|"|>Par', tools=[TOOL]),
}
# Streams begin these as calls before anyone can know that they are none.
NO_CALLS = {"a call that is cut", "a malformed call", "a call without its brace", "a call that its length cuts"}


Asked = Mapping[str, Callable[[Any], dict[str, Any]]]  # fields of a chat completion, as another API is sent them


def fixtures_of(asked: Asked) -> list[str]:
    """Names of the fixtures that an API can ask for."""
    return [name for name, (_, fields) in FIXTURES.items() if fields.keys() <= asked.keys()]


def fields_of(name: str, asked: Asked) -> dict[str, Any]:
    """The fields of a fixture as that API is sent them."""
    fields: dict[str, Any] = {}
    for field, value in FIXTURES[name][1].items():
        fields |= asked[field](value)
    return fields


def named_events(encoded: bytes) -> list[dict[str, Any]]:
    """Server-sent events whose names are asserted to be their documents' types."""
    lines = [event.split("\n") for event in encoded.decode().split("\n\n") if event]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in events]
    return events


class _Grouped:
    """An engine that answers with these steps, each of them outputs, each of them tokens."""

    max_model_len = MAX_MODEL_LEN

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def generate(
        self,
        requests: Sequence[Request],
        *,
        client: str = "",
    ) -> AsyncGenerator[list[RequestOutput], None]:
        (request,) = requests
        for number, step in enumerate(self._steps, start=1):
            outputs = [RequestOutput(request.request_id, tuple(tokens)) for tokens in step]
            if number == len(self._steps):
                stopped = outputs[-1].token_ids[-1] == TURN_END
                reason, end = (FinishReason.STOP, TURN_END) if stopped else (FinishReason.LENGTH, None)
                outputs[-1] = outputs[-1]._replace(finish_reason=reason, stop_token_id=end)
            yield outputs

    def abort(self, request_id: str) -> None: ...


async def streamed_events(answer: Answer, runner: SequenceRunner) -> bytes:
    """All events of an answer."""
    events = b"".join([await answer.events(replies) async for replies in runner.stream(answer.specs)])
    return events + answer.last_events()


def _groupings(tokens: Sequence[int]) -> Iterator[Steps]:
    """All at once, in two, in pieces of one length, and singly with several of them in a step."""
    yield [[tokens]]
    for at in range(1, len(tokens)):
        yield [[tokens[:at]], [tokens[at:]]]
    for size in range(1, 9):
        for offset in range(size):
            cuts = [0, *range(offset or size, len(tokens), size), len(tokens)]
            yield [[tokens[begin:end]] for begin, end in pairwise(cuts) if begin < end]
    for several in (2, 3, len(tokens)):
        yield [[[token] for token in tokens[at : at + several]] for at in range(0, len(tokens), several)]


def said_at_every_split(
    name: str,
    served: ServedModel,
    make: Callable[[bool], Answer],
    *,
    said: Callable[[dict[str, Any]], dict[str, Any]],
    told: Callable[[bytes], dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the fixture's answer says whole (`said` of its document) and streamed (`told` of its events), each asserted
    to be the same at every split, and the one to be the other but for what is no call.

    `make(stream)` makes an answer.
    """
    text, fields = FIXTURES[name]
    tokens = _token_ids(text) if "max_tokens" in fields else [*_token_ids(text), TURN_END]

    def runner(steps: Steps) -> SequenceRunner:
        return SequenceRunner(_Grouped(steps), served.text.vocabulary, _METRICS)  # type: ignore[arg-type]

    async def whole(steps: Steps) -> dict[str, Any]:
        return said(json.loads(await make(False).whole(runner(steps))))

    async def streamed(steps: Steps) -> dict[str, Any]:
        return told(await streamed_events(make(True), runner(steps)))

    async def every_split() -> tuple[dict[str, Any], dict[str, Any]]:
        singly = [[[token]] for token in tokens]
        expected, begun = await whole(singly), await streamed(singly)
        for steps in _groupings(tokens):
            assert await whole(steps) == expected, steps
            assert await streamed(steps) == begun, steps
        return expected, begun

    expected, begun = asyncio.run(every_split())
    if name not in NO_CALLS:
        assert begun == expected
    return expected, begun
