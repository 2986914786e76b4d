"""Processes that outlive the program that started them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from localcluster.settings import ClusterError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Process:
    """A process that outlives this program. The start time tells it from a later one with the same number."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _start_ticks(pid) or 0)

    @property
    def alive(self) -> bool:
        with suppress(ChildProcessError):  # a child of this very program stays a zombie until it is asked for
            os.waitpid(self.pid, os.WNOHANG)
        return self.start_ticks != 0 and _start_ticks(self.pid) == self.start_ticks

    def terminate(self, *, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL when it still runs after `timeout_s`."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
        if not self.ended_within(timeout_s):
            self.kill()

    def kill(self, *, timeout_s: float = 20.0) -> None:
        """SIGKILL, then wait until it is gone. Raises ClusterError when it stays."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        if not self.ended_within(timeout_s):
            raise ClusterError(f"process {self.pid} did not end within {timeout_s:.0f} s of SIGKILL")

    def ended_within(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def spawn(command: list[str], *, log: Path, environment: Mapping[str, str] | None = None) -> Process:
    """Start a program in a session of its own, with its output appended to `log`."""
    program = shutil.which(command[0])
    if program is None:
        raise ClusterError(f"{command[0]} is not on PATH")
    pid = os.posix_spawn(
        program,
        command,
        dict(os.environ if environment is None else environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    return Process.of(pid)


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody listens on at this moment, to be bound a moment later by a program.

    They lie outside of what the kernel gives to those who ask for any port, and to those who connect: it would give
    them away again meanwhile. Which ones is left to chance, since others choose beside this process.
    """
    first, last = map(int, _EPHEMERAL.read_text().split())
    candidates = [port for port in range(10_000, 65_536) if not first <= port <= last]
    random.shuffle(candidates)
    with ExitStack() as taken:
        ports: list[int] = []
        while len(ports) < count:
            with suppress(OSError):  # somebody listens there
                taken.enter_context(socket.create_server(("127.0.0.1", candidates[-1])))
                ports.append(candidates[-1])
            candidates.pop()
        return ports
