"""Tools and thoughts through the stock `openai` client: declared, called, answered, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

ASK: list[Any] = [{"role": "user", "content": "How warm is Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
DECLARED = (
    '<|tool>declaration:weather{description:<|"|>The weather<|"|>,'
    'parameters:{properties:{city:{type:<|"|>STRING<|"|>}},required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)
THOUGHT = "<|channel>thought\nI should look.<channel|>"
CALL = '<|tool_call>call:weather{city:<|"|>Paris é<|"|>,days:2}<tool_call|>'
ARGUMENTS = {"city": "Paris é", "days": 2}


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    server.engine.max_model_len = 4096  # byte tokens are many
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_call_its_response_and_the_answer(server: Any, client: openai.OpenAI) -> None:
    count = server.says(f"{THOUGHT}{CALL}<|tool_response>")
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], reasoning_effort="low")
    assert server.prompt() == (
        f"<bos><|turn>system\n<|think|>\n{DECLARED}<turn|>\n<|turn>user\nHow warm is Paris?<turn|>\n<|turn>model\n"
    )
    (choice,) = answer.choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", None)
    assert message.to_dict()["reasoning_content"] == message.to_dict()["reasoning"] == "I should look."
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("thought\nI should look.")
    assert answer.usage.completion_tokens == count

    before = server.prompt()
    server.says("It is 21 °C.<turn|>")
    messages = [*ASK, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], reasoning_effort="low")
    # The turn goes on behind the tokens that the model wrote, unchanged.
    assert (
        server.prompt()
        == f'{before}{THOUGHT}{CALL}<|tool_response>response:weather{{value:<|"|>21<|"|>}}<tool_response|>'
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is 21 °C.", "stop")
    assert "reasoning_content" not in answer.choices[0].message.to_dict()
    assert answer.choices[0].message.tool_calls is None


def test_a_stream_of_thought_content_and_calls(server: Any, client: openai.OpenAI) -> None:
    server.says(f"{THOUGHT}Wait.{CALL}{CALL}<|tool_response>")
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER], stream=True, stream_options={"include_usage": True}
        )
    )
    told: list[dict[str, Any]] = [chunk.choices[0].delta.to_dict() for chunk in chunks if chunk.choices]
    assert told[1] == {}, "a token that says nothing yet is seen, too"
    deltas = [delta for delta in told[:-1] if delta] + told[-1:]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:15] == [{"reasoning_content": letter, "reasoning": letter} for letter in "I should look."]
    assert deltas[15:20] == [{"content": letter} for letter in "Wait."]
    calls = [call for delta in deltas[20:-1] for call in delta["tool_calls"]]
    middle = len(calls) // 2
    assert calls[0]["id"] != calls[middle]["id"]
    for index, (head, *arguments) in enumerate((calls[:middle], calls[middle:])):
        assert (head["type"], head["function"]) == ("function", {"name": "weather", "arguments": ""})
        pieces = [piece["function"]["arguments"] for piece in arguments]
        assert arguments == [{"index": index, "function": {"arguments": piece}} for piece in pieces]
        assert pieces == ['{"city": "', *"Paris é", '"', ', "days": 2', "}"]
    assert deltas[-1] == {}
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len("thought\nI should look.")


def test_the_clients_own_accumulator_puts_a_stream_together(server: Any, client: openai.OpenAI) -> None:
    server.says(f"{THOUGHT}Wait.{CALL}<|tool_response>")
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=[WEATHER]) as stream:
        (choice,) = stream.get_final_completion().choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    assert choice.message.to_dict()["reasoning_content"] == "I should look."
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS


def test_log_probabilities_are_those_of_every_token(server: Any, client: openai.OpenAI) -> None:
    count = server.says(f"{THOUGHT}Wait.{CALL}<|tool_response>")
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "logprobs": True}
    whole = client.chat.completions.create(**ask).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == count
    chunks = client.chat.completions.create(**ask, stream=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert streamed == whole.content


def test_tool_choice_none_hides_the_tools(server: Any, client: openai.OpenAI) -> None:
    server.says(f"{CALL}<|tool_response>")
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], tool_choice="none")
    assert "declaration" not in server.prompt()
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("call:weather{city:Paris é,days:2}", "stop")
    assert choice.message.tool_calls is None
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], tool_choice="auto")
    assert DECLARED in server.prompt()
    assert answer.choices[0].finish_reason == "tool_calls"


def test_without_parallel_calls_the_first_one_ends_the_answer(server: Any, client: openai.OpenAI) -> None:
    server.says(f"Two.{CALL}{CALL}<|tool_response>")
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], parallel_tool_calls=False)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.to_dict()["stop_reason"]) == (
        "Two.",
        "tool_calls",
        None,
    )
    assert len(choice.message.tool_calls or []) == 1
    assert len(server.engine.aborted) == 1  # the second call is not computed


def test_what_is_no_call_is_text_and_ends_as_it_ended(server: Any, client: openai.OpenAI) -> None:
    def ask(reply: str, **options: Any) -> tuple[str | None, str, int]:
        server.says(reply)
        (choice,) = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], **options).choices
        return choice.message.content, choice.finish_reason, len(choice.message.tool_calls or [])

    assert ask("<|tool_call>call:weather{city:Paris}<tool_call|><|tool_response>") == (
        "call:weather{city:Paris}", "stop", 0,
    )  # fmt: skip
    assert ask(CALL, max_tokens=20) == ("", "length", 0), "the beginning of a call is no content"
    assert ask(CALL + CALL, max_tokens=60) == (None, "length", 1)
    assert ask(f"Well.{CALL}", max_tokens=20) == ("Well.", "length", 0)


def test_thoughts_nobody_asked_for_are_thoughts(server: Any, client: openai.OpenAI) -> None:
    server.says(f"{THOUGHT}Warm.<turn|>")
    answer = client.chat.completions.create(model="tiny", messages=ASK)
    assert answer.choices[0].message.content == "Warm."
    assert answer.choices[0].message.to_dict()["reasoning_content"] == "I should look."


def test_special_tokens_on_request_show_the_answer_as_it_is(server: Any, client: openai.OpenAI) -> None:
    server.says(f"{THOUGHT}{CALL}<|tool_response>")
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER], extra_body={"skip_special_tokens": False}
    )
    assert answer.choices[0].message.to_dict() == {"role": "assistant", "content": f"{THOUGHT}{CALL}"}
    assert answer.choices[0].finish_reason == "stop"


def test_stop_strings_end_thoughts_too(server: Any, client: openai.OpenAI) -> None:
    server.says(f"{THOUGHT}Warm.<turn|>")
    (choice,) = client.chat.completions.create(model="tiny", messages=ASK, stop="look").choices
    assert choice.message.to_dict() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should ",
        "reasoning": "I should ",
    }
    assert (choice.finish_reason, choice.to_dict()["stop_reason"]) == ("stop", "look")


@pytest.mark.parametrize(
    ("effort", "kwargs", "thinks"),
    [
        ("none", {}, False), ("minimal", {}, True), ("low", {}, True), ("medium", {}, True), ("high", {}, True),
        ("xhigh", {}, True), ("high", {"enable_thinking": False}, False), ("none", {"enable_thinking": True}, True),
    ],
)  # fmt: skip
def test_reasoning_effort_switches_thinking(
    server: Any, client: openai.OpenAI, effort: Any, kwargs: dict[str, Any], thinks: bool
) -> None:
    client.chat.completions.create(
        model="tiny", messages=ASK, reasoning_effort=effort, max_tokens=1, extra_body={"chat_template_kwargs": kwargs}
    )
    assert ("<|think|>" in server.prompt()) is thinks


def test_a_history_with_calls_that_use_an_id_again(server: Any, client: openai.OpenAI) -> None:
    def call(name: str) -> Any:
        function = {"name": name, "arguments": "{}"}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }

    def response(text: str) -> Any:
        return {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": text}]}

    messages = [*ASK, call("f"), response("a"), *ASK, call("g"), response("b")]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert 'response:f{value:<|"|>a<|"|>}' in server.prompt()
    assert 'response:g{value:<|"|>b<|"|>}' in server.prompt()
