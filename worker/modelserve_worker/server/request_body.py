"""A request's body: from bytes on a socket to a validated model and what is made of it. All POST routes use it.

What a body may cost is bounded at each stage, before the stage begins: its type and length by its headers, its bytes
while they arrive (with a deadline), its structure before JSON is parsed (json_text), its text before it is encoded
(preparation). Parsing, validating, rendering and encoding run in threads, so the event loop goes on. Bodies wait only
for others of their size: a small one never waits for a large one, and of the largest one at a time is unpacked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from modelserve_worker.server.answers.fetched_media import MediaElsewhere, fetch_media
from modelserve_worker.server.answers.sent_sounds import SoundsUndecoded, decode_sounds
from modelserve_worker.server.bodies.field_policy import FieldPolicy
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.errors.errors import ApiError, from_validation
from modelserve_worker.server.http.body_limits import BodyAccount, OpenBodies, largest_body_bytes
from modelserve_worker.server.http.request_context import RequestContext
from modelserve_worker.server.json_text import read_json, structure_excess
from modelserve_worker.server.state import ServerState

Body = TypeVar("Body", bound=RequestModel)
Result = TypeVar("Result")

_LANES = ((64 * 1024, 4), (1024 * 1024, 2))  # (bytes of a body at most, threads)
_LAST_BODIES_S = 0.5  # given to bodies that are still arriving when the server begins to drain


class RequestBodies:
    """Reads and prepares bodies for one application. `gap_s`: most seconds between two pieces of a body; `total_s`: for
    all of it."""

    def __init__(
        self, state: ServerState, open_bodies: OpenBodies, policy: FieldPolicy, *, gap_s: float, total_s: float
    ) -> None:
        self._state = state
        self._policy = policy
        self._gap_s = gap_s
        self._total_s = total_s
        self.open_bodies = open_bodies
        self._lanes = [(most, ThreadPoolExecutor(threads)) for most, threads in _LANES]
        self._last_lane = ThreadPoolExecutor(1)

    async def prepare(
        self,
        request: Request,
        body_type: type[Body],
        make: Callable[[Body], Result],
        *,
        most_bytes: int | None = None,
    ) -> Result:
        """What `make` makes of the validated body, in a thread. Raises ApiError.

        Where images or sounds are elsewhere, they are fetched, and where sounds are not decoded, they are; then it is
        made again with them in the request's context.

        `most_bytes`: what the body may have; without it, what the engine's longest prompts may.

        While no other request is open, a body of the first lane is validated at once, and made into what it asks for
        where its prompt is encoded already: 2 ms at most, in which nobody is kept waiting, and the change of threads,
        there and back, is longer than most of it.
        """
        context = RequestContext.of(request.scope)
        data = await self._read(request, context.account, most_bytes)
        context.body_bytes = len(data)

        body: Body | None = None  # validated once
        if self._state.open_requests == 1 and len(data) <= _LANES[0][0]:
            body = validated(data, body_type, self._policy)
            if body.is_encoded:
                return make(body)

        def work() -> Result:
            nonlocal body
            if body is None:
                body = validated(data, body_type, self._policy)
            return make(body)

        lane = next((lane for most, lane in self._lanes if len(data) <= most), self._last_lane)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(lane, work)
        except MediaElsewhere as wanted:
            await fetch_media(wanted, self._state.model, context)
        except SoundsUndecoded as undecoded:
            await decode_sounds(undecoded, self._state.model, context)
            return await loop.run_in_executor(lane, work)
        try:
            return await loop.run_in_executor(lane, work)
        except SoundsUndecoded as undecoded:
            await decode_sounds(undecoded, self._state.model, context)
        return await loop.run_in_executor(lane, work)

    async def form(
        self,
        request: Request,
        form_type: type[Body],
        read: Callable[[bytes], dict[str, Any]],
        *,
        most_bytes: int,
        allowed_origins: Sequence[str],
    ) -> Body:
        """The validated form that `read` makes of the body, in a thread. Raises ApiError. Pages of other sites may send
        forms without asking first, so a browser's own word for where it comes from is looked at."""
        context = RequestContext.of(request.scope)
        _require_origin(request, allowed_origins)
        data = await self._read(request, context.account, most_bytes, _require_plain)
        context.body_bytes = len(data)
        return await asyncio.get_running_loop().run_in_executor(
            self._last_lane, lambda: validated_document(read(data), form_type, self._policy)
        )

    async def _read(
        self,
        request: Request,
        account: BodyAccount,
        most_bytes: int | None,
        require: Callable[[Request], None] | None = None,
    ) -> bytes:
        limit = most_bytes or _largest(self._state)
        (require or _require_json)(request)
        _require_length(request, limit)
        received = bytearray()
        try:
            async with (
                asyncio.timeout(self._total_s),
                aclosing(_Pieces(self._state, self._gap_s).of(request)) as pieces,
            ):
                async for piece in pieces:
                    if len(received) + len(piece) > limit:
                        raise _too_large(f"has more than {limit} bytes", limit)
                    account.hold(len(received) + len(piece))
                    received += piece
        except TimeoutError as error:
            raise ApiError(
                f"the body did not arrive in time ({len(received)} bytes did); at most {self._gap_s:g} s may pass "
                f"between two pieces of it and {self._total_s:g} s in all",
                status=408, code="request_timeout",
            ) from error  # fmt: skip
        except ClientDisconnect as error:
            raise ApiError("the client left before its request was complete", status=499) from error
        return bytes(received)


