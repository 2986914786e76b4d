"""An answer cut at every token is a valid message in every API, whole and streamed, and tells nothing of a cut call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

SAYS = (
    "<|channel>thought\né.<channel|>🚀:"
    '<|tool_call>call:get_time{c:<|"|>Oé<|"|>,t:[1,{x:true}]}<tool_call|>'
    "<|tool_call>call:f{}<tool_call|><|tool_response>"
)
ARGUMENTS: list[dict[str, Any]] = [{"c": "Oé", "t": [1, {"x": True}]}, {}]
TOOL = {"name": "get_time", "description": "The time"}
ASK = [{"role": "user", "content": "When?"}]


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    server.engine.max_model_len = 4096
    server.engine.reply = list(server.state.model.text.encoder.encode(SAYS, add_special_tokens=False, most_tokens=4096))
    with httpx.Client(base_url=server.url) as client:
        yield client


def _post(http: httpx.Client, route: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole = http.post(route, json={"model": "tiny", **body})
    assert whole.status_code == 200, whole.text
    stream = http.post(route, json={"model": "tiny", "stream": True, **body})
    events = [json.loads(line[6:]) for line in stream.text.split("\n") if line.startswith("data: {")]
    return whole.json(), events


def _require_beginning(thought: str, content: str, calls: list[dict[str, Any]]) -> None:
    assert "é.".startswith(thought.rstrip("\ufffd"))
    assert "🚀:".startswith(content.rstrip("\ufffd"))
    assert calls == ARGUMENTS[: len(calls)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_chat_completions(server: Any, http: httpx.Client) -> None:
    body = {"messages": ASK, "tools": [{"type": "function", "function": TOOL}]}
    for length in range(1, len(server.engine.reply) + 1):
        whole, events = _post(http, "/v1/chat/completions", body | {"max_tokens": length})
        (choice,) = whole["choices"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
        given = [json.loads(call["function"]["arguments"]) for call in calls]
        _require_beginning(message.get("reasoning", ""), message["content"] or "", given)
        complete = length == len(server.engine.reply)
        assert choice["finish_reason"] == ("tool_calls" if complete else "length")

        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
        assert "".join(delta.get("reasoning", "") for delta in deltas) == message.get("reasoning", "")
        streamed: dict[int, str] = {}
        for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
            streamed[call["index"]] = streamed.get(call["index"], "") + call["function"]["arguments"]
        assert [json.loads(text) for text in streamed.values() if _is_json(text)] == given
        assert len(streamed) <= len(given) + (not complete)
        assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]

        if length % 7 and not complete:
            continue
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "8:00"} for call in calls]
        again = http.post("/v1/chat/completions", json={"model": "tiny", **body, "messages": [*ASK, message, *results]})
        assert again.status_code == 200, again.text


def test_responses(server: Any, http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": "When?", "tools": [{"type": "function", **TOOL}]}
    for length in range(1, len(server.engine.reply) + 1):
        whole, events = _post(http, "/v1/responses", body | {"max_output_tokens": length})
        complete = length == len(server.engine.reply)
        assert whole["status"] == ("completed" if complete else "incomplete")
        by_kind: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in whole["output"]:
            by_kind[item["type"]].append(item)
        calls = [json.loads(call["arguments"]) for call in by_kind["function_call"]]
        said = ["".join(i["content"][0]["text"] for i in by_kind[kind]) for kind in ("reasoning", "message")]
        _require_beginning(said[0], said[1], calls)

        last = events[-1]
        assert last["type"] == f"response.{whole['status']}"
        kept = [item for item in last["response"]["output"] if item["type"] != "function_call" or _complete(item)]
        assert [_told(item) for item in kept] == [_told(item) for item in whole["output"]]
        if length % 7 and not complete:
            continue
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "8:00"}
            for call in by_kind["function_call"]
        ]
        history = [{"role": "user", "content": "When?"}, *whole["output"], *results]
        again = http.post("/v1/responses", json={"model": "tiny", **body, "input": history})
        assert again.status_code == 200, again.text


def _complete(item: dict[str, Any]) -> bool:
    assert (item["status"] == "completed") == _is_json(item["arguments"])
    return bool(item["status"] == "completed")


def _told(item: dict[str, Any]) -> tuple[Any, ...]:
    return item["type"], item.get("arguments"), [part["text"] for part in item.get("content", [])]


def test_anthropic_messages(server: Any, http: httpx.Client) -> None:
    body = {"messages": ASK, "tools": [{**TOOL, "input_schema": {"type": "object"}}]}
    for length in range(1, len(server.engine.reply) + 1):
        whole, events = _post(http, "/v1/messages", body | {"max_tokens": length})
        complete = length == len(server.engine.reply)
        assert whole["stop_reason"] == ("tool_use" if complete else "max_tokens")
        texts = {"thinking": "", "text": ""}
        for block in whole["content"]:
            if block["type"] in texts:
                texts[block["type"]] += block[block["type"]]
        calls = [block for block in whole["content"] if block["type"] == "tool_use"]
        _require_beginning(texts["thinking"], texts["text"], [call["input"] for call in calls])

        assert [event["type"] for event in events[:1] + events[-2:]] == [
            "message_start",
            "message_delta",
            "message_stop",
        ]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        for kind, text in texts.items():
            assert "".join(delta.get(kind, "") for delta in deltas) == text
        begun = [event for event in events if event["type"] == "content_block_start"]
        ended = [event for event in events if event["type"] == "content_block_stop"]
        assert [event["index"] for event in begun] == [event["index"] for event in ended] == list(range(len(begun)))

        if length % 7 and not complete:
            continue
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "8:00"} for call in calls]
        history = [
            *ASK,
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": results or "?"},
        ]
        again = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 8, **body, "messages": history})
        assert again.status_code == 200, again.text


def test_completions(server: Any, http: httpx.Client) -> None:
    """Plain text: markers are not shown, and nothing is read into them."""
    plain = server.state.model.text.tokenizer.decode(server.engine.reply, skip_special_tokens=True)
    for length in range(1, len(server.engine.reply) + 1):
        whole, events = _post(http, "/v1/completions", {"prompt": "x", "max_tokens": length})
        (choice,) = whole["choices"]
        assert plain.startswith(choice["text"].rstrip("\ufffd"))
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
