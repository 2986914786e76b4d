"""langchain-openai: ChatOpenAI."""

from __future__ import annotations

from typing import Any

from features import ANSWER, AS_JSON, CITY, DEGREES, HELLO, SAID, WEATHER, run, same
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langchain_parts import Weather, ask, get_weather, model


def chat() -> None:
    same(model.invoke(HELLO).content, SAID)


def stream() -> None:
    same("".join(str(chunk.content) for chunk in model.stream(HELLO)), SAID)


def _second_turn(bound: Any, message: Any) -> Any:
    (call,) = message.tool_calls
    same(call["args"], {"city": CITY})
    return bound.invoke([HumanMessage(WEATHER), message, get_weather.invoke(call)])


def tools() -> None:
    bound = model.bind_tools([get_weather])
    same(_second_turn(bound, bound.invoke(WEATHER)).content, ANSWER)


def tools_stream() -> None:
    bound = model.bind_tools([get_weather])
    message: Any = None
    for chunk in bound.stream(WEATHER):
        message = chunk if message is None else message + chunk
    same(_second_turn(bound, message).content, ANSWER)


def structured() -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        parsed = model.with_structured_output(Weather, method=method).invoke(AS_JSON)
        same(parsed, Weather(city=CITY, degrees=DEGREES))


def responses() -> None:
    bound = ChatOpenAI(**ask, use_responses_api=True).bind_tools([get_weather])
    same(_second_turn(bound, bound.invoke(WEATHER)).text, ANSWER)


run(chat, stream, tools, tools_stream, structured, responses)
