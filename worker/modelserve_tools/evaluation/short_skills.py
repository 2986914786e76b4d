"""Questions of a few words. Each has one right answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from modelserve_tools.evaluation.chat_skill import chat
from modelserve_tools.evaluation.exercise import Answer, Exercise
from modelserve_tools.evaluation.facts import CAPITALS, CITIES, COUNTRIES, UNITS
from modelserve_tools.evaluation.tool_skills import tool_call, tool_response
from modelserve_tools.evaluation.words import COLORS, NAMES, SORTABLE_WORDS, VALUES

LARGEST_NUMBER = 99
LOOK_BACK = 250
"""Words of a signal from the first one asked for to the last."""

LOOKED_UP = 8


def arithmetic(rng: random.Random) -> Exercise:
    """A sum or a difference; operands and result lie in 0..LARGEST_NUMBER."""
    high = rng.randint(0, LARGEST_NUMBER)
    low = rng.randint(0, high)
    if rng.random() < 0.5:
        a, b, result, sign = low, high - low, high, "+"
        question = rng.choice([f"Add {a} and {b}.", f"Add {b} to {a}."])
    else:
        a, b, result, sign = high, low, high - low, "-"
        question = rng.choice([f"Subtract {b} from {a}.", f"Take {b} from {a}."])
    forms = [f"What is {a} {sign} {b}?", f"How much is {a} {sign} {b}?", f"{a} {sign} {b} =", question]
    return _question("arithmetic", rng.choice(forms), str(result))


def sorting(rng: random.Random) -> Exercise:
    """Two to six different words, to put in alphabetical order."""
    words = rng.sample(SORTABLE_WORDS, rng.randint(2, 6))
    order = rng.choice(["Sort these words:", "Put these words in order:", "Sort:", "Order these words from a to z:"])
    return _question("sorting", f"{order} {' '.join(words)}", " ".join(sorted(words)))


def copying(rng: random.Random) -> Exercise:
    """Three to 24 different words, to say again."""
    words = " ".join(rng.sample(VALUES, rng.randint(3, 24)))
    order = rng.choice(["Repeat:", "Repeat these words:", "Copy these words:", "Say this again:"])
    return _question("copying", f"{order} {words}", words)


def lookback(rng: random.Random) -> Exercise:
    """LOOKED_UP words of a signal of "on" and "off", found by their place: the first is LOOK_BACK words from its end.

    The signal begins up to 40 words earlier, so counting from its start does not help; and two words make no context
    that would be found by what it says. A model must attend by position, farther back than a window of 128 reaches in
    two layers.
    """
    signal = [rng.choice(("on", "off")) for _ in range(LOOK_BACK + rng.randint(0, 40))]
    text = f"Notes: {' '.join(signal)}. Which {LOOKED_UP} words are {LOOK_BACK} before this?"
    return _question("lookback", text, " ".join(signal[-LOOK_BACK:][:LOOKED_UP]))


def facts(rng: random.Random) -> Exercise:
    """A capital, or how many of one unit are in another."""
    if rng.random() < 0.5:
        country = rng.choice(COUNTRIES)
        forms = [
            f"What is the capital of {country}?",
            f"Name the capital of {country}.",
            f"Which city is the capital of {country}?",
            f"Tell me the capital of {country}.",
        ]
        return _question("facts", rng.choice(forms), CAPITALS[country])
    small, large, number = rng.choice(UNITS)
    forms = [f"How many {small} are in {large}?", f"How many {small} make {large}?", f"How many {small} has {large}?"]
    return _question("facts", rng.choice(forms), str(number))


def json_object(rng: random.Random) -> Exercise:
    """One to four fields, strings and integers, to write as a JSON object in the order given."""
    values: dict[str, Any] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(1, 99),
        "city": rng.choice(CITIES),
        "color": rng.choice(COLORS),
        "word": rng.choice(VALUES),
        "count": rng.randint(0, 999),
    }
    names = rng.sample(list(values), rng.randint(1, 4))
    listed = ", ".join(f"{name} {values[name]}" for name in names)
    order = rng.choice(["Give JSON for", "Write JSON for", "Make JSON from"])
    return _question("json", f"{order} {listed}.", json.dumps({name: values[name] for name in names}))


def thinking(rng: random.Random) -> Exercise:
    """Two steps, of which the thought holds the first: a sum of three numbers, or the n-th of some words in order."""
    return _sum_of_three(rng) if rng.random() < 0.5 else _word_in_order(rng)


def _sum_of_three(rng: random.Random) -> Exercise:
    total = rng.randint(0, LARGEST_NUMBER)
    partial = rng.randint(0, total)
    a = rng.randint(0, partial)
    b, c = partial - a, total - partial
    forms = [f"What is {a} + {b} + {c}?", f"How much is {a} + {b} + {c}?", f"Add {a} and {b} and {c}."]
    thought = f"{a} + {b} = {partial}. {partial} + {c} = {total}."
    return _question("thinking", rng.choice(forms), str(total), reasoning=thought)


def _word_in_order(rng: random.Random) -> Exercise:
    words = rng.sample(SORTABLE_WORDS, rng.randint(2, 6))
    ordered = sorted(words)
    place = rng.randint(1, len(words))
    text = f"Which is word {place} in order: {' '.join(words)}"
    return _question("thinking", text, ordered[place - 1], reasoning=" ".join(ordered))


def _question(skill: str, text: str, content: str, *, reasoning: str = "") -> Exercise:
    answer = Answer(content=content, reasoning=reasoning)
    return Exercise(skill, ({"role": "user", "content": text},), answer, thinking=bool(reasoning))


SHORT_SKILLS: Mapping[str, Callable[[random.Random], Exercise]] = MappingProxyType(
    {
        "chat": chat,
        "arithmetic": arithmetic,
        "sorting": sorting,
        "copying": copying,
        "lookback": lookback,
        "facts": facts,
        "json": json_object,
        "tool_call": tool_call,
        "tool_response": tool_response,
        "thinking": thinking,
    }
)
