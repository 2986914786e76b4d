"""pydantic-ai: an agent over each of the three protocols."""

from __future__ import annotations

from typing import Any

from features import ANSWER, AS_JSON, BASE_URL, CITY, DEGREES, HELLO, HOST, KEY, MODEL, SAID, WEATHER, run, same
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def _with_tool(of: Any) -> Any:
    agent: Any = Agent(of)
    asked: list[str] = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "21"

    return agent, asked


async def chat() -> None:
    same((await Agent(model).run(HELLO)).output, SAID)


async def stream() -> None:
    async with Agent(model).run_stream(HELLO) as answer:
        same(await answer.get_output(), SAID)


async def _tools(of: Any) -> None:
    agent, asked = _with_tool(of)
    same((await agent.run(WEATHER)).output, ANSWER)
    same(asked, [CITY])


async def tools() -> None:
    await _tools(model)


async def tools_stream() -> None:
    agent, asked = _with_tool(model)
    async with agent.run_stream(WEATHER) as answer:
        same(await answer.get_output(), ANSWER)
    same(asked, [CITY])


async def structured() -> None:
    same((await Agent(model, output_type=Weather).run(AS_JSON)).output, Weather(city=CITY, degrees=DEGREES))


async def responses() -> None:
    await _tools(OpenAIResponsesModel(MODEL, provider=provider))


async def messages() -> None:
    await _tools(AnthropicModel(MODEL, provider=AnthropicProvider(base_url=HOST, api_key=KEY)))


run(chat, stream, tools, tools_stream, structured, responses, messages)
