"""What the scripts of the clients share: where the server is, what is asked, and how a feature's result is told."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

HOST = os.environ["SERVER_URL"]
BASE_URL = f"{HOST}/v1"
MODEL = "tiny"
KEY = "none"

HELLO = "Say hello."
SAID = "Hello from Paris."
THOUGHT = "Let me see."
WEATHER = "What is the weather in Paris?"
ANSWER = "It is 21 degrees."
AS_JSON = "The weather in Paris as JSON, please."
CITY, DEGREES = "Paris", 21
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def same(found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} instead of {wanted!r}")


def run(*features: Callable[[], Any]) -> None:
    """Try each feature and write its name and result as a line of JSON."""
    for feature in features:
        try:
            if inspect.iscoroutinefunction(feature):
                asyncio.run(feature())
            else:
                feature()
            result = "ok"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps({"feature": feature.__name__, "result": result}), flush=True)
