"""API keys: who may ask. Keys are compared by their digests, all of them each time, in constant time."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from modelserve.errors import InvalidInput
from modelserve_worker.server.errors.error_response import error_response
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.key_digests import Stamp, file_stamp, is_known, key_digest
from modelserve_worker.server.http.management_keys import ADAPTERS_PATH, ManagementKeys
from modelserve_worker.server.http.request_context import RequestContext

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/ping", "/load", "/v1/plan"})
"""Without a key: what kubelets, load balancers, Prometheus and the operator read. None of it tells of a client."""

log = logging.getLogger(__name__)


class ApiKeys:
    """Keys given once, and those of a file with one key a line, which is read again when it changes.

    A file that cannot be read, or holds no key, while the server runs leaves the last keys in force: a Secret that is
    being replaced locks nobody out, and an emptied one lets nobody in. At the start it raises InvalidInput.
    """

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None, *, look_interval_s: float = 1.0) -> None:
        self._given = _digests(keys)
        self._file, self._look_interval_s = file, look_interval_s
        self._from_file: tuple[bytes, ...] = ()
        self._stamp: Stamp | None = None
        self._next_look_s = 0.0
        if file is not None:
            try:
                self._stamp = file_stamp(file)
                self._from_file = _read(file)
            except (OSError, ValueError) as error:
                raise InvalidInput(f"api key file {file}: {error}", field="api_key_file") from error

    @property
    def required(self) -> bool:
        return bool(self._given or self._file)

    def name_of(self, key: str) -> str | None:
        """A name for whoever has the key, which tells nothing of it; None when it is none of the keys."""
        self._look()
        digest = key_digest(key)
        known = is_known(digest, (*self._given, *self._from_file))
        return f"key-{digest.hex()[:8]}" if known else None

    def _look(self) -> None:
        now = time.monotonic()
        if self._file is None or now < self._next_look_s:
            return
        self._next_look_s = now + self._look_interval_s
        try:
            stamp = file_stamp(self._file)
            if stamp == self._stamp:
                return
            self._from_file = _read(self._file)
            self._stamp = stamp
            log.info("api keys: %s was read again, it has %d keys", self._file, len(self._from_file))
        except (OSError, ValueError) as error:
            if self._stamp is not None:  # once, until it can be read again
                log.error("api keys: %s: %s; the last keys stay in force", self._file, error)
            self._stamp = None


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def _read(file: Path) -> tuple[bytes, ...]:
    """Raises OSError, and ValueError where there is no key."""
    keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    digests = _digests(key for key in keys if key and not key.startswith("#"))
    if not digests:
        raise ValueError("it holds no key; write one key a line")
    return digests


class Authentication:
    """ASGI middleware: 401 unless a key comes as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, share_prefixes: bool = False, management: ManagementKeys | None = None
    ) -> None:
        """`share_prefixes`: requests with different keys read each other's cached prefixes. `management`: keys that
        open ADAPTERS_PATH, and nothing else."""
        self._management = management
        self._app = app
        self._keys = keys
        self._share_prefixes = share_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == ADAPTERS_PATH and self._manages(Headers(scope=scope)):
            RequestContext.of(scope).manages = True
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http" or not self._keys.required or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        name = self._keys.name_of(given) if given else None
        if name is None:
            what = "is none of this server's keys" if given else "is missing"
            message = f"the API key {what}; send it as 'Authorization: Bearer KEY'"
            error = ApiError(message, status=401, code="invalid_api_key")
            await error_response(error, scope["path"])(scope, receive, send)
            return
        context = RequestContext.of(scope)
        context.client = name
        context.tenant = "" if self._share_prefixes else name
        await self._app(scope, receive, send)

    def _manages(self, headers: Headers) -> bool:
        return self._management is not None and self._management.opens(headers.get("x-api-key", ""))
