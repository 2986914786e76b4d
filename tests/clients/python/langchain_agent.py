"""langchain: create_agent over ChatOpenAI."""

from __future__ import annotations

from typing import Any

from features import ANSWER, AS_JSON, CITY, DEGREES, WEATHER, run, same
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from langchain_parts import Weather, ask, get_weather, model


def _asking(question: str) -> Any:
    return {"messages": [{"role": "user", "content": question}]}


def tools() -> None:
    same(create_agent(model, [get_weather]).invoke(_asking(WEATHER))["messages"][-1].content, ANSWER)


def tools_stream() -> None:
    said = ""
    for chunk, _ in create_agent(model, [get_weather]).stream(_asking(WEATHER), stream_mode="messages"):
        said += str(chunk.content) if chunk.type == "AIMessageChunk" else ""
    same(said, ANSWER)


def structured() -> None:
    for strategy in (ProviderStrategy, ToolStrategy):
        agent = create_agent(model, [], response_format=strategy(Weather))
        same(agent.invoke(_asking(AS_JSON))["structured_response"], Weather(city=CITY, degrees=DEGREES))


def responses() -> None:
    agent = create_agent(ChatOpenAI(**ask, use_responses_api=True), [get_weather])
    same(agent.invoke(_asking(WEATHER))["messages"][-1].text, ANSWER)


run(tools, tools_stream, structured, responses)
