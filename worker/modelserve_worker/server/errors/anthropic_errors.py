"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Any

from modelserve_worker.server.errors.errors import ApiError

_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_body(error: ApiError) -> dict[str, Any]:
    """The error in Anthropic's shape, which has no field for the name of what was wrong: the text says it."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
