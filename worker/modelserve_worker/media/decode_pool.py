"""Processes that decode images and sounds, each bounded in memory and time, started when they are first needed."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from modelserve.sizing.media.image_input import DECODER_BYTES, DECODER_CPU_SECONDS
from modelserve_worker.media.decode_order import FAILED, NO_MEMORY, TOO_LONG, TOO_SHORT, Order, cpu_limit
from modelserve_worker.media.media_error import (
    AudioTooLong,
    AudioTooShort,
    MediaError,
    MediaTooLarge,
    MediaUndecodable,
)

_COMMAND = (sys.executable, "-m", "modelserve_worker.media.decoder")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # address space for each core is not theirs
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")  # no key or token of the worker's

_SAID = 400

log = logging.getLogger(__name__)


class DecodePool:
    """At most `processes` of them. For any thread: each order waits for a free one, then for its answer.

    `wall_s`: most seconds of one order by the clock, where the machine is busy; `cpu_seconds`: of the processor. Of the
    `environment` they know what starts a program.
    """

    def __init__(
        self,
        processes: int,
        *,
        memory_bytes: int = DECODER_BYTES,
        cpu_seconds: int = DECODER_CPU_SECONDS,
        wall_s: float = 60.0,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.processes = processes
        self._limits = (memory_bytes, cpu_seconds)
        self._environment = _ONE_THREAD | {name: environment[name] for name in _ENVIRONMENT if name in environment}
        self.wall_s = wall_s
        self._free: queue.LifoQueue[_Decoder | None] = queue.LifoQueue()  # the one that was used last is warm
        for _ in range(processes):
            self._free.put(None)
        self._lock = threading.Lock()
        self._running: set[_Decoder] = set()
        self._closed = False

    def decode(self, data: bytes, order: Order) -> bytes:
        """What `order` asks for, of an image RGB of its resized size, uint8 [height, width, 3], row by row, of a sound
        what `sound_decoder.decoded` makes. Raises MediaUndecodable, MediaTooLarge, AudioTooLong and AudioTooShort for
        what is the file's doing."""
        decoder = self._free.get()
        try:
            if decoder is None:
                decoder = self._started()
            return self._made(decoder.decode(data, order, self.wall_s), order)
        except MediaError:
            raise
        except (OSError, EOFError) as error:
            ended, decoder = decoder, None
            raise self._verdict(ended, order) from error
        finally:
            self._free.put(decoder)

    def close(self) -> None:
        """End all of them; what is being decoded fails."""
        with self._lock:
            self._closed = True
            running = tuple(self._running)
        for each in running:
            self._end(each)

    @property
    def process_ids(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(each.process.pid for each in self._running)

    def _started(self) -> _Decoder:
        with self._lock:
            if self._closed:
                raise EOFError
            decoder = _Decoder(*self._limits, self._environment)
            self._running.add(decoder)
        return decoder

    def _end(self, decoder: _Decoder) -> int:
        """Exit code."""
        with self._lock:
            self._running.discard(decoder)
        return decoder.end()

    def _made(self, answer: bytes, order: Order) -> bytes:
        status, rest = answer[:1], answer[1:]
        if status == NO_MEMORY:
            raise self._too_much_memory()
        said = rest[:_SAID].decode(errors="replace")
        if status == FAILED:
            raise MediaUndecodable(f"the {order.format} file cannot be decoded: {said}")
        if status in (TOO_LONG, TOO_SHORT):
            raise (AudioTooLong if status == TOO_LONG else AudioTooShort)(said)
        return rest

    def _verdict(self, ended: _Decoder | None, order: Order) -> Exception:
        """Of what its decoder did not answer to; another decoder takes its place."""
        if ended is None:
            return MediaUndecodable("nothing can be decoded at the moment; send the request again")
        code = self._end(ended)
        log.warning("a process that decodes media ended with %d; the next image or sound starts another", code)
        if code == -signal.SIGXCPU:
            return MediaUndecodable(
                f"decoding takes more than {cpu_limit(order, self._limits[1])} s of a processor; send it smaller, or "
                "saved anew"
            )
        if code == -signal.SIGKILL:
            return MediaUndecodable(f"decoding did not end within {self.wall_s:g} s; send it smaller")
        return self._too_much_memory() if code == -signal.SIGABRT else MediaUndecodable("it cannot be decoded")

    def _too_much_memory(self) -> MediaTooLarge:
        return MediaTooLarge(
            f"decoding takes more than the {self._limits[0]} bytes of memory that one image or sound may; "
            "send it smaller"
        )


class _Decoder:
    """One process and this end of its connection."""

    def __init__(self, memory_bytes: int, cpu_seconds: int, environment: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        try:
            self.process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), str(memory_bytes), str(cpu_seconds)],
                pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            theirs.close()
        self._connection: Connection = ours

    def decode(self, data: bytes, order: Order, wall_s: float) -> bytes:
        """Raises OSError or EOFError where the process ends, or does not answer in time."""
        self._connection.send((type(order).__name__, tuple(order)))
        self._connection.send_bytes(data)
        if not self._connection.poll(wall_s):
            raise TimeoutError
        return self._connection.recv_bytes()

    def end(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that ends by itself says why
            self.process.wait(0.2)
        self.process.kill()
        self._connection.close()
        return self.process.wait()
