"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from modelserve_worker.server.errors.refused_fields import REFUSED_FIELDS

RETRY_AFTER_SECONDS = 2

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    429: "server_busy",
    499: "client_left",
    503: "unavailable",
}
_LENGTHS = {
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}
_REMEDIES = {"role 'system'": "the system prompt is the field system of the request"}
_RETRY = {"retry-after": str(RETRY_AFTER_SECONDS)}
_HEADERS: Mapping[int, Mapping[str, str]] = {401: {"www-authenticate": "Bearer"}, 429: _RETRY, 503: _RETRY}


class FieldError(ValueError):
    """A rule over several fields was broken; `field` is the one to change. Its message names it. `code` is that of the
    answer."""

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class ApiError(Exception):
    """An answer other than 200, with OpenAI's fields. `param` is the request field at fault; `code` takes the place of
    that of its status, `headers` beside those of its status.
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
        self.code = code or _CODES.get(status, "internal_error")

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
        remedy = REFUSED_FIELDS.get(name, "remove it, or check its spelling")
        return ApiError(f"field {param!r} is not supported: {remedy}", param=param, code="unsupported_field")
    if first["type"] == "missing":
        return ApiError(f"field {param!r} is required", param=param, code="missing_field")
    where = "" if param is None else f"{param}: "  # a rule over several fields names them itself
    if first["type"] == "value_error" and isinstance(fault := first["ctx"]["error"], FieldError):
        at = ".".join([*map(str, first["loc"]), fault.field])
        return ApiError(str(fault), param=at, code=fault.code)
    if first["type"] == "value_error":
        return ApiError(f"{where}{first['ctx']['error']}", param=param, code="invalid_value")
    context = first.get("ctx", {})
    if first["type"] == "union_tag_invalid":
        by = "role" if context["discriminator"] == "'role'" else "type"  # a function of ours looks at the type, too
        named = f"{by} {context['tag'][:40]!r}"
        remedy = _REMEDIES.get(named, f"known here: {context['expected_tags']}")
        return ApiError(f"{where}{named} is not supported; {remedy}", param=param, code="invalid_value")
    if first["type"] in _LENGTHS:
        said = _LENGTHS[first["type"]].format(**context)
        has = f", not {context['actual_length']}" if "actual_length" in context else ""
        return ApiError(f"{where}{said}{has}", param=param, code="invalid_value")
    given = repr(first["input"])
    shown = given if len(given) <= 80 else given[:77] + "..."
    return ApiError(f"{where}{first['msg']}, not {shown}", param=param, code="invalid_value")
