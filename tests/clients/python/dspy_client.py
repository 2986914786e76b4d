"""dspy: its LM, and a signature through its JSONAdapter."""

from __future__ import annotations

import dspy
from features import AS_JSON, BASE_URL, CITY, DEGREES, HELLO, KEY, MODEL, SAID, run, same

lm = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False, num_retries=0)


class Weather(dspy.Signature):
    """The weather in a city as JSON."""

    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    degrees: int = dspy.OutputField()


def chat() -> None:
    same(lm(HELLO), [SAID])


def structured() -> None:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        said = dspy.Predict(Weather)(question=AS_JSON)
    same((said.city, said.degrees), (CITY, DEGREES))


run(chat, structured)
