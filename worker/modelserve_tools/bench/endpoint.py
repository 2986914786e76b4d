"""The endpoint under load, over aiohttp: one request in, one record out. Nothing is tried twice.

httpx, which the evaluation uses, took 85 microseconds of CPU per streamed event where this takes 22 (32 streams of 170
events a second): half a core at the rates that are to be measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import ValidationError

from modelserve_tools.bench.answer import Answer, BadStream
from modelserve_tools.bench.flags import CHAT, COMPLETIONS
from modelserve_tools.bench.record import Record
from modelserve_tools.bench.workload import Ask
from modelserve_tools.evaluation.replies import ModelList, error_text

_CONNECT_SECONDS = 10.0
_ROUTES = {COMPLETIONS: "completions", CHAT: "chat/completions"}
_NOT_IMPLEMENTED = 501  # some servers' word for a route that they do not have


class NoEndpoint(Exception):  # noqa: N818 - reads as the reason it states
    """Nothing was asked: the address does not say what it serves."""


def api_url(base_url: str) -> str:
    """The address of the API without its last slash; /v1 is added to an address without a path."""
    trimmed = base_url.rstrip("/")
    return trimmed if trimmed.count("/") > 2 else f"{trimmed}/v1"


def open_session(*, api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A session with as many connections as are asked for; `timeout_s` bounds one whole answer."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_SECONDS, timeout_s)),
        headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
    )


@dataclass(frozen=True)
class Endpoint:
    """`url` ends in /v1 or what stands in its place; requests go to its completions, or with `chat` chat/completions.

    `clock` gives seconds; the start of a load is read from the same one.
    """

    session: aiohttp.ClientSession
    url: str
    chat: bool
    clock: Callable[[], float] = time.perf_counter

    async def models(self) -> Any:
        """The answer to GET models, as it came. Raises NoEndpoint."""
        try:
            async with self.session.get(f"{self.url}/models") as response:
                text = await response.text()
                if response.status != 200:
                    raise NoEndpoint(f"HTTP {response.status} from {self.url}/models: {error_text(text)}")
                ModelList.model_validate_json(text)
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoEndpoint(f"no answer from {self.url}/models: {_reason(error)}") from error
        except ValidationError as error:
            raise NoEndpoint(f"{self.url}/models answered no list of models; it starts {text[:80]!r}") from error

    async def version(self) -> Any:
        """The answer to GET /version, None where there is none."""
        try:
            async with self.session.get(f"{self.url.removesuffix('/v1')}/version") as response:
                return await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def probe(self, api: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status of a small request, and the message of an error. Raises NoEndpoint where the server answers none."""
        route = f"{self.url}/{_ROUTES[api]}"
        try:
            async with self.session.post(route, json=body) as response:
                said = error_text(await response.text(errors="replace")) if response.status != 200 else ""
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoEndpoint(f"no answer from {route}: {_reason(error)}") from error
        if response.status in (401, 403, 429) or (response.status >= 500 and response.status != _NOT_IMPLEMENTED):
            raise NoEndpoint(f"HTTP {response.status} from {route}: {said}")
        return response.status, said

    async def send(self, ask: Ask, *, began: float, planned: float | None = None) -> Record:
        """`began` is the start of the load on `clock`, `planned` the arrival after it."""
        answer = Answer()
        sent = self.clock()
        kind = error = None
        try:
            await self._stream(ask, answer)
        except BadStream as failure:
            kind, error = failure.kind, str(failure)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as failure:
            kind, error = "no connection", _reason(failure)
        except TimeoutError:
            limit = self.session.timeout.total
            kind, error = "timeout", f"no whole answer within {limit:g} s; --timeout raises that"
        except aiohttp.ClientError as failure:
            kind, error = "connection broke", _reason(failure)
        ended = self.clock()
        counted = answer.completion_tokens
        tokens = len(answer.times) if counted is None else counted
        return Record(
            number=ask.number,
            turn=ask.turn,
            input_tokens=ask.input_tokens,
            sent_s=sent - began,
            late_s=0.0 if planned is None else max(0.0, sent - began - planned),
            end_s=ended - sent,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=tokens,
            usage_sent=counted is not None,
            event_s=[at - sent for at in answer.times],
            finish_reason=answer.finish_reason,
            wrong_length=None if kind else _wrong_length(ask, tokens, answer.finish_reason),
            error_kind=kind,
            error=error,
            answer="".join(answer.text) if ask.follow is not None else "",
        )

    async def _stream(self, ask: Ask, answer: Answer) -> None:
        route = _ROUTES[CHAT if self.chat else COMPLETIONS]
        headers = {"content-type": "application/json"}
        async with self.session.post(f"{self.url}/{route}", data=ask.body, headers=headers) as response:
            if response.status != 200:
                raise BadStream(f"HTTP {response.status}", error_text(await response.text(errors="replace")))
            async for data in response.content.iter_any():
                answer.feed(data, self.clock())
            answer.close()


def _wrong_length(ask: Ask, tokens: int, finish_reason: str | None) -> str | None:
    if tokens == ask.output_tokens or (tokens < ask.output_tokens and not ask.exact):
        return None
    return f"{tokens} tokens where {ask.output_tokens} were asked for (finish_reason {finish_reason})"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
