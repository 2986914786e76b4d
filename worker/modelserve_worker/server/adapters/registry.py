"""Which version of an adapter answers a request: names to versions, and who uses each."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable

from modelserve_worker.server.adapters.versions import AdapterState, AdapterVersion
from modelserve_worker.server.errors.errors import ApiError, unavailable
from modelserve_worker.server.state import ServedAdapter

_POINTS = 1 << 64


class VersionUse:
    """One request's use of a version, from its body's check to its end."""

    def __init__(self, registry: AdapterRegistry, version: AdapterVersion, name: str) -> None:
        assert version.digest is not None, "it is Ready"
        self.name, self.digest = name, version.digest
        self._registry, self._version = registry, version
        self._admitted = self._ended = False

    def admitted(self) -> None:
        """It has left the queue."""
        if not (self._admitted or self._ended):
            self._admitted = True
            self._registry.count(self._version, running=1)

    def end(self) -> None:
        """It is over; again without effect."""
        if not self._ended:
            self._ended = True
            self._registry.count(self._version, open=-1, running=-int(self._admitted))


class AdapterRegistry:
    """Bodies are checked in threads, so all of it is for any thread. `on_idle` hears of a version that takes no more
    requests and whose last one has ended."""

    def __init__(self, on_idle: Callable[[AdapterVersion], None]) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, list[AdapterVersion]] = {}
        self._on_idle = on_idle

    def tell(self, versions: Iterable[AdapterVersion]) -> None:
        """These are asked for from now on, those of a name in their order."""
        by_name: dict[str, list[AdapterVersion]] = {}
        for each in versions:
            by_name.setdefault(each.name, []).append(each)
        with self._lock:
            self._by_name = by_name

    def served(self) -> tuple[ServedAdapter, ...]:
        """See AdapterSource."""
        with self._lock:
            ready = {name: [each for each in found if _ready(each)] for name, found in self._by_name.items()}
        return tuple(ServedAdapter(name, found[0].wanted.uri) for name, found in ready.items() if found)

    def take(self, name: str, session: str) -> VersionUse | None:
        """See AdapterSource. `session`: requests of one get the same version while both are served and weights stay;
        as the weight of the second grows, none goes back to the first."""
        plain, _, version_id = name.partition("@")
        with self._lock:
            found = self._by_name.get(plain, ())
            asked = [each for each in found if version_id in ("", each.wanted.id)]
            ready = [each for each in asked if _ready(each)]
            if not asked or (name != plain and not version_id):
                return None
            if not ready:
                raise _not_ready(name, asked)
            chosen = _drawn(ready, f"{plain}\0{session}")
            chosen.open += 1
        return VersionUse(self, chosen, name)

    def count(self, version: AdapterVersion, *, open: int = 0, running: int = 0) -> None:  # noqa: A002 - as the field
        """Add to what it has."""
        with self._lock:
            version.open += open
            version.running += running
            version.total += max(0, running)
            idle = not version.open and version.state is AdapterState.DRAINING
        if idle:
            self._on_idle(version)

    def retire(self, version: AdapterVersion) -> bool:
        """It takes no more requests; whether it has none."""
        with self._lock:
            version.become(AdapterState.DRAINING)
            return not version.open


def _ready(version: AdapterVersion) -> bool:
    return version.state is AdapterState.READY


def _drawn(ready: list[AdapterVersion], key: str) -> AdapterVersion:
    """By weight; where none has any, the first: what is Ready answers rather than nothing."""
    total = sum(each.wanted.weight for each in ready)
    point = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") * total
    for each in ready:
        point -= each.wanted.weight * _POINTS
        if point < 0:
            return each
    return ready[0]


def _not_ready(name: str, asked: list[AdapterVersion]) -> ApiError:
    if any(each.state is AdapterState.LOADING for each in asked):
        return unavailable(f"the adapter {name!r} is loading; try again")
    told = asked[0]
    return unavailable(f"the adapter {name!r} is {told.state} here: {told.message or told.reason}")
