"""TCP connections that pods of the local node have or had a moment ago, read from their network namespaces."""

from __future__ import annotations

import ipaddress
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_POD_IN_CGROUP = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})")
_LISTEN, _IPV4_MAPPED = "0A", "0" * 16 + "FFFF0000"


@dataclass(frozen=True)
class Connection:
    """Seen from the pod `uid`: `incoming` when its own port is one that it listens at."""

    uid: str
    incoming: bool
    port: int  # that was connected to
    peer: str  # address of the other side


@dataclass
class Watch:
    """What was seen since it began; an ended connection stays visible for up to a minute."""

    seen: set[Connection] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        for uid, process in _pods().items():
            self.seen |= set(_connections(uid, process))

    def run(self) -> None:
        while not self.stopped.wait(1.0):
            self.look()


@contextmanager
def watching() -> Iterator[Watch]:
    """Look once a second while the context lasts, and once more at its end."""
    watch = Watch()
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        watch.stopped.set()
        thread.join()
        watch.look()


def _pods() -> dict[str, Path]:
    """The sandbox's own process of each pod, by the pod's uid: the folder of it below /proc.

    What starts a container is in the pod's cgroup a moment before it is in its network, and sees the node's meanwhile.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text() != "pause\n":
                continue
            pod = _POD_IN_CGROUP.search((folder / "cgroup").read_text())
        except OSError:
            continue
        if pod is not None:
            found[pod[1].replace("_", "-")] = folder
    return found


def _connections(uid: str, process: Path) -> Iterator[Connection]:
    rows: list[list[str]] = []
    for table in ("tcp", "tcp6"):
        try:
            rows += [line.split() for line in (process / "net" / table).read_text().splitlines()[1:]]
        except OSError:
            continue
    listening = {row[1].rpartition(":")[2] for row in rows if row[3] == _LISTEN}
    for row in rows:
        (_, _, own), (address, _, other) = row[1].rpartition(":"), row[2].rpartition(":")
        peer = _address(address)
        if row[3] == _LISTEN or ipaddress.ip_address(peer).is_loopback:
            continue
        incoming = own in listening
        yield Connection(uid, incoming, int(own if incoming else other, 16), peer)


def _address(text: str) -> str:
    """An address of /proc/net/tcp: bytes of 32-bit words in the machine's order, which is the reverse."""
    text = text.removeprefix(_IPV4_MAPPED)
    words = [bytes.fromhex(text[index : index + 8])[::-1] for index in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
