"""The engine behind the server: a thread runs the loop, asyncio generators hand out what it produces.

The thread owns engine, scheduler and runner; the event loop owns the streams. They meet in two places only: an inbox
that the thread empties before each step, and one call_soon_threadsafe per step that carries the step's outputs back.
An idle thread sleeps in the inbox.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from modelserve.errors import InvalidInput
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import Request, RequestOutput
from modelserve_worker.scheduling.stats import EngineStats

logger = logging.getLogger(__name__)

_Command = Callable[[], RequestOutput | None]


class AsyncEngine:
    """EngineClient over one Engine. Use it from one event loop; it may be built in any thread."""

    def __init__(self, engine: Engine, *, plan_report: Mapping[str, Any]) -> None:
        self.max_model_len = engine.scheduler.limits.max_model_len
        self._engine = engine
        self._plan_report = dict(plan_report)
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None ends the thread
        self._streams: dict[str, asyncio.Queue[RequestOutput | None]] = {}  # None: the engine is dead
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: str | None = None
        self._draining = False
        self._stats = engine.scheduler.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request until one carries a finish_reason; closing the generator aborts it.

        Raises, before it returns: InvalidInput for a request that could never run, EngineDead when the engine is dead
        or takes no more requests. The generator raises InvalidInput when the id is in use, EngineDead when the engine
        dies.
        """
        self._check_open()
        self._engine.scheduler.validate(request)
        return self._stream(request)

    async def abort(self, request_id: str) -> None:
        """End a request with FinishReason.ABORT; unknown or finished ids are ignored."""
        if request_id in self._streams:
            self._inbox.put(lambda: self._engine.scheduler.abort(request_id))

    def is_alive(self) -> bool:
        return self._death is None

    def plan_report(self) -> dict[str, Any]:
        return self._plan_report

    def stats(self) -> EngineStats:
        """The state after the last step. Any thread may ask."""
        return self._stats

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for the open ones; after `timeout_s` seconds abort those. True: all ended."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._no_streams.wait()
        except TimeoutError:
            for request_id in self._streams:
                await self.abort(request_id)
            return False
        return True

    async def shutdown(self) -> None:
        """End the thread after its current step, release the runner, and fail what is still open with EngineDead."""
        self._draining = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_open(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)
        if self._draining:
            raise EngineDead("the engine is draining and takes no more requests; send it to another replica")

    async def _stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self._check_open()
        if request.request_id in self._streams:
            raise InvalidInput(f"request id {request.request_id!r} is in use; choose another", field="request_id")
        self._loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._streams[request.request_id] = outputs
        self._no_streams.clear()
        self._inbox.put(lambda: self._engine.scheduler.add(request))
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if output is None:
                    raise EngineDead(self._death)
                finished = output.finish_reason is not None
                yield output
        finally:
            if self._streams.get(request.request_id) is outputs:  # its last output has not come
                self._inbox.put(lambda: self._engine.scheduler.abort(request.request_id))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand out one step's outputs. An id stays in use until its last output, so streams never mix."""
        for output in outputs:
            self._streams[output.request_id].put_nowait(output)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
        self._note_streams()

    def _fail_streams(self) -> None:
        for stream in self._streams.values():
            stream.put_nowait(None)
        self._streams.clear()
        self._note_streams()

    def _note_streams(self) -> None:
        if not self._streams:
            self._no_streams.set()

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._publish(self._engine.step())
            self._death = "the engine was shut down"
        except EngineDead as error:
            self._death = str(error)
        except Exception as error:  # whatever it was, every waiter must hear of it
            self._death = f"the engine loop failed: {type(error).__name__}: {error}"
            logger.critical("the engine loop failed", exc_info=error)
        self._post(self._fail_streams)
        self._engine.runner.shutdown()

    def _take_commands(self) -> bool:
        """Run what is in the inbox; while there is no other work, wait for more. False: the thread is to end."""
        outputs: list[RequestOutput] = []
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work and not outputs)
            except queue.Empty:
                self._publish(outputs)
                return True
            if command is None:
                return False
            if output := command():
                outputs.append(output)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        self._stats = self._engine.scheduler.stats()  # first: whoever has its last token sees its pages returned
        if outputs:
            self._post(lambda: self._deliver(outputs))

    def _post(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the event loop. A closed loop has no one left to hear of it."""
        if self._loop:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback)
