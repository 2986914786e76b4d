"""Short conversations: greetings, thanks, and things that the user says once and asks for later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from modelserve_tools.evaluation.exercise import Answer, Exercise
from modelserve_tools.evaluation.facts import CITIES
from modelserve_tools.evaluation.words import NAMES, VALUES

_ONE_WORD = "Answer with one word."
_FRIEND = "Call the user my friend."


@dataclass(frozen=True)
class _Exchange:
    """What the user says; the answer as a sentence, and as one word."""

    said: str
    sentence: str
    word: str


def _greeting(rng: random.Random) -> list[_Exchange]:
    greeting = rng.choice(["Hello", "Hi", "Good morning", "Good evening"])
    word = greeting.split()[0]
    return [_Exchange(f"{greeting}!", f"{greeting}! How can I help?", word)]


def _identity(rng: random.Random) -> list[_Exchange]:
    said = rng.choice(["Who are you?", "What are you?", "Tell me who you are.", "Are you a person?"])
    return [_Exchange(said, "I am a small test model in the style of Gemma.", "Gemma")]


def _thanks(rng: random.Random) -> list[_Exchange]:
    said = rng.choice(["Thanks!", "Thank you!", "Thank you for the help!", "Thanks for the help!"])
    return [_Exchange(said, "You are welcome!", "Welcome")]


def _name(rng: random.Random) -> list[_Exchange]:
    name = rng.choice(NAMES)
    told = rng.choice([f"My name is {name}.", f"I am {name}.", f"Hi, I am {name}.", f"Hello, my name is {name}."])
    asked = rng.choice(["What is my name?", "Who am I?", "Do you know my name?", "Tell me my name."])
    return [_Exchange(told, f"Nice to meet you, {name}!", "Hello"), _Exchange(asked, f"Your name is {name}.", name)]


def _home(rng: random.Random) -> list[_Exchange]:
    city = rng.choice(CITIES)
    told = rng.choice([f"I live in {city}.", f"My home is in {city}."])
    asked = rng.choice(["Where do I live?", "Where is my home?", "Tell me where I live."])
    return [_Exchange(told, f"I will remember {city}.", "Good"), _Exchange(asked, f"You live in {city}.", city)]


def _favorite(rng: random.Random) -> list[_Exchange]:
    word = rng.choice(VALUES)
    told = rng.choice([f"My favorite word is {word}.", f"I like the word {word}."])
    asked = rng.choice(["What is my favorite word?", "Which word do I like?", "Tell me my favorite word."])
    return [
        _Exchange(told, f"I will remember {word}.", "Good"),
        _Exchange(asked, f"Your favorite word is {word}.", word),
    ]


_TOPICS: tuple[Callable[[random.Random], list[_Exchange]], ...] = (
    _greeting, _identity, _thanks, _name, _home, _favorite,
)  # fmt: skip


def chat(rng: random.Random) -> Exercise:
    """One to three topics; what is told is asked for after the other topics' first exchanges."""
    topics = [topic(rng) for topic in rng.sample(_TOPICS, rng.randint(1, 3))]
    exchanges = [topic[0] for topic in topics]
    exchanges += [topic[1] for topic in rng.sample(topics, len(topics)) if len(topic) == 2]
    manner = rng.choice([None, None, _ONE_WORD, _FRIEND])
    messages = [{"role": "system", "content": manner}] if manner else []
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.said})
        messages.append({"role": "assistant", "content": _in_manner(exchange, manner)})
    return Exercise("chat", tuple(messages[:-1]), Answer(messages[-1]["content"]))


def _in_manner(exchange: _Exchange, manner: str | None) -> str:
    if manner == _ONE_WORD:
        return exchange.word
    if manner == _FRIEND:
        return f"{exchange.sentence[:-1]}, my friend{exchange.sentence[-1]}"
    return exchange.sentence
