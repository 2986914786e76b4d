"""What the other protocols have in common: their requests become chat completions, which alone reach the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from modelserve_worker.server.answers.preparation import SequenceSpec, chat_sequences
from modelserve_worker.server.answers.prompt_tokens import CONTEXT_CODE
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.errors.errors import ApiError, from_validation
from modelserve_worker.server.state import ServedModel


def chat_request(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """The chat completion with these fields, of which None are left out. Raises ApiError."""
    try:
        return ChatCompletionRequest.model_validate(dict(fields))
    except ValidationError as error:
        raise _translated(from_validation(error)) from error


def only_sequence(
    body: ChatCompletionRequest,
    model: ServedModel,
    *,
    response_id: str,
    max_model_len: int,
    format_field: str,
    length_fields: Mapping[str, str],
) -> SequenceSpec:
    """The one answer to a translated request, whose `response_format` came as `format_field`, and what makes it long
    as `length_fields`, by the names of the chat completion. Raises ApiError."""
    try:
        (spec,) = chat_sequences(body, model, response_id=response_id, max_model_len=max_model_len)
    except ApiError as error:
        if error.code == CONTEXT_CODE:  # its words are known to clients from the first one on
            param = length_fields.get(error.param or "", error.param)
            raise ApiError(error.message, status=error.status, param=param, code=error.code) from error
        raise _translated(error) from error
    return replace(spec, grammar_field=format_field) if spec.grammar_field == "response_format" else spec


def _translated(error: ApiError) -> ApiError:
    """The names in it are those of the chat completion."""
    text = f"as the chat completion that this request stands for: {error.message}"
    return ApiError(text, status=error.status, param=error.param, code=error.code)
