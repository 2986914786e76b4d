"""The gate in front of the inference routes: shut while the model loads, bodies of bounded size, requests counted."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelserve_worker.server.errors import ApiError, unavailable
from modelserve_worker.server.state import Phase, ServerState

MAX_BODY_BYTES = 32 * 1024 * 1024  # several times the longest context as JSON token ids


class Admission:
    """ASGI middleware for POST requests; everything else passes through."""

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._state.phase is Phase.LOADING:
            reason = f"the server is {self._state.phase.value} ({self._state.detail}); try again"
            await unavailable(reason).response()(scope, receive, send)
            return
        self._state.request_opened()
        try:
            await self._app(scope, _bounded(receive), send)
        finally:
            self._state.request_closed()


def _bounded(receive: Receive) -> Receive:
    """Count the body while it arrives: a length header may lie or be absent. Raises ApiError 413."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise ApiError(
                    f"the request body is larger than {MAX_BODY_BYTES} bytes; send fewer prompts per request",
                    status=413, code="body_too_large",
                )  # fmt: skip
        return message

    return bounded