def _largest(state: ServerState) -> int:
    model = state.model
    return largest_body_bytes(state.serving_engine().max_model_len, model.images, model.audio)


class _Pieces:
    """The pieces of a body while they arrive. Raises TimeoutError, ClientDisconnect, and ApiError after a drain."""

    def __init__(self, state: ServerState, gap_s: float) -> None:
        self._state = state
        self._gap_s = gap_s

    async def of(self, request: Request) -> AsyncGenerator[bytes, None]:
        last_call = asyncio.ensure_future(self._state.last_call.wait())
        piece: asyncio.Future[Any] | None = None
        try:
            more = True
            while more:
                piece = asyncio.ensure_future(request.receive())
                await asyncio.wait({piece, last_call}, timeout=self._gap_s, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done() and last_call.done():
                    await asyncio.wait({piece}, timeout=_LAST_BODIES_S)
                    if not piece.done():
                        raise ApiError(
                            "the server is stopping and the body of this request has not arrived; send it again",
                            status=503, code="unavailable",
                        )  # fmt: skip
                if not piece.done():
                    raise TimeoutError
                message = piece.result()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                more = message.get("more_body", False)
                yield message.get("body", b"")
        finally:
            last_call.cancel()
            if piece is not None:
                piece.cancel()


def validated(data: bytes, body_type: type[Body], policy: FieldPolicy) -> Body:
    """The body that `data` holds. Raises ApiError."""
    if (excess := structure_excess(data)) is not None:
        raise ApiError(f"the body holds {excess}; send fewer messages or prompts in one request", code="body_too_large")
    try:
        document = read_json(data)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(document, dict):
        raise ApiError(f"the body must be a JSON object, not {type(document).__name__}", code="invalid_json")
    return validated_document(document, body_type, policy)


def validated_document(document: dict[str, Any], body_type: type[Body], policy: FieldPolicy) -> Body:
    """The body that `document` is. Raises ApiError."""
    try:
        body = body_type.model_validate(document, context=policy)
        body.remember_session(document)
        return body
    except ValidationError as error:
        raise from_validation(error) from error


def _require_json(request: Request) -> None:
    """Also what keeps other sites' pages out: a browser sends no other origin JSON without asking first (CORS)."""
    given = request.headers.get("content-type", "")
    kind, _, parameters = given.partition(";")
    name, _, charset = parameters.strip().partition("=")
    is_utf8 = name.strip().lower() != "charset" or charset.strip(' "').lower() in ("utf-8", "utf8")
    if kind.strip().lower() != "application/json" or not is_utf8:
        raise ApiError(
            f"the content type {given[:80]!r} is not supported; send JSON with 'Content-Type: application/json'",
            status=415, code="unsupported_media_type",
        )  # fmt: skip
    _require_plain(request)


def _require_origin(request: Request, allowed: Sequence[str]) -> None:
    origin = request.headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        raise ApiError(
            f"pages of {origin[:80]!r} may not send forms here; allow their origin (--allowed-origins)",
            status=403, code="origin_not_allowed",
        )  # fmt: skip


def _require_plain(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            f"the content encoding {encoding[:40]!r} is not supported; send the body uncompressed",
            status=415, code="unsupported_media_type",
        )  # fmt: skip


def _require_length(request: Request, limit: int) -> None:
    length = request.headers.get("content-length")
    if length is not None and int(length) > limit:  # the HTTP parser has seen that it is a number
        raise _too_large(f"has {length} bytes", limit)


def _too_large(what: str, limit: int) -> ApiError:
    return ApiError(
        f"the request body {what}; with this context the limit is {limit}. Send fewer prompts per request",
        status=413, code="body_too_large",
    )  # fmt: skip
