"""LlamaIndex: OpenAILike."""

from __future__ import annotations

from typing import Any

from features import ANSWER, AS_JSON, BASE_URL, CITY, DEGREES, HELLO, KEY, MODEL, SAID, WEATHER, run, same
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SETTINGS: Any = {
    "model": MODEL, "api_base": BASE_URL, "api_key": KEY, "is_chat_model": True, "max_retries": 0,
    "is_function_calling_model": True, "context_window": 4096,
}  # fmt: skip
model = OpenAILike(**SETTINGS)


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def _get_weather(city: str) -> str:
    """The weather in a city."""
    return "21"


TOOL = FunctionTool.from_defaults(_get_weather, name="get_weather")


def _ask(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def chat() -> None:
    same(model.chat(_ask(HELLO)).message.content, SAID)


def stream() -> None:
    same("".join(chunk.delta or "" for chunk in model.stream_chat(_ask(HELLO))), SAID)


def _second_turn(answer: Any) -> None:
    (call,) = model.get_tool_calls_from_response(answer)
    same(call.tool_kwargs, {"city": CITY})
    result = ChatMessage(role="tool", content="21", additional_kwargs={"tool_call_id": call.tool_id})
    history = [*_ask(WEATHER), answer.message, result]
    same(model.chat_with_tools([TOOL], chat_history=history).message.content, ANSWER)


def tools() -> None:
    _second_turn(model.chat_with_tools([TOOL], user_msg=WEATHER))


def tools_stream() -> None:
    *_, last = model.stream_chat_with_tools([TOOL], user_msg=WEATHER)
    _second_turn(last)


def structured() -> None:
    parsed = model.as_structured_llm(Weather).chat(_ask(AS_JSON)).raw
    same(parsed, Weather(city=CITY, degrees=DEGREES))
    same(model.structured_predict(Weather, PromptTemplate(AS_JSON)), Weather(city=CITY, degrees=DEGREES))


run(chat, stream, tools, tools_stream, structured)
