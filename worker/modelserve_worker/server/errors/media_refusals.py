"""Why an image or a sound was refused, as its client is told."""

from __future__ import annotations

from modelserve_worker.media.media_error import MediaError
from modelserve_worker.server.errors.errors import ApiError


def as_answer(error: MediaError, param: str) -> ApiError:
    """`param` where the error does not say which part is at fault."""
    param = error.param or param
    text = str(error) if str(error).startswith(param) else f"{param}: {error}"
    return ApiError(text, param=param, code=error.code)
