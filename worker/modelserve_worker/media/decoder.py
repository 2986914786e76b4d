"""The process that decodes images and sounds, one at a time.

Its address space is bounded, and each one's processor time: what exceeds them ends this process or its own request
alone. It ends when the other end of its connection does. What only one kind needs is imported with the first of it.
"""

from __future__ import annotations

import resource
import signal
import sys
from multiprocessing.connection import Connection

from modelserve_worker.media.decode_order import (
    FAILED,
    NO_MEMORY,
    OK,
    TOO_LONG,
    TOO_SHORT,
    DecodeOrder,
    Order,
    SoundOrder,
    cpu_limit,
)

_SAID = 200


class OutsideOfBounds(ValueError):  # noqa: N818 - what was found, not a fault
    """A sound that is longer or shorter than it may be; `status` says which."""

    def __init__(self, status: bytes, message: str) -> None:
        super().__init__(message)
        self.status = status


def decoded(data: bytes, order: Order) -> bytes:
    """What the order asks for, as bytes. Raises OutsideOfBounds, and whatever a library does for a broken file."""
    if isinstance(order, SoundOrder):
        from modelserve_worker.media import sound_decoder

        try:
            return sound_decoder.decoded(data, order)
        except sound_decoder.TooLong as error:
            raise OutsideOfBounds(TOO_LONG, str(error)) from error
        except sound_decoder.TooShort as error:
            raise OutsideOfBounds(TOO_SHORT, str(error)) from error
    from modelserve_worker.media import image_decoder

    return image_decoder.decoded(data, order)


def answer(data: bytes, order: Order) -> bytes:
    """One of the first bytes, and behind it what was made or what went wrong."""
    try:
        return OK + decoded(data, order)
    except MemoryError:
        return NO_MEMORY
    except OutsideOfBounds as error:
        return error.status + str(error).encode()
    except Exception as error:  # whatever a broken file makes Pillow or libsndfile raise
        broken = "it is damaged" if type(error).__name__ == "UnidentifiedImageError" else f"{error}"
        return FAILED + (broken or type(error).__name__)[:_SAID].encode(errors="replace")


def main(arguments: list[str]) -> int:
    """`arguments`: the connection's descriptor, bytes of address space, seconds of processor time of one image."""
    descriptor, memory_bytes, cpu_seconds = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the worker decides when to end
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(descriptor)
    while True:
        try:
            kind, fields = connection.recv()
            data = connection.recv_bytes()
        except EOFError:
            return 0
        order: Order = SoundOrder(*fields) if kind == SoundOrder.__name__ else DecodeOrder(*fields)
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_limit(order, cpu_seconds), hard))
        connection.send_bytes(answer(data, order))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
