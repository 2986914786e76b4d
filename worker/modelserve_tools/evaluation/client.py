"""The client of an OpenAI-compatible endpoint: one exercise in, one reply or one kind of failure out."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from modelserve.errors import first_fault
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.replies import (
    SHOWN_CHARACTERS,
    ChatCompletion,
    ModelCard,
    ModelList,
    Reply,
    error_text,
)

Body = TypeVar("Body", bound=BaseModel)

_FRAMING_TOKENS = 32  # turn marks, the channel's and the calls' special tokens, the end of the turn
_RETRIED_STATUS = frozenset({429, 503})
_TOO_LONG_STATUS = frozenset({400, 413, 422})
_TOO_LONG = re.compile(r"context[\s_-]*(length|size|window)", re.IGNORECASE)
_CONNECT_SECONDS = 10.0


class EndpointError(Exception):
    """The endpoint gave no answer to mark; the text says what came instead, `status` is that of its HTTP, if any."""

    status: int | None = None


class ContextTooLong(EndpointError):  # noqa: N818 - reads as the reason it states
    """The endpoint says that prompt and answer exceed its context length."""


class EndpointGone(EndpointError):  # noqa: N818 - reads as the reason it states
    """Nothing accepts connections at the address any more."""


@dataclass(frozen=True)
class Backoff:
    """Waits between attempts: `first_s` doubled each time up to `longest_s`, or what Retry-After asks within that."""

    attempts: int = 6
    first_s: float = 0.5
    longest_s: float = 8.0

    def seconds(self, attempt: int, *, asked: str | None = None) -> float:
        """The wait after attempt 0, 1, ... `asked` is a Retry-After header; only its form in seconds is followed."""
        own = self.first_s * 2.0**attempt
        return min(self.longest_s, max(own, float(asked)) if asked and asked.isdecimal() else own)


DEFAULT_BACKOFF = Backoff()


def open_http(base_url: str, *, api_key: str | None, timeout_s: float, connections: int) -> httpx.AsyncClient:
    """A connection pool for `base_url`, which ends in /v1 on most servers. `timeout_s` bounds one whole reply."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_SECONDS, timeout_s), pool=None),
        limits=httpx.Limits(max_connections=connections),
    )


def chat_body(exercise: Exercise, *, model: str, thinking_tokens: int = 0) -> dict[str, Any]:
    """The chat completion request. A text has at most as many tokens as UTF-8 bytes, so that max_tokens fits.

    Where thinking is asked for, a thought may take `thinking_tokens` more than the one that the exercise was made with.
    """
    answer = exercise.answer
    calls = "".join(f"{call.name}{dict(call.arguments)}" for call in answer.tool_calls)
    length = len(f"{answer.reasoning}{answer.content}{calls}".encode())
    body: dict[str, Any] = {
        "model": model,
        "messages": list(exercise.messages),
        "temperature": 0.0,
        "max_tokens": length + _FRAMING_TOKENS + (thinking_tokens if exercise.thinking else 0),
    }
    if exercise.tools:
        body["tools"] = list(exercise.tools)
    if exercise.thinking:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body


class ChatEndpoint:
    """Asks over an open connection pool. Only what another attempt can help is tried again, and not for ever.

    `clock` tells seconds, and `pause` waits so many.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        backoff: Backoff = DEFAULT_BACKOFF,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._http = http
        self._backoff = backoff
        self._clock, self._pause = clock, pause

    async def models(self) -> list[ModelCard]:
        """What is served, asked once. Raises EndpointError."""
        try:
            response = await self._http.get("models")
        except httpx.RequestError as error:
            raise EndpointGone(f"no answer from {self._http.base_url}models: {_reason(error)}") from error
        return _parsed(response, ModelList).data

    async def complete(self, body: dict[str, Any]) -> Reply:
        """The reply to a chat completion request. Raises EndpointError, ContextTooLong and EndpointGone."""
        completion, milliseconds = await self.post("chat/completions", body, ChatCompletion)
        return Reply.of(completion, milliseconds=milliseconds)

    async def post(self, path: str, body: dict[str, Any], answer: type[Body]) -> tuple[Body, float]:
        """The answer of a route, and the milliseconds of the attempt that brought it.

        `path` is below the base URL, or begins with "/" where the route is beside its /v1. Raises EndpointError,
        ContextTooLong and EndpointGone.
        """
        for attempt in range(self._backoff.attempts):
            last = attempt == self._backoff.attempts - 1
            started = self._clock()
            try:
                response = await self._http.post(self._url(path), json=body)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last:
                    raise EndpointGone(f"no connection to {self._http.base_url}: {_reason(error)}") from error
                wait = self._backoff.seconds(attempt)
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                if last:
                    raise EndpointError(f"the connection broke: {_reason(error)}") from error
                wait = self._backoff.seconds(attempt)
            except httpx.TimeoutException as error:
                raise EndpointError(f"no reply within {self._http.timeout.read:g} s; --timeout raises that") from error
            except httpx.RequestError as error:
                raise EndpointError(f"no reply: {_reason(error)}") from error
            else:
                if response.status_code not in _RETRIED_STATUS or last:
                    return _parsed(response, answer), (self._clock() - started) * 1000
                wait = self._backoff.seconds(attempt, asked=response.headers.get("retry-after"))
            await self._pause(wait)
        raise AssertionError("the last attempt returns or raises")

    def _url(self, path: str) -> httpx.URL | str:
        if not path.startswith("/"):
            return path
        base = self._http.base_url
        return base.copy_with(path=base.path.rstrip("/").removesuffix("/v1") + path)


def _parsed(response: httpx.Response, body_type: type[Body]) -> Body:
    """The body of a 200. Raises EndpointError."""
    if response.status_code != httpx.codes.OK:
        refusal = EndpointError(f"HTTP {response.status_code} from {response.request.url}: {error_text(response.text)}")
        refusal.status = response.status_code
        if response.status_code in _TOO_LONG_STATUS and _TOO_LONG.search(response.text):
            raise ContextTooLong(error_text(response.text))
        raise refusal
    try:
        return body_type.model_validate_json(response.content)
    except ValidationError as error:
        field, message = first_fault(error)
        what = f"{response.request.url} answered no {body_type.__name__}: {field or 'body'}: {message}"
        raise EndpointError(f"{what}; it starts {response.text[:SHOWN_CHARACTERS]!r}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
