"""One question with its only right answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call the model should make; argument values are strings, integers or booleans."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the model should say. `reasoning` is the thought before it, where the exercise asks for thinking."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """A conversation in OpenAI's message shape that ends with the user's or a tool's message, and the answer to it.

    Earlier assistant messages are right answers too. `distance` counts the words and punctuation marks between a fact
    and the question about it: tokens, for a tokenizer that has a token for each of them.
    """

    skill: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Answer
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    distance: int | None = None
