"""However the tokens of an answer are grouped on their way, a response of the Responses API says the same."""

from __future__ import annotations

from typing import Any

import pytest
from every_split import MAX_MODEL_LEN, Asked, fields_of, fixtures_of, named_events, said_at_every_split

from modelserve_worker.server.responses.answer import ResponsesAnswer
from modelserve_worker.server.responses.request import ResponsesRequest

_TOLD_IN = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_ASKED: Asked = {
    "tools": lambda tools: {"tools": [{"type": "function", **tool["function"]} for tool in tools]},
    "parallel_tool_calls": lambda several: {"parallel_tool_calls": several},
    "response_format": lambda form: {"text": {"format": {"type": form["type"], **form["json_schema"]}}},
    "max_tokens": lambda most: {"max_output_tokens": most},
}


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    (part,) = item["content"]
    return str(part["text"])


def _said(response: dict[str, Any]) -> dict[str, Any]:
    """What of a whole response a client goes by: all but made-up ids and times."""
    made_up = {"id", "call_id"}
    items = [{name: value for name, value in item.items() if name not in made_up} for item in response["output"]]
    ends = {name: response[name] for name in ("status", "incomplete_details", "error", "usage")}
    return {"output": items, **ends}


def _told(encoded: bytes) -> dict[str, Any]:
    """The same of the last event's response, which the events before it put together as well."""
    events = named_events(encoded)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *between, end = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert end["type"] == f"response.{end['response']['status']}"
    assert created["response"]["id"] == end["response"]["id"]
    assert end["response"]["output"] == _items(between)
    return _said(end["response"])


def _items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    done, said = 0, ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert done == len(items), "one item at a time"
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            said = ""
        assert event["output_index"] == len(items) - 1 == done
        item = items[-1]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == f"{_TOLD_IN[item['type']]}.delta":
            said += event["delta"]
        elif kind == f"{_TOLD_IN[item['type']]}.done":
            assert event.get("text", event.get("arguments")) == said
        elif kind == "content_part.done":
            assert event["part"]["text"] == said
        elif kind == "output_item.done":
            assert _text(event["item"]) == said
            assert event["item"] == item | {name: event["item"][name] for name in ("status", "content", "arguments")
                                            if name in item}  # fmt: skip
            items[-1] = event["item"]
            done += 1
        else:
            assert kind in ("output_item.added", "content_part.added")
    assert done == len(items), "every item ends"
    return items


def _calls(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in said["output"] if item["type"] == "function_call" and item["status"] == "completed"]


@pytest.mark.parametrize("name", fixtures_of(_ASKED))
def test_a_response_says_the_same_at_every_split(served_model, name) -> None:
    def answer(stream: bool) -> ResponsesAnswer:
        body = {"model": "tiny", "input": "hi", "stream": stream, **fields_of(name, _ASKED)}
        return ResponsesAnswer(ResponsesRequest.model_validate(body), served_model, max_model_len=MAX_MODEL_LEN)

    expected, begun = said_at_every_split(name, served_model, answer, said=_said, told=_told)
    assert any(map(_text, expected["output"] or begun["output"])), "nothing is swallowed"
    assert _calls(begun) == _calls(expected), "what was none is incomplete"
    assert (begun["status"], begun["usage"]) == (expected["status"], expected["usage"])
