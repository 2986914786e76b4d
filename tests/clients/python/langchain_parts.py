"""What both clients of LangChain ask with."""

from __future__ import annotations

from typing import Any

from features import BASE_URL, KEY, MODEL
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ask: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": KEY, "max_retries": 0}
model = ChatOpenAI(**ask)


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "21"
