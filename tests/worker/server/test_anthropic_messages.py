"""/v1/messages in the shapes of Anthropic's API: blocks in and out, its events, its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelserve_worker.server.anthropic.request import MessagesRequest
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest

CALL = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
SAYS = f"<|channel>thought\nI should look.<channel|>Wait.{CALL}<|tool_response>"
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 200,
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "How warm is Paris?"}],
    "tools": [
        {
            "name": "weather",
            "description": "The weather",
            "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        }
    ],
}


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    server.engine.max_model_len = 4096
    with httpx.Client(base_url=server.url) as client:
        yield client


def _ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/messages", json=ASK | fields)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def _events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/messages", json=ASK | fields | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in events]
    return events


def test_blocks_come_and_go_back_as_they_came(server: Any, http: httpx.Client) -> None:
    count = server.says(SAYS)
    answer = _ask(http, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "I should look.", "signature": ""}
    assert text == {"type": "text", "text": "Wait."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Paris", "days": 2})
    assert (answer["role"], answer["stop_reason"], answer["stop_sequence"]) == ("assistant", "tool_use", None)
    before = server.prompt()
    assert before.startswith("<bos><|turn>system\n<|think|>\nBe short.<|tool>declaration:weather{")
    tokens = len(server.engine.requests[-1].prompt_token_ids)
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (tokens, count)
    counted = http.post(
        "/v1/messages/count_tokens",
        json={k: v for k, v in ASK.items() if k != "max_tokens"} | {"thinking": {"type": "adaptive"}},
    )
    assert counted.json() == {"input_tokens": tokens}

    server.says("21 °C.<turn|>")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "21"}]}
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    again = _ask(http, thinking={"type": "enabled", "budget_tokens": 1024}, messages=history)
    assert (again["content"], again["stop_reason"]) == ([{"type": "text", "text": "21 °C."}], "end_turn")
    response = '<|tool_response>response:weather{value:<|"|>21<|"|>}<tool_response|>'
    assert server.prompt() == f"{before}<|channel>thought\nI should look.<channel|>Wait.{CALL}{response}"


def test_the_events_of_a_stream_put_the_same_message_together(server: Any, http: httpx.Client) -> None:
    server.says(SAYS)
    first, *events, end, stop = _events(http)
    assert (first["type"], first["message"]["content"], stop) == ("message_start", [], {"type": "message_stop"})
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"said": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            blocks[-1]["said"] += event["delta"][kind[event["delta"]["type"]]]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    whole = _ask(http)
    thought, text, call = whole["content"]
    assert [block["said"] for block in blocks] == [thought["thinking"], text["text"], json.dumps(call["input"])]
    assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in events) > 8
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


def test_how_an_answer_ended(server: Any, http: httpx.Client) -> None:
    server.says(SAYS)
    cut = _ask(http, max_tokens=50)
    assert (cut["stop_reason"], [block["type"] for block in cut["content"]]) == ("max_tokens", ["thinking", "text"])
    stopped = _ask(http, stop_sequences=["it"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "it")
    assert stopped["content"][-1] == {"type": "text", "text": "Wa"}
    server.says(f"{CALL}{CALL}<|tool_response>")
    assert len(_ask(http)["content"]) == 2
    alone = _ask(http, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(alone["content"]) == 1
    assert "declaration" not in (_ask(http, tool_choice={"type": "none"}) and server.prompt())


def test_a_last_message_of_the_assistant_is_continued(server: Any, http: httpx.Client) -> None:
    server.says("21.<turn|>")
    begun = [*ASK["messages"], {"role": "assistant", "content": "In degrees it is "}]
    assert _ask(http, messages=begun, tools=[])["content"] == [{"type": "text", "text": "21."}]
    assert server.prompt().endswith("<|turn>model\nIn degrees it is ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "field 'max_tokens' is required"),
        ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1, not 1.5"),
        (
            {"messages": [{"role": "system", "content": "x"}]},
            "messages.0: role 'system' is not supported; the system prompt is the field system of the request",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "this server reads text only; plan images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages.0.user.content.0: type 'tool_use' is not supported; known here: 'text', 'image', 'tool_result'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "as the chat completion that this request stands for: messages.1.tool_call_id",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"container": "x"}, "field 'container' is not supported"),
    ],
)
def test_refusals_are_in_its_shape(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/messages", json=ASK | fields)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in body["error"]["message"]


def test_failures_are_in_its_shape(server: Any, http: httpx.Client) -> None:
    unknown = http.post("/v1/messages", json=ASK | {"model": "big"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    server.engine.fail_after = 3
    assert http.post("/v1/messages", json=ASK).json()["error"]["type"] == "api_error"
    *_, last = _events(http)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "overheated" in last["error"]["message"]


SCHEMA = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}


def test_a_format_is_a_response_format(server: Any, http: httpx.Client) -> None:
    """`messages.parse` of Anthropic's SDK asks so."""
    server.says('{"warm": true}<turn|>')
    answer = _ask(http, tools=[], output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert answer["content"] == [{"type": "text", "text": '{"warm": true}'}]
    asked = MessagesRequest.model_validate(
        ASK | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    )
    chat = ChatCompletionRequest.model_validate(
        {
            "model": "tiny",
            "messages": ASK["messages"],
            "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}},
        }
    )
    assert asked.chat().response_format == chat.response_format
    assert server.engine.requests[-1].grammar is not None
    counted = http.post(
        "/v1/messages/count_tokens",
        json={k: v for k, v in ASK.items() if k != "max_tokens"}
        | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"}},
    )
    assert counted.status_code == 200


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"output_config": {"effort": "low"}}, None),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "xhigh"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "none"),
        ({"output_config": {"effort": None, "format": None}, "thinking": {"type": "adaptive"}}, "medium"),
        ({"output_config": {}}, None),
    ],
)
def test_effort_says_how_hard_to_think_and_never_whether(fields: dict[str, Any], effort: str | None) -> None:
    """A client that asked for no thoughts does not look for any before its text."""
    assert MessagesRequest.model_validate(ASK | fields).chat().reasoning_effort == effort


@pytest.mark.parametrize("management", [{}, {"edits": []}])
def test_no_edits_of_the_context_ask_nothing(http: httpx.Client, management: dict[str, Any]) -> None:
    assert _ask(http, context_management=management)["type"] == "message"
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    refused = http.post("/v1/messages", json=ASK | {"context_management": edits})
    assert (refused.status_code, "context_management" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    "config",
    [
        {"effort": "huge"},
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema"}},
        {"format": {"type": "json_schema", "schema": {"type": "object", "minProperties": 3.5}}},
        {"length": 3},
    ],
)
def test_other_output_is_refused_by_name(http: httpx.Client, config: dict[str, Any]) -> None:
    refused = http.post("/v1/messages", json=ASK | {"output_config": config})
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
