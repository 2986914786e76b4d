"""anthropic, the Python client."""

from __future__ import annotations

from typing import Any

import anthropic
from features import ANSWER, AS_JSON, CITY, DEGREES, HELLO, HOST, KEY, MODEL, SAID, THOUGHT, TOOL, WEATHER, run, same
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=HOST, api_key=KEY, max_retries=0)
function = TOOL["function"]
DECLARED: Any = {
    "name": function["name"],
    "description": function["description"],
    "input_schema": function["parameters"],
}


def _ask(text: str) -> Any:
    return {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": text}]}


def chat() -> None:
    same(client.messages.create(**_ask(HELLO)).content[0].text, SAID)
    counted = client.messages.count_tokens(model=MODEL, messages=_ask(HELLO)["messages"])
    if counted.input_tokens < 10:
        raise AssertionError(f"{counted.input_tokens} tokens")


def stream() -> None:
    with client.messages.stream(**_ask(HELLO)) as answer:
        same(answer.get_final_text(), SAID)


def _second_turn(message: Any) -> None:
    (call,) = [block for block in message.content if block.type == "tool_use"]
    same(call.input, {"city": CITY})
    same(message.stop_reason, "tool_use")
    asked = _ask(WEATHER)
    content = [block.model_dump(exclude_none=True) for block in message.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    asked["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    same(client.messages.create(**asked, tools=[DECLARED]).content[0].text, ANSWER)


def tools() -> None:
    _second_turn(client.messages.create(**_ask(WEATHER), tools=[DECLARED]))


def tools_stream() -> None:
    with client.messages.stream(**_ask(WEATHER), tools=[DECLARED]) as answer:
        message = answer.get_final_message()
    _second_turn(message)


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def structured() -> None:
    parsed = client.messages.parse(**_ask(AS_JSON), output_format=Weather).parsed_output
    same(parsed, Weather(city=CITY, degrees=DEGREES))
    schema: Any = {**Weather.model_json_schema(), "additionalProperties": False}
    asked: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    said = client.messages.create(**_ask(AS_JSON), output_config=asked).content[0].text
    same(Weather.model_validate_json(said), Weather(city=CITY, degrees=DEGREES))


def reasoning() -> None:
    answer = client.messages.create(**_ask(HELLO), thinking={"type": "enabled", "budget_tokens": 1024})
    same(answer.content[0].thinking, THOUGHT)


run(chat, stream, tools, tools_stream, structured, reasoning)
