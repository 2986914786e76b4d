"""instructor: a pydantic model out of an answer, in its modes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from features import AS_JSON, BASE_URL, CITY, DEGREES, KEY, MODEL, run, same
from pydantic import BaseModel

MODES = {
    "call": [instructor.Mode.TOOLS],  # its default: a forced call
    "JSON": [instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA],
    "parallel calls": [instructor.Mode.PARALLEL_TOOLS],
    "Markdown": [instructor.Mode.MD_JSON],  # a code block, which needs nothing of the server
}


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def structured() -> None:
    for mode in MODES[sys.argv[1]]:
        client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), mode=mode)
        asked: Any = [{"role": "user", "content": AS_JSON}]
        several = mode is instructor.Mode.PARALLEL_TOOLS
        wanted: Any = Iterable[Weather] if several else Weather
        found: Any = client.create(model=MODEL, messages=asked, response_model=wanted, max_retries=0)
        (weather,) = found if several else (found,)
        same(weather.model_dump(), {"city": CITY, "degrees": DEGREES})


run(structured)
