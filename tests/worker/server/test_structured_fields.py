"""Fields that constrain an answer, over HTTP: what the engine is asked, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from modelserve.errors import InvalidInput

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LONG = {"enum": ["x" * 70_000]}
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _top(server) -> str:
    """The rules of the answer that the engine was asked for last."""
    return json.loads(server.engine.requests[-1].grammar)["grammars"][0]["lark_grammar"]


def test_a_schema_reaches_the_engine_behind_the_thought_that_may_come(server, client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    client.chat.completions.create(model="tiny", messages=USER, response_format=form)
    assert "start: answer" in _top(server)
    client.chat.completions.create(model="tiny", messages=USER, response_format=form, reasoning_effort="high")
    assert "start: (<[100]> TEXT <[101]>)? answer" in _top(server)
    part = json.loads(server.engine.requests[-1].grammar)["grammars"][1]["json_schema"]
    assert part | SCHEMA == part


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "answer: call{1,}"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "answer: call{1,1}"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "answer: call{1,1}"),
        ({}, "answer: TEXT call{0,}"),
    ],
)
def test_calls_are_forced_or_held_to_their_schema(server, client, fields, words) -> None:
    client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL], **fields)
    assert words in _top(server)
    assert 'call: <[48]> "call:" ("f" r' in _top(server)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"tools": [TOOL], "tool_choice": "none"},
     {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}],
)  # fmt: skip
def test_what_asks_for_nothing_constrains_nothing(server, client, fields) -> None:
    client.chat.completions.create(model="tiny", messages=USER, **fields)
    assert server.engine.requests[-1].grammar is None


def test_every_form_of_structured_outputs_is_taken_in_both_endpoints(server, client) -> None:
    tag = {"structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
    forms: list[dict[str, Any]] = [
        {"json": SCHEMA}, {"json": json.dumps(SCHEMA)}, {"json_object": True}, {"regex": "a+"}, {"choice": ["a", "b"]},
        {"grammar": 'start: "a"'}, {"grammar": 'root ::= "a"'}, {"structural_tag": tag},
        {"structural_tag": json.dumps({"type": "structural_tag", **tag})},
    ]  # fmt: skip
    for form in forms:
        body = {"structured_outputs": form}
        client.chat.completions.create(model="tiny", messages=USER, extra_body=body)
        client.completions.create(model="tiny", prompt="hi", extra_body=body)
        assert all(request.grammar for request in server.engine.requests[-2:]), form


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format", 'the keywords "not" cannot be followed',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LONG}}},
            "response_format.json_schema.schema", "the limit is 65536",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}},
            "response_format.json_schema.schema", "no finite text matches it: '#' needs '#'",
        ),
        ({"structured_outputs": {"json": ENDLESS}}, "structured_outputs.json", "no finite text matches it"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": ENDLESS}}],
             "tool_choice": "required"},
            "tools.0.function.parameters", "no finite text matches it",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        (
            {"structured_outputs": {"choice": ["x" * 300 + str(number) for number in range(1000)]}},
            "structured_outputs.choice", "structured_outputs.choice: as a grammar it has",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
                "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}]},
            "tools.0.function.parameters", "uniqueItems",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_a_400_that_names_it(server, fields, param, words) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", "messages": USER, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]
    assert not server.engine.requests


def _failed(server) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    counts = [line for line in text.splitlines() if line.startswith("vllm:request_success_total") and '"error"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counts)


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
STRICT = {"name": "f", "strict": True, "parameters": SCHEMA}
GRAMMARS: list[tuple[str, dict[str, Any], str]] = [  # what asks for one, and the name of the field that does
    ("chat/completions", {"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ("chat/completions", {"response_format": FORMAT}, "response_format"),
    ("chat/completions", {"response_format": FORMAT, "tools": [TOOL]}, "response_format"),
    ("chat/completions", {"tools": [{"type": "function", "function": STRICT}]}, "tools"),
    ("completions", {"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ("completions", {"response_format": FORMAT}, "response_format"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format"),
    ("responses", {"tools": [{"type": "function", **STRICT}]}, "tools"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format"),
    ("messages", {"tools": [{"name": "f", "strict": True, "input_schema": SCHEMA}]}, "tools"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_exceeds_its_bounds_before_anything_is_sent_names_its_field(server, stream) -> None:
    server.engine.fail_after, server.engine.at_fault = 0, "grammar"
    failed = _failed(server)
    for route, fields, param in GRAMMARS:
        answer = httpx.post(f"{server.url}/v1/{route}", json=_body(route) | fields | {"stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"] == f"{param}: the answer's grammar exceeds its bounds", (route, fields)
        assert (error["type"], error.get("param", param)) == ("invalid_request_error", param)
    assert _failed(server) == failed + len(GRAMMARS)


def test_a_grammar_that_exceeds_its_bounds_later_ends_its_stream_with_an_error(server) -> None:
    server.engine.fail_after, server.engine.at_fault = 2, "grammar"
    failed = _failed(server)
    for route, fields, param in GRAMMARS:
        answer = httpx.post(f"{server.url}/v1/{route}", json=_body(route) | fields | {"stream": True})
        assert answer.status_code == 200
        *_, last = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
        document = json.loads(last)
        error = document["response"]["error"] if route == "responses" else document["error"]
        assert error["message"] == f"{param}: the answer's grammar exceeds its bounds", (route, fields)
        assert error.get("param", param) == param
        assert answer.text.endswith("data: [DONE]\n\n") == route.endswith("completions")
    assert _failed(server) == failed + len(GRAMMARS)


@pytest.mark.parametrize("field", ["grammar", "prompt"])
def test_a_refusal_of_the_engine_names_what_was_sent(server, field) -> None:
    server.engine.refusal = InvalidInput("it cannot be", field=field)
    body = _body("chat/completions") | {"response_format": FORMAT}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == {"grammar": "response_format"}.get(field, field)


def _body(route: str) -> dict[str, Any]:
    return {
        "chat/completions": {"model": "tiny", "messages": USER},
        "completions": {"model": "tiny", "prompt": "hi"},
        "responses": {"model": "tiny", "input": "hi"},
        "messages": {"model": "tiny", "messages": USER, "max_tokens": 8},
    }[route]
