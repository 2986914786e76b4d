"""However the tokens of an answer are grouped on their way, whole or streamed, it says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from every_split import FIXTURES, MAX_MODEL_LEN, said_at_every_split

from modelserve_worker.server.answers.chat import ChatAnswer
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest


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


def _told(events: bytes) -> dict[str, Any]:
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


@pytest.mark.parametrize("name", FIXTURES)
def test_an_answer_says_the_same_at_every_split(served_model, name) -> None:
    def answer(stream: bool) -> ChatAnswer:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream, **FIXTURES[name][1]}
        return ChatAnswer(ChatCompletionRequest.model_validate(body), served_model, max_model_len=MAX_MODEL_LEN)

    expected, begun = said_at_every_split(name, served_model, answer, said=_said, told=_told)
    assert expected["content"] or expected["reasoning"] or expected["calls"], "nothing is swallowed"
    assert begun["content"] == expected["content"]
