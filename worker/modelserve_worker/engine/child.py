"""The engine's process: it builds an engine, says how that goes, and runs its loop. Started by EngineProcess.

It ignores SIGINT and SIGTERM, which a terminal or a shell sends to the whole group: the front end decides when to end.
It ends with the front end, however that dies: a thread sleeps on the socket pair until the other end is closed. The
engine's own children (the other ranks) end with this process in the same way, so nothing is left that holds a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from modelserve_worker.engine.deadline import HEARTBEAT_S
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine.loop import EngineLoop, FrontEndSocket
from modelserve_worker.engine.wire import Heartbeat, Loading, Ready, StartFailed
from modelserve_worker.log_format import LOG_FORMAT
from modelserve_worker.terminal_error import TerminalError

_LOADING_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what the front end is told of it."""

    engine: Engine
    ready: Ready


BuildEngine = Callable[[Callable[[int, int], None]], BuiltEngine]
"""Builds the engine in its process; hears nothing but a callback for (bytes done, bytes in all) of the weights, which
any thread may call. Picklable by reference. Raises TerminalError where no restart can help."""


def run_child(end: socket.socket, build: BuildEngine) -> None:
    """The main function of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # a handler, since its children would inherit an ignored signal
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    threading.Thread(target=_end_with_front_end, args=(end.fileno(),), name="front-end-watcher", daemon=True).start()
    front_end = FrontEndSocket(end)
    try:
        built = build(_LoadingReports(front_end))
    except TerminalError as error:
        _give_up(front_end, StartFailed(str(error), error.reason, error.shortfall_bytes, error.measured))
    except Exception as error:
        logger.critical("the engine could not be started", exc_info=error)
        _give_up(front_end, StartFailed(f"the engine could not be started: {type(error).__name__}: {error}"))
    gc.collect()
    gc.freeze()  # what start-up left stays: a collection between two steps need not walk through all of torch again
    front_end.send(built.ready)
    threading.Thread(target=_beat, args=(front_end,), name="heartbeat", daemon=True).start()
    EngineLoop(built.engine, front_end).run()
    _exit(0)


class _LoadingReports:
    """Progress for the front end, from any thread, a few times a second."""

    def __init__(self, front_end: FrontEndSocket) -> None:
        self._front_end = front_end
        self._lock = threading.Lock()
        self._last_s = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._last_s >= _LOADING_INTERVAL_S or done_bytes == total_bytes:
                self._last_s = now
                self._front_end.send(Loading(done_bytes, total_bytes))


def _beat(front_end: FrontEndSocket) -> None:
    """Say again and again that this process runs; another thread ends it when the front end is gone."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(HEARTBEAT_S)
            front_end.send(Heartbeat())


def _give_up(front_end: FrontEndSocket, message: StartFailed) -> NoReturn:
    front_end.send(message)
    _exit(1)


def _exit(code: int) -> NoReturn:
    """Not a normal exit: a thread of a broken communicator could hold it up for minutes."""
    logging.shutdown()
    os._exit(code)


def _end_with_front_end(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(1)
