"""smolagents: its model class, and an agent that calls tools."""

from __future__ import annotations

from typing import Any, ClassVar

from features import BASE_URL, CITY, HELLO, KEY, MODEL, SAID, WEATHER, run, same
from smolagents import OpenAIModel, Tool, ToolCallingAgent

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY)
ASK: Any = [{"role": "user", "content": [{"type": "text", "text": HELLO}]}]


class GetWeather(Tool):  # type: ignore[misc]
    name = "get_weather"
    description = "The weather in a city"
    inputs: ClassVar[Any] = {"city": {"type": "string", "description": "A city"}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"21 in {city}"


def chat() -> None:
    same(model(ASK).content, SAID)


def stream() -> None:
    same("".join(delta.content or "" for delta in model.generate_stream(ASK)), SAID)


def tools() -> None:
    """An agent forces a call with tool_choice "required"; the last one is of its own tool final_answer."""
    agent = ToolCallingAgent(tools=[GetWeather()], model=model, max_steps=3, verbosity_level=0)
    same(CITY in str(agent.run(WEATHER)), True)


run(chat, stream, tools)
