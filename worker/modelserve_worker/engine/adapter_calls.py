"""Calls of the front end that are about adapters, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from modelserve.errors import InvalidInput
from modelserve_worker.engine.wire import AdapterRead, ReadAdapter, RemoveAdapter
from modelserve_worker.engine_client import EngineDead


class AdapterCalls:
    """Of one event loop."""

    def __init__(self, send: Callable[[ReadAdapter | RemoveAdapter], None]) -> None:
        self._send = send
        self._open: dict[str, asyncio.Future[str | None]] = {}
        self._death: str | None = None

    async def read(self, digest: str, directory: str) -> None:
        """See AdapterClient."""
        if self._death is not None:
            raise EngineDead(self._death)
        answer = self._open.get(digest)
        if answer is None:
            answer = self._open[digest] = asyncio.get_running_loop().create_future()
            self._send(ReadAdapter(digest, directory))
        problem = await asyncio.shield(answer)
        if problem is not None:
            raise InvalidInput(problem, field="adapter")

    def remove(self, digest: str) -> None:
        """See AdapterClient."""
        self._send(RemoveAdapter(digest))

    def answered(self, message: AdapterRead) -> None:
        answer = self._open.pop(message.digest, None)
        if answer is not None and not answer.done():
            answer.set_result(message.problem)

    def fail(self, reason: str) -> None:
        """The engine is gone."""
        self._death = reason
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))
        self._open.clear()
