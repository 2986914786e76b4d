"""What the other protocols have in common: their requests become chat completions, which alone reach the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from modelserve_worker.server.errors import ApiError, from_validation
from modelserve_worker.server.preparation import SequenceSpec, chat_sequences
from modelserve_worker.server.protocol import ChatCompletionRequest
from modelserve_worker.server.state import ServedModel


def chat_request(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """The chat completion with these fields, of which None are left out. Raises ApiError."""
    try:
        return ChatCompletionRequest.model_validate(dict(fields))
    except ValidationError as error:
        raise _translated(from_validation(error)) from error


def only_sequence(
    body: ChatCompletionRequest, model: ServedModel, *, response_id: str, max_model_len: int
) -> SequenceSpec:
    """The one answer to a translated request. Raises ApiError."""
    try:
        (spec,) = chat_sequences(body, model, response_id=response_id, max_model_len=max_model_len)
    except ApiError as error:
        raise _translated(error) from error
    return spec


def text_parts(content: Any, kinds: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a chat message: a string, or the parts that are of one of `kinds`, as text. Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is a string or a list of parts, not {type(content).__name__}")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in kinds:
            raise ValueError(f"content part {str(kind)[:40]!r} is not supported: this server reads text only")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"a content part of type {kind!r} needs a text")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _translated(error: ApiError) -> ApiError:
    """The names in it are those of the chat completion."""
    text = f"as the chat completion that this request stands for: {error.message}"
    return ApiError(text, status=error.status, param=error.param, code=error.code)
