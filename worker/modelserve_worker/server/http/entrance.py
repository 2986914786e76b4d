"""The outermost middleware: every request gets an id and a context, gives back what it held, and leaves its trace."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.errors.error_response import error_response
from modelserve_worker.server.errors.errors import internal_error
from modelserve_worker.server.http.access_log import AccessLog
from modelserve_worker.server.http.body_limits import OpenBodies
from modelserve_worker.server.http.request_context import CLIENT_LEFT, RequestContext
from modelserve_worker.server.http.tracing import Tracing

_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # what may stand in a header and in a line of a log
_ABSOLUTE = re.compile(r"https?://[^/]*", re.IGNORECASE)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

log = logging.getLogger(__name__)


class Entrance:
    """ASGI middleware. Metrics and traces name `routes` by their templates, so that labels are bounded; other paths are
    "none".
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        open_bodies: OpenBodies,
        metrics: WorkerMetrics,
        access_log: AccessLog,
        tracing: Tracing | None,
        routes: Iterable[Route],
    ) -> None:
        self._app = app
        self._open_bodies = open_bodies
        self._metrics = metrics
        self._access_log = access_log
        self._tracing = tracing
        routes = tuple(routes)
        self._paths = frozenset(route.path for route in routes if not route.param_convertors)
        self._templates = tuple((route.path_regex, route.path_format) for route in routes if route.param_convertors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _in_origin_form(scope)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        client = scope.get("client")
        status = CLIENT_LEFT  # no answer was begun

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        with self._open_bodies.account() as account:
            context = RequestContext(request_id, client[0] if client else "", account)
            context.attach(scope)
            try:
                await self._app(scope, receive, named)
            except Exception:
                if status != CLIENT_LEFT:  # an answer has begun: the connection ends with it
                    raise
                log.exception("request %s failed", request_id)
                await error_response(internal_error(), scope["path"])(scope, receive, named)
            finally:
                context.end()
                self._leave_trace(context, scope, headers, context.broken or status)

    def _leave_trace(self, context: RequestContext, scope: Scope, headers: Headers, status: int) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = self._route(scope["path"])
        self._metrics.count_http(method, route, status)
        self._access_log.write(context, method=method, path=scope["path"], status=status)
        if self._tracing is not None and method == "POST":
            self._tracing.record(context, headers, method=method, path=route, status=status)

    def _route(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((template for pattern, template in self._templates if pattern.match(path)), "none")


def _in_origin_form(scope: Scope) -> Scope:
    """A target in absolute form, as proxies send it, is the path within it (RFC 9112, 3.2.2)."""
    found = _ABSOLUTE.match(scope["path"])
    if found is None:
        return scope
    raw = _ABSOLUTE.match(scope["raw_path"].decode("ascii"))
    assert raw is not None
    return {**scope, "path": scope["path"][found.end() :] or "/", "raw_path": scope["raw_path"][raw.end() :] or b"/"}
