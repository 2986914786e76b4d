"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

RETRY_AFTER_SECONDS = 2

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY = {"retry-after": str(RETRY_AFTER_SECONDS)}
_HEADERS: Mapping[int, Mapping[str, str]] = {401: {"www-authenticate": "Bearer"}, 429: _RETRY, 503: _RETRY}
_CHAT_ONLY = "it is a field of /v1/chat/completions"

_ONE_BACKEND = "there is one way to constrain an answer here; leave it out"

# Fields of other servers that clients send, and what they can do here instead.
_REMEDIES = {
    "tools": _CHAT_ONLY,
    "tool_choice": _CHAT_ONLY,
    "parallel_tool_calls": _CHAT_ONLY,
    "top_logprobs": _CHAT_ONLY,
    "reasoning_effort": _CHAT_ONLY,
    "functions": "use tools",
    "function_call": "use tools, with tool_choice for the request and tool_calls in messages",
    "audio": "this server reads and writes text only",
    "best_of": "use n and choose among the answers",
    "suffix": "insertion is not supported; put everything into the prompt",
    "chat_template": "the checkpoint's own chat template is used; chat_template_kwargs sets its variables",
    "guided_json": 'use structured_outputs: {"json": SCHEMA}',
    "guided_json_object": 'use response_format: {"type": "json_object"}',
    "guided_regex": 'use structured_outputs: {"regex": EXPRESSION}',
    "guided_choice": 'use structured_outputs: {"choice": [TEXT, ...]}',
    "guided_grammar": 'use structured_outputs: {"grammar": GRAMMAR}',
    "guided_decoding_backend": _ONE_BACKEND,
    "guided_whitespace_pattern": "white space between the parts of a document is bounded by the server",
    "disable_any_whitespace": "white space between the parts of a document is bounded by the server",
    "whitespace_pattern": "white space between the parts of a document is bounded by the server",
    "disable_fallback": _ONE_BACKEND,
}


class ApiError(Exception):
    """An answer other than 200, with OpenAI's fields. `param` is the request field at fault; `headers` stand beside
    those that every answer of this status has.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self._headers = headers or {}
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, body: Mapping[str, Any] | None = None) -> Response:
        """`body` says it in the shape of another API than OpenAI's."""
        headers = {**_HEADERS.get(self.status, {}), **self._headers}
        # ASCII: a message quotes the client's input, which may hold characters that UTF-8 cannot carry.
        return Response(
            json.dumps(body or self.body()), status_code=self.status, media_type="application/json", headers=headers
        )


def unavailable(message: str) -> ApiError:
    """503 with Retry-After: another replica, or this one later, can answer."""
    return ApiError(message, status=503, code="unavailable")


def internal_error() -> ApiError:
    return ApiError("the server failed; its log says why", status=500, code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first fault of a request body, by field name."""
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    name = str(first["loc"][-1]) if first["loc"] else "body"
    if first["type"] == "extra_forbidden":
        remedy = _REMEDIES.get(name, "remove it, or check its spelling")
        return ApiError(f"field {param!r} is not supported: {remedy}", param=param, code="unsupported_field")
    if first["type"] == "missing":
        return ApiError(f"field {param!r} is required", param=param, code="missing_field")
    where = "" if param is None else f"{param}: "  # a rule over several fields names them itself
    if first["type"] == "value_error":
        return ApiError(f"{where}{first['ctx']['error']}", param=param, code="invalid_value")
    given = repr(first["input"])
    shown = given if len(given) <= 80 else given[:77] + "..."
    return ApiError(f"{where}{first['msg']}, not {shown}", param=param, code="invalid_value")
