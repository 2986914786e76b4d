"""What the engine has said to one call and nobody has taken yet."""

from __future__ import annotations

import asyncio

from modelserve_worker.request import RequestOutput


class OutputStream:
    """What has come for the requests of one `generate` call and has not been taken."""

    __slots__ = ("_arrived", "_failure", "_waiter")

    def __init__(self) -> None:
        self._arrived: list[RequestOutput] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._arrived.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._wake()

    def changed(self) -> asyncio.Future[None]:
        """Done as soon as `take` has something, for the one task that calls both."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._arrived or self._failure is not None:
            self._waiter.set_result(None)
        return self._waiter

    def take(self) -> list[RequestOutput]:
        """What has come since the last call; behind all of it, the failure is raised."""
        if self._failure is not None and not self._arrived:
            raise self._failure
        arrived, self._arrived = self._arrived, []
        return arrived

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():  # done: woken already, or its task is cancelled
            self._waiter.set_result(None)
