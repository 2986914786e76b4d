"""Calls of the front end that are about adapters, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from modelserve.errors import InvalidInput
from modelserve_worker.engine.wire import (
    AdapterAnswer,
    AdapterRead,
    PinAdapters,
    ReadAdapter,
    RemoveAdapter,
    TellStrengths,
)
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import AdapterStrength

_Answer = TypeVar("_Answer")


class AdapterCalls:
    """Of one event loop."""

    def __init__(self, send: Callable[[ReadAdapter | RemoveAdapter | PinAdapters | TellStrengths], None]) -> None:
        self._send = send
        self._reads: dict[str, asyncio.Future[str | None]] = {}
        self._strengths: dict[str, asyncio.Future[tuple[AdapterStrength, ...]]] = {}
        self._death: str | None = None

    async def read(self, digest: str, directory: str) -> None:
        """See AdapterClient."""
        problem = await self._answer(self._reads, ReadAdapter(digest, directory))
        if problem is not None:
            raise InvalidInput(problem, field="adapter")

    async def strengths(self, digest: str) -> tuple[AdapterStrength, ...]:
        """See AdapterClient."""
        return await self._answer(self._strengths, TellStrengths(digest))

    def remove(self, digest: str) -> None:
        """See AdapterClient."""
        self._send(RemoveAdapter(digest))

    def pin(self, digests: frozenset[str]) -> None:
        """See AdapterClient."""
        self._send(PinAdapters(digests))

    def answered(self, message: AdapterAnswer) -> None:
        if isinstance(message, AdapterRead):
            _resolve(self._reads, message.digest, message.problem)
        else:
            _resolve(self._strengths, message.digest, message.strengths)

    def fail(self, reason: str) -> None:
        """The engine is gone."""
        self._death = reason
        _fail(self._reads, reason)
        _fail(self._strengths, reason)

    async def _answer(self, asked: dict[str, asyncio.Future[_Answer]], command: ReadAdapter | TellStrengths) -> _Answer:
        """Of an adapter that is asked for already, the answer to that."""
        if self._death is not None:
            raise EngineDead(self._death)
        answer = asked.get(command.digest)
        if answer is None:
            answer = asked[command.digest] = asyncio.get_running_loop().create_future()
            self._send(command)
        return await asyncio.shield(answer)


def _resolve(asked: dict[str, asyncio.Future[_Answer]], digest: str, value: _Answer) -> None:
    answer = asked.pop(digest, None)
    if answer is not None and not answer.done():
        answer.set_result(value)


def _fail(asked: dict[str, asyncio.Future[_Answer]], reason: str) -> None:
    for answer in asked.values():
        if not answer.done():
            answer.set_exception(EngineDead(reason))
    asked.clear()
