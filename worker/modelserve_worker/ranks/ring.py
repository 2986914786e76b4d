"""Bytes from rank 0 to the other ranks of a machine through shared memory, and a few words back. Torch-free.

One ring, written once and read by each rank at its own pace. The writer counts the bytes it has written, each reader
those it has read; the space in between is the readers'. A message longer than the ring goes through it in parts. Counts
are 64-bit words at their own addresses, written after the bytes they speak of. Python has no fence: the order is that
of x86-64, where stores are seen in the order of the program and loads are made in it. Where a machine promises less, no
ring is made. Whoever waits looks again and again for a moment, as a step takes milliseconds, and then sleeps between
looks.

Each reader has some slots where it notes a word per step, which the writer compares with its own (`noted`), and words
that say how far it has come otherwise (`reported`).
"""

from __future__ import annotations

import platform
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing import shared_memory

import numpy as np

from modelserve.hardware import AMD64, ARM64, RANK_ARCHITECTURES
from modelserve.termination import TerminationReason
from modelserve_worker.terminal_error import TerminalError

CAPACITY_BYTES = 4 << 20
_NOTES = 64  # steps whose words are kept; two are in flight
_LINE = 64  # bytes; words that different processes write lie on cache lines of their own
_MACHINES = {"x86_64": AMD64, "AMD64": AMD64, "aarch64": ARM64, "arm64": ARM64}  # as platform.machine() names them
_LENGTH = struct.Struct("<Q")
_SPIN_S = 100e-6
_SLEEP_S = 50e-6
_IDLE_S = 0.05  # from here on the wait is not for a step but for a request
_IDLE_SLEEP_S = 1e-3


class RingAborted(Exception):  # noqa: N818 - reads as what happened
    """The writer has given the group up, or a check of the waiting side said so."""


def check_ranks(ranks: int, *, machine: str | None = None) -> None:
    """Raise TerminalError where more than one rank is asked for on a `machine`, as platform.machine() names it and that
    of this process if left out, that does not keep the order of stores. Planners refuse it for the same reason."""
    machine = platform.machine() if machine is None else machine
    if ranks > 1 and _MACHINES.get(machine, machine) not in RANK_ARCHITECTURES:
        order = " or ".join(RANK_ARCHITECTURES)
        raise TerminalError(
            TerminationReason.UnsupportedArchitecture,
            f"tensor parallel size {ranks} on a machine of type {machine!r}: ranks pass steps through shared memory in "
            f"the order of stores that {order} keeps; serve with one GPU a replica, or on nodes with {order} CPUs",
        )


class RankRing:
    """Both ends: rank 0 creates it for a number of readers, each reader opens it by name and index."""

    def __init__(self, readers: int, *, name: str | None = None, capacity: int = CAPACITY_BYTES) -> None:
        """Create a ring, or with `name` open the one of that name, made for as many readers and bytes.

        Raises TerminalError on a machine that does not keep the order of stores.
        """
        check_ranks(readers + 1)
        lines = 2 + readers
        notes = 2 * 8 * _NOTES
        self._created = name is None
        size = lines * _LINE + readers * notes + capacity
        self._memory = shared_memory.SharedMemory(name=name, create=name is None, size=size)
        buffer = self._memory.buf
        assert buffer is not None
        words = np.frombuffer(buffer, dtype=np.int64, count=lines * _LINE // 8).reshape(lines, -1)
        self._aborted = words[0]
        self._written = words[1]
        self._read = words[2:]  # and behind it what each reader has reported
        self._notes = np.frombuffer(buffer, dtype=np.int64, count=readers * notes // 8, offset=lines * _LINE).reshape(
            readers, _NOTES, 2
        )
        self._bytes = buffer[lines * _LINE + readers * notes : size]
        self._capacity = capacity
        if self._created:
            words[:] = 0
            self._notes[:] = -1

    @property
    def name(self) -> str:
        return self._memory.name

    def send(self, message: bytes, *, check: Callable[[], None]) -> None:
        """Write a message. `check` is called while readers have to make room, and may raise."""
        self._put(_LENGTH.pack(len(message)), check)
        self._put(message, check)

    def receive(self, reader: int, *, check: Callable[[], None] = lambda: None) -> bytearray:
        """The next message; waits for it. Raises RingAborted."""
        (length,) = _LENGTH.unpack(self._take(reader, _LENGTH.size, check))
        return self._take(reader, length, check)

    def abort(self) -> None:
        """Every reader that waits, or comes to wait, gets RingAborted."""
        self._aborted[0] = 1

    def note(self, reader: int, step: int, word: int) -> None:
        """Reader `reader` came to `word` in `step`."""
        place = self._notes[reader, step % _NOTES]
        place[0] = -1
        place[1] = word
        place[0] = step

    def noted(self, reader: int, step: int) -> int | None:
        """What the reader noted for the step; None when it has not come so far, or is far ahead."""
        place = self._notes[reader, step % _NOTES]
        if place[0] != step:  # asked first: a word that is read before it may be that of a step long ago
            return None
        word = int(place[1])
        return word if place[0] == step else None

    def report(self, reader: int, words: Sequence[int]) -> None:
        """Reader `reader` has come so far, in up to seven ways that grow until one ends, which is less than all
        (LANE_ENDED). Its own threads may say so."""
        for index, word in enumerate(words, 1):
            self._read[reader, index] = word

    def reported(self, ways: int) -> list[int]:
        """The least of what the readers have reported in each way; 0 before they do."""
        least: list[int] = self._read[:, 1 : 1 + ways].min(axis=0).tolist()
        return least

    def close(self) -> None:
        """Let go of the memory; the creator removes it."""
        del self._aborted, self._written, self._read, self._notes
        self._bytes.release()
        self._memory.close()
        if self._created:
            self._memory.unlink()

    def _put(self, data: bytes, check: Callable[[], None]) -> None:
        done, written = 0, int(self._written[0])
        while done < len(data):
            at = written % self._capacity
            count = min(len(data) - done, self._wait(self._room, written, check), self._capacity - at)
            self._bytes[at : at + count] = data[done : done + count]
            done, written = done + count, written + count
            self._written[0] = written

    def _take(self, reader: int, length: int, check: Callable[[], None]) -> bytearray:
        taken = bytearray(length)
        done, read = 0, int(self._read[reader, 0])
        while done < length:
            at = read % self._capacity
            count = min(length - done, self._wait(self._unread, read, check), self._capacity - at)
            taken[done : done + count] = self._bytes[at : at + count]
            done, read = done + count, read + count
            self._read[reader, 0] = read
        return taken

    def _room(self, written: int) -> int:
        return self._capacity - written + int(self._read[:, 0].min())

    def _unread(self, read: int) -> int:
        return int(self._written[0]) - read

    def _wait(self, available: Callable[[int], int], position: int, check: Callable[[], None]) -> int:
        """Bytes that are available at `position`, once there are any."""
        began: float | None = None
        while not (count := available(position)):
            if self._aborted[0]:
                raise RingAborted("the group of ranks has ended")
            now = time.monotonic()
            began = began or now
            if now - began > _SPIN_S:
                check()
                time.sleep(_SLEEP_S if now - began < _IDLE_S else _IDLE_SLEEP_S)
        return count
