"""Which tools the model may call: those a client allows, under any name that servers of tools give them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

ASK = [{"role": "user", "content": "What is there?"}]
NAMES = ["files/list", "mcp:now", "weather"]
CALL = "<|tool_call>call:mcp:now{}<tool_call|><|tool_response>"


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_named(name) for name in names]}}


CHAT: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [_tool(name) for name in NAMES]}


@pytest.mark.parametrize(("mode", "constrained"), [("auto", False), ("required", True)])
def test_the_model_knows_the_allowed_tools_alone(server: Any, mode: str, constrained: bool) -> None:
    server.engine.max_model_len = 2048
    server.says(CALL)
    items = {
        "model": "tiny",
        "input": ASK,
        "tools": [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "function", "name": name} for name in NAMES[:2]],
        },
    }
    with httpx.Client(base_url=server.url) as client:
        answer = client.post("/v1/chat/completions", json=CHAT | {"tool_choice": _allowed(mode, *NAMES[:2])})
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "mcp:now", "arguments": "{}"}
        prompts, grammars = [server.prompt()], [server.engine.requests[-1].grammar]
        response = client.post("/v1/responses", json=items)
        assert response.status_code == 200, response.text
        assert response.json()["tool_choice"] == items["tool_choice"]
        prompts.append(server.prompt())
        grammars.append(server.engine.requests[-1].grammar)
    for prompt, grammar in zip(prompts, grammars, strict=True):
        assert ["weather" in prompt, "files/list" in prompt, "mcp:now" in prompt] == [False, True, True]
        assert (grammar is not None) == constrained
        assert grammar is None or ("weather" not in grammar and "mcp:now" in grammar)


@pytest.mark.parametrize(
    ("choice", "param", "said"),
    [
        (_allowed("auto", "rain"), "tool_choice", "'rain', which is none of the tools"),
        (_allowed("always", "weather"), "tool_choice.allowed_tools.mode", "'auto' or 'required'"),
        (_allowed("auto"), "tool_choice.allowed_tools.tools", "at least 1 item"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "required"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(server: Any, choice: Any, param: str, said: str) -> None:
    error = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | {"tool_choice": choice}).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert said in error["message"]


def test_a_call_of_such_a_name_comes_back(server: Any) -> None:
    server.engine.max_model_len = 2048
    said = {"role": "assistant", "tool_calls": [{"id": "a"} | _named("files/list")]}
    said["tool_calls"][0]["function"]["arguments"] = "{}"  # type: ignore[index]
    messages = [*ASK, said, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | {"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200
    assert "<|tool_call>call:files/list{}<tool_call|>" in server.prompt()


def test_some_hundred_tools_are_offered(server: Any) -> None:
    server.engine.max_model_len = 1 << 16
    body = CHAT | {"tools": [_tool(f"tool{i}") for i in range(400)], "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
