"""The gate in front of the inference routes: shut while the model loads, counting requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from modelserve_worker.server.errors.error_response import error_response
from modelserve_worker.server.errors.errors import unavailable
from modelserve_worker.server.state import Phase, ServerState


class LoadingGate:
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
            await error_response(unavailable(reason), scope["path"])(scope, receive, send)
            return
        self._state.request_opened()
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.request_closed()
