"""The engine's side of the wire: take commands, step, report; nothing else runs in this process.

One thread does all of it, so nothing competes for the interpreter between a step's result and the next launch. While
there is work it looks into the socket without waiting, one system call a step; an idle engine sleeps on it, and looks
once a second whether its device and its ranks are still there.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from typing import Any

from modelserve.errors import InvalidInput
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine.wire import (
    Abort,
    AdapterRead,
    AdapterStrengths,
    Command,
    FrameReader,
    HoldingBack,
    PinAdapters,
    ReadAdapter,
    Refusal,
    RemoveAdapter,
    StepReport,
    Stop,
    Stopped,
    TellStrengths,
    encode,
)
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import FinishReason, Request, RequestOutput

_RECEIVE_BYTES = 1 << 20
_IDLE_CHECK_S = 1.0
_STUCK_PAUSE_S = 0.001  # between looks at a scheduler that has requests and schedules none of them

logger = logging.getLogger(__name__)


class FrontEndSocket:
    """The engine's end of the socket pair, in blocking mode. Any thread may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = FrameReader()
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises OSError when the front end is gone."""
        frame = encode(message)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> list[Command]:
        """Commands that have come, without waiting. Raises EOFError when the front end is gone."""
        commands: list[Command] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return commands
            if not data:
                raise EOFError("the front end has closed its end")
            commands += self._frames.feed(data)

    def pause(self, seconds: float) -> None:
        """Sleep until something comes, at most `seconds`."""
        select.select([self._socket], [], [], seconds)


class EngineLoop:
    """Runs one engine until the front end stops it or goes away, or the engine dies."""

    def __init__(self, engine: Engine, front_end: FrontEndSocket) -> None:
        self._engine = engine
        self._front_end = front_end

    def run(self) -> None:
        """Ends with the runner shut down and, unless the front end is gone, with a Stopped that says why."""
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._step()
            reason = "the engine was shut down"
        except EngineDead as error:
            reason = str(error)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            reason = "the front end is gone"
        except Exception as error:  # whatever it was, every waiter must hear of it
            reason = f"the engine loop failed: {type(error).__name__}: {error}"
            logger.critical("the engine loop failed", exc_info=error)
        try:
            self._front_end.send(Stopped(reason))
        except OSError:
            logger.warning("the front end ended before the engine")
        self._engine.runner.shutdown()

    def _step(self) -> None:
        before = self._engine.steps_done
        outputs = self._engine.step()
        if outputs or self._engine.steps_done != before:
            self._report(outputs, [])
        elif not self._engine.has_work_in_flight:
            self._front_end.pause(_STUCK_PAUSE_S)

    def _take_commands(self) -> bool:
        """Carry out what has come; with nothing else to do, wait for more. False: the engine is to end."""
        if not self._engine.has_work:
            self._front_end.pause(_IDLE_CHECK_S)
            self._engine.runner.check()  # a rank that dies now would otherwise be found by the next request
        outputs: list[RequestOutput] = []
        refusals: list[Refusal] = []
        for command in self._front_end.receive():
            if isinstance(command, Stop):
                return False
            if isinstance(command, HoldingBack):
                self._engine.scheduler.held_back.tell(command.prompt_tokens)
                continue
            if isinstance(command, ReadAdapter):
                self._read_adapter(command)
                continue
            if isinstance(command, PinAdapters):
                self._engine.scheduler.adapters.pin(command.digests)
                continue
            if isinstance(command, TellStrengths):
                told = self._engine.adapter_strengths(command.digest)
                self._front_end.send(AdapterStrengths(command.digest, told))
                continue
            if isinstance(command, RemoveAdapter):
                self._engine.scheduler.adapters.remove(command.digest)
                continue
            try:
                output = self._carry_out(command)
            except InvalidInput as error:
                refusals.append(Refusal(command.request_id, str(error), error.field))
            except Exception as error:  # a fault over one request is that request's, and no one else's
                logger.exception("request %s failed", command.request_id)
                text = f"the engine cannot take this request: {type(error).__name__}: {error}"
                outputs.append(RequestOutput(command.request_id, (), FinishReason.ERROR, error=text))
            else:
                outputs += [output] if output is not None else []
        if outputs or refusals:
            self._report(outputs, refusals)
        return True

    def _read_adapter(self, command: ReadAdapter) -> None:
        def answer(problem: str | None) -> None:
            with contextlib.suppress(OSError):  # the front end is gone, which the loop finds
                self._front_end.send(AdapterRead(command.digest, problem))

        self._engine.read_adapter(command.digest, command.directory, answer)

    def _carry_out(self, command: Request | Abort) -> RequestOutput | None:
        if isinstance(command, Abort):
            return self._engine.abort(command.request_id)
        self._engine.add(command)
        return None

    def _report(self, outputs: list[RequestOutput], refusals: list[Refusal]) -> None:
        """After the step's pages have returned, so that whoever has its last token sees them free."""
        engine = self._engine
        stats, events = engine.scheduler.stats(), engine.take_events()
        self._front_end.send(StepReport.of(engine.steps_done, stats, outputs, refusals, events))
