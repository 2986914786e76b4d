"""What ordinary clients send beside the API: ignored where it changes nothing, counted; --strict-fields refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import field_table
import httpx
import pytest
from pydantic import ValidationError

from modelserve_worker.server.answers.conversation import template_messages
from modelserve_worker.server.anthropic.request import MessagesRequest
from modelserve_worker.server.bodies import field_policy
from modelserve_worker.server.bodies.field_policy import FieldPolicy
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.transcriptions.request import TranscriptionRequest, TranslationRequest

USER: dict[str, Any] = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [USER]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
TABLES = {
    "stream_options.": field_policy.STREAM_OPTIONS_FIELDS,
    "messages.": field_policy.MESSAGE_FIELDS,
    "messages.content.": field_policy.PART_FIELDS,
    "tool_calls.": field_policy.CALL_FIELDS,
    "tools.": field_policy.TOOL_FIELDS,
}
RESPONSES: dict[str, Any] = {"model": "tiny", "input": [USER]}
MESSAGES: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [USER]}
RECORDING: dict[str, Any] = {"model": "tiny", "file": b"x"}
OTHER_TABLES = {
    "input.": field_policy.INPUT_FIELDS,
    "reasoning.": field_policy.REASONING_FIELDS,
    "content.": field_policy.BLOCK_FIELDS,
    "thinking.": field_policy.THINKING_FIELDS,
}


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def _with(table: str, name: str, value: Any) -> dict[str, Any]:
    """A chat request with the field in an object that `table` is about."""
    if table == "stream_options.":
        return CHAT | {"stream": True, "stream_options": {name: value}}
    if table == "messages.":
        return CHAT | {"messages": [USER | {name: value}]}
    if table == "messages.content.":
        return CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", name: value}]}]}
    if table == "tools.":
        return CHAT | {"tools": [{"type": "function", "function": {"name": "f"}, name: value}]}
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}, name: value}
    return CHAT | {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


def _with_other(table: str, name: str, value: Any) -> tuple[Any, dict[str, Any]]:
    """The same of the requests that become chat requests."""
    if table == "input.":
        return ResponsesRequest, RESPONSES | {"input": [USER | {name: value}]}
    if table == "reasoning.":
        return ResponsesRequest, RESPONSES | {"reasoning": {name: value}}
    if table == "thinking.":
        return MessagesRequest, MESSAGES | {"thinking": {"type": "enabled", name: value}}
    block = {"type": "text", "text": "hi", name: value}
    return MessagesRequest, MESSAGES | {"messages": [{"role": "user", "content": [block]}]}


CASES = [
    (ChatCompletionRequest, CHAT | {name: value}, name)
    for name, ignored in field_policy.CHAT_FIELDS.items()
    for value in ignored.values or ("x", {"a": [1]}, True)
] + [
    (CompletionRequest, TEXT | {name: value}, name)
    for name, ignored in field_policy.COMPLETION_FIELDS.items()
    for value in ignored.values or ("x", {"a": [1]}, True)
] + [
    (ChatCompletionRequest, _with(table, name, value), table + name)
    for table, fields in TABLES.items()
    for name, ignored in fields.items()
    for value in ignored.values or ("x", {"a": [1]}, True)
] + [
    (body_type, body | {name: value}, name)
    for body_type, body, fields in (
        (ResponsesRequest, RESPONSES, field_policy.RESPONSES_FIELDS),
        (MessagesRequest, MESSAGES, field_policy.ANTHROPIC_FIELDS),
        (TranscriptionRequest, RECORDING, field_policy.TRANSCRIPTION_FIELDS),
    )
    for name, ignored in fields.items()
    for value in ignored.values or ("x", {"a": [1]}, True)
] + [
    (*_with_other(table, name, value), table + name)
    for table, fields in OTHER_TABLES.items()
    for name, ignored in fields.items()
    for value in ignored.values or ("x", {"a": [1]}, True)
]  # fmt: skip


PLAIN = {
    CompletionRequest: TEXT,
    ChatCompletionRequest: CHAT,
    ResponsesRequest: RESPONSES,
    MessagesRequest: MESSAGES,
    TranscriptionRequest: RECORDING,
    TranslationRequest: RECORDING,
}


@pytest.mark.parametrize(("body_type", "body", "field"), CASES)
def test_an_ignored_field_leaves_the_request_as_it_was_and_is_told(body_type: Any, body: Any, field: str) -> None:
    told: list[str] = []
    read = body_type.model_validate(body, context=FieldPolicy(on_ignored=lambda name, _: told.append(name)))
    assert told == [field]
    if "." not in field:
        assert read == body_type.model_validate(PLAIN[body_type])
    with pytest.raises(ValidationError):
        body_type.model_validate(body, context=FieldPolicy(strict=True))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (TEXT | {"best_of": 2}, "best_of"),
        (TEXT | {"use_beam_search": True}, "use_beam_search"),
        (TEXT | {"suffix": "x"}, "suffix"),
        (TEXT | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (TEXT | {"length_penalty": 0.5}, "length_penalty"),
        (CHAT | {"echo": True}, "echo"),
        (CHAT | {"verbosity": "low"}, "verbosity"),
        (CHAT | {"web_search_options": {}}, "web_search_options"),
        (CHAT | {"bad_words": ["x"]}, "bad_words"),
        (CHAT | {"include_reasoning": False}, "include_reasoning"),
        (CHAT | {"messages": [USER | {"prefix": True}]}, "messages.0.prefix"),
        (CHAT | {"messages": [USER | {"refusal": "no"}]}, "messages.0.refusal"),
        (CHAT | {"temprature": 1}, "temprature"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/completions" if "prompt" in body else "/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_field")


def test_ignored_fields_are_counted_and_named_once_in_the_log(
    server: Any, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "modelserve_worker.server.bodies.ignored_fields")
    for _ in range(3):
        assert http.post("/v1/chat/completions", json=CHAT | {"store": True}).status_code == 200
    labels = {"model_name": "tiny", "field": "store"}
    assert server.metrics.registry.get_sample_value("modelserve_ignored_fields_total", labels) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "clients send the field 'store', which is ignored: nothing is stored here, whatever it says"
    ]


def _template_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(ChatCompletionRequest.model_validate(CHAT | {"messages": list(messages)}).messages)


def test_late_and_several_system_messages_are_one_at_the_beginning() -> None:
    first, late = {"role": "system", "content": "a"}, {"role": "developer", "content": [{"type": "text", "text": "b"}]}
    answer = {"role": "assistant", "content": "x"}
    assert _template_messages(first, USER, answer, late, USER) == [
        {"role": "system", "content": "a\n\nb"}, USER, answer, USER,
    ]  # fmt: skip
    assert _template_messages(USER, late) == [{"role": "developer", "content": "b"}, USER]
    assert _template_messages(first, USER) == [first, USER]


def test_assistants_and_tools_may_say_nothing(http: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = CHAT | {
        "messages": [
            USER,
            {"role": "assistant", "content": None},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": None},
        ]
    }
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert "None" not in response.json()["choices"][0]["message"]["content"]


def test_no_alternatives_are_no_question(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json=CHAT | {"top_logprobs": 0}).status_code == 200


def test_the_page_says_what_becomes_of_every_field() -> None:
    assert field_table.PAGE.read_text() == field_table.page(), "run python tests/clients/field_table.py"


@pytest.mark.parametrize("route", field_table.ROUTES)
def test_every_public_field_is_taken_ignored_or_refused_with_a_reason(route: str) -> None:
    model, public = field_table.ROUTES[route]
    assert field_table.undocumented(model, public) == set()
    assert field_table.undocumented(model, public | {"new_field"}) == {"new_field"}


@pytest.mark.parametrize("route", field_table.ROUTES)
def test_what_the_page_calls_refused_is_refused_with_that_reason(server: Any, http: httpx.Client, route: str) -> None:
    model, public = field_table.ROUTES[route]
    refused = sorted(public - field_table.taken(model).keys() - model.ignored.keys())
    assert refused
    for name in refused:
        if issubclass(model, TranscriptionRequest):
            answer = http.post(route, data={"model": "tiny", name: "x"}, files={"file": b"x"})
        else:
            answer = http.post(route, json=PLAIN[model] | {name: "x"})
        assert answer.status_code == 400
        assert field_table.REFUSED_FIELDS[name] in answer.json()["error"]["message"]
