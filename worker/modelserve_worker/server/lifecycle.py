"""The life of the server: it listens at once, waits for the model, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from modelserve_worker.server.draining import CloseWhileDraining, drain
from modelserve_worker.server.http.bounded_log import bound_logs
from modelserve_worker.server.http.connections import (
    ACCEPTED_AT_ONCE,
    Connection,
    Connections,
    most_connections,
    raise_descriptor_limit,
)
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import Phase, ServerState

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 5.0
_ALIVE_INTERVAL_S = 0.5
_KERNEL_BACKLOG = 2048
_CLOSE_SECONDS = 5  # for the last answers to reach slow clients
_KEEP_ALIVE_SECONDS = 75  # longer than load balancers and clients keep idle connections


class EngineStopped(RuntimeError):  # noqa: N818 - an outcome, like EngineDead
    """The engine stopped while the server was serving; the process should be replaced."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: draining comes before its own shutdown.

    Its backlog is how many connections asyncio accepts in one turn; the kernel's queue is longer than that.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_KERNEL_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError with the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_KERNEL_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    # Accepted sockets inherit it. asyncio sets it only where the socket names its protocol, which accept() does not;
    # without it, an event that follows the headers of a kept connection waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def run_server(
    app: Starlette,
    state: ServerState,
    listener: socket.socket,
    *,
    shutdown_delay_seconds: float,
    drain_seconds: float,
    starting: Awaitable[None],
    stop_engine: Callable[[str], Awaitable[None]],
    settings: ServerSettings | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then take requests for `shutdown_delay_seconds` more, and finish open ones for at
    most `drain_seconds` after that (draining.py).

    `starting` brings the engine up and marks `state` ready; what it raises ends the server and is raised here. On a
    signal before that, this returns without waiting for it. `stop_engine` is awaited before connections are closed:
    requests that are still open then fail with EngineDead and the reason it is given, so that their clients get an
    error, not a broken stream. Raises EngineStopped.
    """
    settings = settings or ServerSettings()
    limit = settings.max_connections or most_connections(raise_descriptor_limit())
    connections = Connections(
        limit,
        header_s=settings.header_seconds,
        discard_s=settings.body_gap_seconds,
        write_s=settings.write_seconds,
    )
    bound_logs()
    config = uvicorn.Config(
        CloseWhileDraining(app, state),
        http=functools.partial(Connection, connections),  # type: ignore[arg-type] # it is called like the class
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    log.info("listening on %s:%d for at most %d connections", *listener.getsockname()[:2], limit)
    stop = _stop_on_signals()
    started = asyncio.ensure_future(starting)
    stopped = asyncio.create_task(stop.wait())
    logging_progress = asyncio.create_task(_log_progress(state))
    reason = "the engine was shut down"
    try:
        await asyncio.wait({started, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            started.result()
            await _serve_until_stopped(state, stopped, serving)
            state.start_draining()
            log.info(
                "draining: new requests for %g s, %d open ones for at most %g s more",
                shutdown_delay_seconds,
                state.open_requests,
                drain_seconds,
            )
            if not await drain(server, state, delay_s=shutdown_delay_seconds, limit_s=drain_seconds):
                log.warning("%d requests are not complete after the drain", state.open_requests)
                reason = (
                    f"this worker was told to stop, and the answer was not complete {drain_seconds:g} s later "
                    "(rollout.drainSeconds); ask again"
                )
    finally:
        for task in (started, stopped, logging_progress):
            task.cancel()
        await stop_engine(reason)
        server.should_exit = True
        await serving


async def _serve_until_stopped(state: ServerState, stopped: asyncio.Task[bool], serving: asyncio.Task[None]) -> None:
    while state.alive():
        ended, _ = await asyncio.wait(
            {stopped, serving}, timeout=_ALIVE_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
        )
        if ended:
            return
    raise EngineStopped("the engine stopped; its last error is in the log")


async def _log_progress(state: ServerState) -> None:
    while state.phase is Phase.LOADING:
        log.info("loading: %s", state.detail)
        await asyncio.sleep(_LOG_INTERVAL_S)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
