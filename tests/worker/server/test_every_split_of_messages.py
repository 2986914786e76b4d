"""However the tokens of an answer are grouped on their way, a message of Anthropic's API says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from every_split import MAX_MODEL_LEN, Asked, fields_of, fixtures_of, named_events, said_at_every_split

from modelserve_worker.server.anthropic.answer import MessagesAnswer
from modelserve_worker.server.anthropic.request import MessagesRequest

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools]


_ASKED: Asked = {
    "tools": lambda tools: {"tools": _tools(tools)},
    "parallel_tool_calls": lambda several: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not several}},
    "response_format": lambda form: {
        "output_config": {"format": {"type": form["type"], "schema": form["json_schema"]["schema"]}}
    },
    "stop": lambda texts: {"stop_sequences": texts},
    "max_tokens": lambda most: {"max_tokens": most},
}


def _said(message: dict[str, Any]) -> dict[str, Any]:
    """What of a whole message a client goes by: all but made-up ids."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": None, "content": blocks}


def _told(encoded: bytes) -> dict[str, Any]:
    """The same, put together from events as clients do it; the input of what is no call stays text."""
    events = named_events(encoded)
    start, *between, end, stop = events
    assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    return _said({**message, **end["delta"], "usage": end["usage"], "content": _blocks(between)})


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    done, said = 0, ""
    for event in events:
        if event["type"] == "content_block_start":
            assert done == len(blocks), "one block at a time"
            blocks.append(event["content_block"])
            said = ""
        assert event["index"] == len(blocks) - 1 == done
        block = blocks[-1]
        kind, name = _DELTAS[block["type"]]
        if event["type"] == "content_block_delta":
            assert event["delta"]["type"] == kind
            said += event["delta"][name]
        elif event["type"] == "content_block_stop":
            block["input" if block["type"] == "tool_use" else name] = _input(said) if "input" in block else said
            done += 1
    assert done == len(blocks), "every block ends"
    return blocks


def _input(said: str) -> Any:
    try:
        return json.loads(said)
    except ValueError:
        return said


@pytest.mark.parametrize("name", fixtures_of(_ASKED))
def test_a_message_says_the_same_at_every_split(served_model, name) -> None:
    fields = {"max_tokens": 1024} | fields_of(name, _ASKED)

    def answer(stream: bool) -> MessagesAnswer:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}
        return MessagesAnswer(MessagesRequest.model_validate(body), served_model, max_model_len=MAX_MODEL_LEN)

    expected, begun = said_at_every_split(name, served_model, answer, said=_said, told=_told)
    assert any(block.get("text") or block.get("thinking") or block.get("input") for block in begun["content"])
    assert begun["stop_reason"] == expected["stop_reason"]
