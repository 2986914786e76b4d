"""openai, the Python client."""

from __future__ import annotations

import json
from typing import Any

import openai
from features import (
    ANSWER,
    AS_JSON,
    BASE_URL,
    CITY,
    DEGREES,
    HELLO,
    KEY,
    MODEL,
    SAID,
    THOUGHT,
    TOOL,
    WEATHER,
    run,
    same,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)


class Weather(BaseModel):
    city: str
    degrees: int


def _ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=_ask(HELLO))
    same(answer.choices[0].message.content, SAID)


def stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=_ask(HELLO)) as answer:
        same(answer.get_final_completion().choices[0].message.content, SAID)


def _second_turn(message: Any) -> None:
    (call,) = message.tool_calls
    same(json.loads(call.function.arguments), {"city": CITY})
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    messages = [*_ask(WEATHER), message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    same(answer.choices[0].message.content, ANSWER)


def tools() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=_ask(WEATHER), tools=[TOOL])
    _second_turn(answer.choices[0].message)


def tools_stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=_ask(WEATHER), tools=[TOOL]) as answer:
        message = answer.get_final_completion().choices[0].message
    _second_turn(message)


def structured() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=_ask(AS_JSON), response_format=Weather)
    same(answer.choices[0].message.parsed, Weather(city=CITY, degrees=DEGREES))


def reasoning() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=_ask(HELLO), reasoning_effort="low")
    same(answer.choices[0].message.to_dict()["reasoning_content"], THOUGHT)


def responses() -> None:
    function = {"type": "function", **TOOL["function"], "strict": False}
    asked: Any = {"model": MODEL, "tools": [function]}
    with client.responses.stream(input=WEATHER, **asked) as events:
        first = events.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    history = [*_ask(WEATHER), *(item.to_dict() for item in first.output), result]
    for item in history:
        item.pop("parsed_arguments", None)
    same(client.responses.create(input=history, **asked).output_text, ANSWER)


run(chat, stream, tools, tools_stream, structured, reasoning, responses)
