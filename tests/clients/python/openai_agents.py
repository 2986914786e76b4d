"""openai-agents: an agent over chat completions and over responses."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from features import ANSWER, AS_JSON, BASE_URL, CITY, DEGREES, HELLO, KEY, MODEL, SAID, WEATHER, run, same
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
asked: list[str] = []


class Weather(BaseModel):
    city: str
    degrees: int


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21"


def _agent(*, over_responses: bool = False, **fields: Any) -> Any:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    kind = OpenAIResponsesModel if over_responses else OpenAIChatCompletionsModel
    return Agent(name="helper", model=kind(model=MODEL, openai_client=client), **fields)


async def chat() -> None:
    same((await Runner.run(_agent(instructions="Be short."), HELLO)).final_output, SAID)


async def stream() -> None:
    result = Runner.run_streamed(_agent(), HELLO)
    async for _ in result.stream_events():
        pass
    same(result.final_output, SAID)


async def tools() -> None:
    asked.clear()
    same((await Runner.run(_agent(tools=[get_weather]), WEATHER)).final_output, ANSWER)
    same(asked, [CITY])


async def tools_stream() -> None:
    asked.clear()
    result = Runner.run_streamed(_agent(tools=[get_weather]), WEATHER)
    async for _ in result.stream_events():
        pass
    same((result.final_output, asked), (ANSWER, [CITY]))


async def structured() -> None:
    answer = await Runner.run(_agent(output_type=Weather), AS_JSON)
    same(answer.final_output, Weather(city=CITY, degrees=DEGREES))


async def responses() -> None:
    asked.clear()
    same((await Runner.run(_agent(over_responses=True), HELLO)).final_output, SAID)
    same((await Runner.run(_agent(over_responses=True, tools=[get_weather]), WEATHER)).final_output, ANSWER)
    same(asked, [CITY])


run(chat, stream, tools, tools_stream, structured, responses)
