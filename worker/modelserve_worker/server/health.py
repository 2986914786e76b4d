"""Routes for kubelet, operator, load balancers and people: /health (/ping), /ready, /load, /version, /v1/plan."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelserve import __version__
from modelserve_worker.server.state import ServerState


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def health(request: Request) -> Response:
    """200 while the process is worth keeping: also while it loads or drains. 503 once the engine has stopped."""
    state = _state(request)
    alive = state.alive()
    body = {"status": state.phase.value if alive else "failed", "detail": state.detail}
    return JSONResponse(body, status_code=200 if alive else 503)


async def ready(request: Request) -> Response:
    """200 while new requests are wanted; else 503 with the phase and, while loading, how far it is.

    A draining worker answers those that still come, but asks for no more.
    """
    state = _state(request)
    body = {"status": state.phase.value if state.alive() else "failed", "detail": state.detail}
    return JSONResponse(body, status_code=200 if state.ready() else 503)


async def load(request: Request) -> Response:
    """Requests that are being answered, in vLLM's shape."""
    return JSONResponse({"server_load": _state(request).open_requests})


async def show_version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


async def plan(request: Request) -> Response:
    """The memory plan, predicted beside allocated. 503 while loading."""
    return JSONResponse(_state(request).serving_engine().plan_report())
