"""An error as the clients of a route read it."""

from __future__ import annotations

from starlette.responses import Response

from modelserve_worker.server.errors.anthropic_errors import error_body
from modelserve_worker.server.errors.errors import ApiError


def error_response(error: ApiError, path: str) -> Response:
    """In Anthropic's shape below /v1/messages, elsewhere in OpenAI's."""
    return error.response(error_body(error) if path.startswith("/v1/messages") else None)
