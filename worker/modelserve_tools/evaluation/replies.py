"""What an OpenAI-compatible endpoint answers, as far as the harness reads it. Other fields are ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import BaseModel, Field

SHOWN_CHARACTERS = 300


class CalledFunction(BaseModel):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    function: CalledFunction


class ReplyMessage(BaseModel):
    """vLLM and SGLang have named the thought both `reasoning_content` and `reasoning`."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] | None = None


class Choice(BaseModel):
    message: ReplyMessage
    finish_reason: str | None = None


class ChatCompletion(BaseModel):
    choices: list[Choice] = Field(min_length=1)


class ModelCard(BaseModel):
    """`max_model_len` is in tokens; servers that do not tell leave it out."""

    id: str
    max_model_len: int | None = None


class ModelList(BaseModel):
    data: list[ModelCard]


@dataclass(frozen=True)
class Reply:
    """The first choice of an answer, and the milliseconds from sending the request to having all of it."""

    content: str
    reasoning: str
    tool_calls: tuple[CalledFunction, ...]
    finish_reason: str | None
    milliseconds: float

    @classmethod
    def of(cls, completion: ChatCompletion, *, milliseconds: float) -> Reply:
        choice = completion.choices[0]
        message = choice.message
        return cls(
            content=message.content or "",
            reasoning=message.reasoning_content or message.reasoning or "",
            tool_calls=tuple(call.function for call in message.tool_calls or ()),
            finish_reason=choice.finish_reason,
            milliseconds=milliseconds,
        )


def error_text(body: str) -> str:
    """The message of an error body in OpenAI's shape, else the body itself, on one line."""
    try:
        text = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body
    return " ".join(str(text).split())[:SHOWN_CHARACTERS]
