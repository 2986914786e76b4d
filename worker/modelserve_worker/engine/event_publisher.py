"""What is cached, told to routers over ZeroMQ in vLLM's messages: a topic, a sequence number of 8 bytes, big end
first, and msgpack of [seconds since 1970, events, data-parallel rank]. Whoever comes late or is slow misses messages,
which the numbers show; an engine never waits for a listener.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelserve.engine_args import EngineArgs
from modelserve.termination import TerminationReason
from modelserve_worker.terminal_error import TerminalError

if TYPE_CHECKING:
    from modelserve_worker.scheduling.cache_events import Event

_MOST_WAITING = 10_000  # messages for a slow listener; later ones are dropped for it

logger = logging.getLogger(__name__)


class EventPublisher:
    """A PUB socket that listens at `endpoint`. One thread calls it. Raises zmq.ZMQError for one that it cannot have."""

    def __init__(self, endpoint: str, topic: str) -> None:
        import zmq

        self._topic = topic.encode()
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._failed: type[Exception] = zmq.ZMQError
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._flags = zmq.NOBLOCK

    def publish(self, events: list[Event]) -> None:
        """Send one batch. What cannot be sent is missed, and costs nobody an answer."""
        payload = self._encoder.encode([time.time(), events, 0])
        frames = [self._topic, self._number.to_bytes(8, "big"), payload]
        self._number += 1
        try:
            self._socket.send_multipart(frames, self._flags)
        except self._failed as error:
            logger.warning("events %d were not published: %s", self._number - 1, error)

    def close(self) -> None:
        self._socket.close()


def event_publisher(args: EngineArgs, environment: Mapping[str, str]) -> EventPublisher | None:
    """None where nobody asked for one; POD_IP names this worker. Raises TerminalError where it cannot be had."""
    if args.kv_events_endpoint is None:
        return None
    reason = TerminationReason.InvalidEngineArgs
    if not args.prefix_caching:
        raise TerminalError(reason, "kvEventsEndpoint tells what is cached, and prefixCaching is false: remove one")
    if importlib.util.find_spec("zmq") is None:
        raise TerminalError(
            reason, "kvEventsEndpoint needs pyzmq, which is not installed: pip install modelserve[events]"
        )
    import zmq

    try:
        return EventPublisher(args.kv_events_endpoint, args.kv_events_topic or _topic(args, environment))
    except zmq.ZMQError as error:
        raise TerminalError(reason, f"kvEventsEndpoint {args.kv_events_endpoint!r}: {error}") from error


def _topic(args: EngineArgs, environment: Mapping[str, str]) -> str:
    """As llm-d's router takes a pod and a model from it."""
    address = environment.get("POD_IP") or socket.gethostname()
    return f"kv@{address}:{args.port}@{(*args.served_names, Path(args.model).name)[0]}"
