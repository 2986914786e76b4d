"""/v1/responses through the stock `openai` client: items in, items out, the documented events, nothing kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

CALL = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
SAYS = f"<|channel>thought\nI should look.<channel|>Wait.{CALL}{CALL}<|tool_response>"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK: dict[str, Any] = {"model": "tiny", "input": "How warm is Paris?", "tools": [WEATHER]}


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    server.engine.max_model_len = 4096
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_thought_text_and_calls_are_items_and_go_back_as_they_came(server: Any, client: openai.OpenAI) -> None:
    count = server.says(SAYS)
    answer = client.responses.create(**ASK, instructions="Be short.", reasoning={"effort": "low"})
    thought, _, *calls = answer.output
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert thought.to_dict()["content"] == [{"type": "reasoning_text", "text": "I should look."}]
    assert (answer.output_text, answer.status, answer.to_dict()["store"]) == ("Wait.", "completed", False)
    assert [call.to_dict()["arguments"] for call in calls] == ['{"city": "Paris", "days": 2}'] * 2
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (count, 22)
    assert answer.usage.input_tokens == len(server.engine.requests[-1].prompt_token_ids)
    before = server.prompt()
    assert before.startswith("<bos><|turn>system\n<|think|>\nBe short.<|tool>declaration:weather{")
    assert before.endswith("<turn|>\n<|turn>user\nHow warm is Paris?<turn|>\n<|turn>model\n")

    server.says("21 °C.<turn|>")
    results = [{"type": "function_call_output", "call_id": call.to_dict()["call_id"], "output": "21"} for call in calls]
    history: Any = [{"role": "user", "content": ASK["input"]}, *(item.to_dict() for item in answer.output), *results]
    again = client.responses.create(
        **ASK | {"input": history}, instructions="Be short.", reasoning={"effort": "low"}, store=True
    )
    assert (again.output_text, again.to_dict()["store"]) == ("21 °C.", False)
    response = '<|tool_response>response:weather{value:<|"|>21<|"|>}<tool_response|>'
    thought_text = "<|channel>thought\nI should look.<channel|>"
    assert server.prompt() == f"{before}{thought_text}Wait.{CALL}{CALL}{response}{response}"


def test_the_events_of_a_stream_put_the_same_response_together(server: Any, client: openai.OpenAI) -> None:
    server.says(SAYS)
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    ]  # fmt: skip
    assert kinds.count("function_call_arguments.delta") > 10, "arguments come as they are written"
    whole = client.responses.create(**ASK)
    assert [_told(item) for item in final.output] == [_told(item) for item in whole.output]
    assert final.usage == whole.usage


def _told(item: Any) -> tuple[Any, ...]:
    parts = getattr(item, "content", None) or []
    return item.type, item.status, [part.text for part in parts], getattr(item, "arguments", None)


def test_an_answer_that_is_cut_says_so(server: Any, client: openai.OpenAI) -> None:
    server.says(SAYS)
    answer = client.responses.create(**ASK, max_output_tokens=50)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    *_, last = client.responses.create(**ASK, max_output_tokens=50, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output[-1].to_dict()["status"] == "incomplete"


def test_without_a_limit_an_answer_that_never_stops_ends_with_the_context(server: Any, client: openai.OpenAI) -> None:
    server.says("again and ")
    answer = client.responses.create(model="tiny", input="hi")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.total_tokens == server.engine.max_model_len


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps nothing between requests"),
        ({"conversation": "conv_1"}, "conversation", "keeps nothing between requests"),
        ({"prompt": {"id": "p"}}, "prompt", "stored prompts are not supported"),
        ({"background": True}, "background", "answers are not kept; use stream"),
        ({"top_logprobs": 3}, "top_logprobs", "a field of /v1/chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions has them"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "should be 'function'"),
        ({"input": []}, "input", "must have at least 1 items, not 0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "type 'item_reference' is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "messages.0.content.0", "this server reads text only; plan images",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
            "messages.0.tool_call_id", "as the chat completion that this request stands for: messages.0.tool_call_id",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "not 'much'"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.responses.create(**ASK | {"extra_body": fields})
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "\ud800"}},
        {"user": "\ud800"},
        {"text": {"format": {"type": "json_schema", "name": "x", "description": "\ud800", "schema": {}}}},
        {"tools": [WEATHER | {"parameters": {"description": "\ud800"}}], "tool_choice": "none"},
        {"metadata": {"a": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_could_not_be_repeated_in_the_answer_is_refused(server: Any, fields: dict[str, Any], stream: bool) -> None:
    content = json.dumps({"model": "tiny", "input": "hi", "stream": stream} | fields)
    answer = httpx.post(f"{server.url}/v1/responses", content=content, headers={"content-type": "application/json"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "half of a surrogate pair" in message or "nested more than 32 deep" in message


def test_a_failure_in_a_stream_is_an_event_and_its_end(server: Any, client: openai.OpenAI) -> None:
    server.engine.fail_after = 3
    *_, last = client.responses.create(**ASK, stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "overheated" in last.response.error.message
