"""The engine behind the server: a process of its own, and the front end's side of the wire.

HTTP, JSON, templates and text run in the front end; the engine has an interpreter to itself, so no answer that is
being written keeps a step from its launch. One frame a step comes back. It is read on the event loop and handed to the
streams it belongs to, each of which is woken once however many of its sequences went on.

What ends the engine ends every open stream with EngineDead:
- The engine says so (a fatal step, a rank that died) in a Stopped message.
- The process is gone: the socket is at its end in the same moment, whoever killed it.
- It hangs: streams are open and no step has ended for the deadline that the engine named (engine/deadline.py). This is
  watched here because nothing that hangs in the engine's process, the interpreter lock included, can stop it here.
- Its process says nothing at all any more, not even heartbeats, which no step can hold up: it is stopped or stuck.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from modelserve.errors import InvalidInput
from modelserve.quality.cache_quality import CacheQuality
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_worker.engine.adapter_calls import AdapterCalls
from modelserve_worker.engine.child import BuildEngine, run_child
from modelserve_worker.engine.deadline import HEARTBEAT_S, SILENT_HEARTBEATS
from modelserve_worker.engine.fair_queue import FairLimits, FairQueue
from modelserve_worker.engine.measured_drafts import measured_drafts
from modelserve_worker.engine.measured_speed import MeasuredSpeed
from modelserve_worker.engine.output_stream import OutputStream
from modelserve_worker.engine.wire import (
    Abort,
    AdapterAnswer,
    Command,
    FrameReader,
    HoldingBack,
    Loading,
    Ready,
    StartFailed,
    StepReport,
    Stop,
    Stopped,
    encode,
)
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import FinishReason, Request, RequestOutput
from modelserve_worker.scheduling.stats import EngineStats, StepEvents
from modelserve_worker.terminal_error import TerminalError

_BUFFER_BYTES = 1 << 20  # some hundred steps: a front end that is busy for a moment does not hold up the engine
_LAST_WORDS_S = 2.0  # from the end of the socket to the exit code of its process
_GRACE_S = 8.0  # for the engine to end its step and its ranks; with closing connections below the pod's 15 s
_WATCHES_PER_DEADLINE = 20
# Rounds that threads of an operation on a CPU spin before they sleep, while they wait for each other; read when torch
# is loaded. In the 300,000 of its library they take the cores from those they wait for as soon as anything else runs
# there: four tokens of a small model took 3 s on two busy cores, and take 0.3 s. 20,000 seldom end on idle cores.
_SPIN_VARIABLE, _SPIN_ROUNDS = "GOMP_SPINCOUNT", "20000"

logger = logging.getLogger(__name__)


class EngineStartFailed(EngineDead):
    """The engine's process did not come up. `exit_code` is this process's: 1 when a restart may help."""

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class EngineProcess(asyncio.Protocol):
    """EngineClient over an engine in a child process, which starts to build it at once. For one event loop."""

    max_model_len: int
    silent_heartbeats = SILENT_HEARTBEATS  # before it counts as stuck

    def __init__(
        self,
        build: BuildEngine,
        limits: FairLimits = FairLimits(),  # noqa: B008 - frozen
        *,
        without_drafter: str | None = None,
    ) -> None:
        """`without_drafter`: why the drafter that was asked for is left out."""
        self._queue = FairQueue(limits)
        self._told_held_back = 0
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket = ours
        if "OMP_WAIT_POLICY" not in os.environ:  # the user's word on the same
            os.environ.setdefault(_SPIN_VARIABLE, _SPIN_ROUNDS)  # the child has it before it has a line of Python
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_child, args=(theirs, build), name="modelserve-engine"
        )  # not a daemon: it has children itself
        self._process.start()
        theirs.close()  # so that our end of the pair sees the child's death
        self._transport: asyncio.WriteTransport | None = None
        self._frames = FrameReader()
        self._streams: dict[str, OutputStream | None] = {}  # None: aborted, its last output has not come
        self._death: str | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._on_loading: Callable[[int, int], None] | None = None
        self._stats = EngineStats()
        self._admitted: dict[
            str, tuple[float, int]
        ] = {}  # when, and tokens cached, of those that have said nothing yet
        self.on_steps: Callable[[StepEvents], None] | None = None  # hears of each step
        self._speed = MeasuredSpeed()
        self._plan_report: Mapping[str, Any] = {}
        self._without_drafter = without_drafter
        self._heard_s = 0.0  # loop time of the last sign that steps end, or of the first request of an idle engine
        self._silent_heartbeats = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.adapters = AdapterCalls(self._send)
        self._trial: str | None = None  # the request of a trial that is computed
        self.cache_quality: CacheQuality | None = None  # once it was measured

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def start(self, on_loading: Callable[[int, int], None]) -> Ready:
        """Wait until the engine takes requests; `on_loading` hears (bytes done, bytes in all) of the weights.

        Raises TerminalError when no restart can help, EngineStartFailed otherwise.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._on_loading = on_loading
        self._socket.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=self._socket)
        ready = await self._ready
        self.max_model_len, self._plan_report, self._stats = ready.max_model_len, ready.plan_report, ready.stats
        self.run_beside(self._watch(ready.step_deadline_s))
        self.run_beside(self._watch_heartbeats())
        return ready

    async def generate(
        self, requests: Sequence[Request], *, client: str = ""
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """See EngineClient. The engine's refusal of one request ends the whole call, with InvalidInput."""
        if self._death is not None:
            raise EngineDead(self._death)
        for request in requests:
            if request.request_id in self._streams:
                raise InvalidInput(f"request id {request.request_id!r} is in use; choose another", field="request_id")
        self._queue.add(client, requests)
        self._end_trial()
        stream = OutputStream()
        if not self._streams:
            self._heard_s = asyncio.get_running_loop().time()
        self._streams |= {request.request_id: stream for request in requests}
        self._send_next()
        try:
            still_open = len(requests)
            while still_open:
                await stream.changed()
                arrived = stream.take()
                for output in arrived:
                    if output.finish_reason is not None:
                        still_open -= 1
                yield arrived
        finally:
            for request in requests:
                if self._streams.get(request.request_id) is stream:
                    if self._queue.remove(request.request_id):
                        del self._streams[request.request_id]
                    else:
                        self._streams[request.request_id] = None
                        self._send(Abort(request.request_id))
            self._tell_held_back()

    def abort(self, request_id: str) -> None:
        """See EngineClient. The request's last output, with ABORT, still comes."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if self._queue.remove(request_id):
            del self._streams[request_id]
            stream.put(RequestOutput(request_id, (), FinishReason.ABORT))
            self._tell_held_back()
        else:
            self._send(Abort(request_id))

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not self._streams

    async def run_trial(self, request: Request) -> RequestOutput | None:
        """Compute a request with a `trial` on an idle engine: its last output, or None where somebody asked for
        something before it was done, behind whose first step at most one slice of it is left. Raises EngineDead."""
        if self._death is not None:
            raise EngineDead(self._death)
        if not self.idle:
            return None
        stream, self._trial = OutputStream(), request.request_id
        self._heard_s = asyncio.get_running_loop().time()
        self._streams[request.request_id] = stream
        self._send(request)
        try:
            while True:
                await stream.changed()
                for output in stream.take():
                    if output.finish_reason is not None:
                        return output if output.finish_reason is FinishReason.LENGTH else None
        finally:
            self._end_trial()

    def _end_trial(self) -> None:
        """Whoever asks for something goes first: the command that ends the trial is read before theirs."""
        stream = self._streams.get(self._trial) if self._trial is not None else None
        if stream is not None and self._trial is not None:
            self._streams[self._trial] = None
            self._send(Abort(self._trial))
            stream.put(RequestOutput(self._trial, (), FinishReason.ABORT))
        self._trial = None

    def is_alive(self) -> bool:
        return self._death is None

    def plan_report(self) -> dict[str, Any]:
        speed = [steps.to_json() for steps in self._speed.report()]
        drafts = measured_drafts(self._stats, problem=self._without_drafter)
        told = {"drafts": drafts.to_json()} if drafts is not None else {}
        if self.cache_quality is not None:
            told["cacheQuality"] = self.cache_quality.to_json()
        return {**self._plan_report, **({"speed": speed} if speed else {}), **told}

    def stats(self) -> EngineStats:
        """The state after the last step that was reported, with those that wait for their turn on this side."""
        return self._stats._replace(num_waiting=self._stats.num_waiting + self._queue.num_waiting)

    async def shutdown(self, reason: str = "the engine was shut down") -> None:
        """End the process after its current step, and fail what is still open with EngineDead(reason). Idempotent."""
        ready = self._ready  # cancelled: whoever waited for the start has given up, and the engine still loads
        started = ready is not None and ready.done() and not ready.cancelled() and self._death is None
        self._die(reason)
        if started:
            self._send(Stop())
            await asyncio.to_thread(self._process.join, _GRACE_S)
        self._process.kill()  # while it loads, nobody waits for it
        await asyncio.to_thread(self._process.join)
        for task in self._tasks:
            task.cancel()
        if self._transport is not None:
            self._transport.close()

    def kill(self) -> None:
        """End the process at once, for a start that fails on this side. Idempotent."""
        self._process.kill()
        self._process.join()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._silent_heartbeats = 0
        for message in self._frames.feed(data):
            self._receive(message)

    def connection_lost(self, _: Exception | None) -> None:
        self.run_beside(self._tell_exit())

    def _receive(self, message: Any) -> None:
        if self._death is not None:
            return  # what comes late was answered with the death
        if isinstance(message, StepReport):
            self._heard_s = asyncio.get_running_loop().time()
            self._stats = message.stats
            self._deliver(message)
        elif isinstance(message, AdapterAnswer):
            self.adapters.answered(message)
        elif isinstance(message, Stopped):
            self._die(message.text)
        elif isinstance(message, Loading):
            if self._on_loading is not None:
                self._on_loading(message.done_bytes, message.total_bytes)
        elif self._ready is not None and not self._ready.done():
            if isinstance(message, Ready):
                self._ready.set_result(message)
            else:
                self._ready.set_exception(_start_error(message))

    def _deliver(self, report: StepReport) -> None:
        """Hand out one step's outputs. An id stays in use until its last output, so streams never mix."""
        self._admitted.update({name: (at_s, cached) for name, at_s, cached in report.events.admitted})
        self._speed.add(report.events.timed_steps)
        if self.on_steps is not None:
            self.on_steps(report.events)
        for output in report.all_outputs():
            request_id, told = output.request_id, output
            stream = self._streams[request_id]
            if request_id in self._admitted:  # its first output
                admitted_s, cached_tokens = self._admitted.pop(request_id)
                told = output._replace(admitted_s=admitted_s, cached_tokens=cached_tokens)
                self._queue.started(request_id)
            if output.finish_reason is not None:
                del self._streams[request_id]
                self._queue.ended(request_id)
            if stream is not None:
                stream.put(told)
        for refusal in report.refusals:
            self._queue.ended(refusal.request_id)
            stream = self._streams.pop(refusal.request_id)
            if stream is not None:
                stream.fail(InvalidInput(refusal.text, field=refusal.field))
        self._send_next()

    def _send_next(self) -> None:
        for request in self._queue.take():
            self._send(request)
        self._tell_held_back()

    def _tell_held_back(self) -> None:
        """Whoever came, went or left has changed what waits here, and no step is to be as long as for what it was."""
        tokens = self._queue.held_back_tokens
        if tokens != self._told_held_back:
            self._told_held_back = tokens
            self._send(HoldingBack(tokens))

    def _send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(command))

    def _die(self, reason: str) -> None:
        """Every open stream hears the first reason; later ones are its consequences."""
        if self._death is None:
            self._death = reason
            for stream in self._streams.values():
                if stream is not None:
                    stream.fail(EngineDead(reason))
            self.adapters.fail(reason)
        self._streams.clear()

    async def _tell_exit(self) -> None:
        """The socket is at its end; say how the process ended, if it said nothing itself."""
        await asyncio.to_thread(self._process.join, _LAST_WORDS_S)
        code = self._process.exitcode
        how = "has closed its socket" if code is None else f"was killed by signal {-code}" if code < 0 else (
            f"ended with exit code {code}"
        )  # fmt: skip
        if self._death is None:
            logger.critical("the engine's process %s", how)
        self._die(f"the engine's process {how}")
        if self._ready is not None and not self._ready.done():
            terminal = code == TERMINAL_EXIT_CODE  # it has written the termination message itself
            exit_code = TERMINAL_EXIT_CODE if terminal else 1
            self._ready.set_exception(EngineStartFailed(f"the engine's process {how}", exit_code=exit_code))

    async def _watch(self, deadline_s: float) -> None:
        """Notice a hang: a request is open, and no step has ended for `deadline_s` seconds."""
        loop = asyncio.get_running_loop()
        while self._death is None:
            await asyncio.sleep(deadline_s / _WATCHES_PER_DEADLINE)
            silent_s = loop.time() - self._heard_s
            if self._streams and silent_s > deadline_s and self._death is None:
                reason = (
                    f"no step has ended for {silent_s:.0f} s with {len(self._streams)} requests open "
                    f"(limit {deadline_s:g} s): the device or a rank hangs"
                )
                self._give_up(reason)

    async def _watch_heartbeats(self) -> None:
        """Notice a process that is stopped, or whose interpreter is stuck, with or without requests."""
        while self._death is None:
            await asyncio.sleep(HEARTBEAT_S)
            self._silent_heartbeats += 1
            if self._silent_heartbeats > self.silent_heartbeats and self._death is None:
                self._give_up(
                    f"the engine's process has said nothing for {self.silent_heartbeats * HEARTBEAT_S:g} s: "
                    "it is stopped or stuck"
                )

    def _give_up(self, reason: str) -> None:
        logger.critical("%s; the engine's process is killed", reason)
        self._die(reason)
        self._process.kill()

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it on the event loop until it ends, or the engine is shut down."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _start_error(message: StartFailed) -> Exception:
    if message.reason is None:
        return EngineStartFailed(message.text)
    return TerminalError(
        message.reason, message.text, shortfall_bytes=message.shortfall_bytes, measured=message.measured
    )
