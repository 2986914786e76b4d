"""Brings what is served to what is desired, beside serving: one task a version, from its address to Ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.adapters import AdapterLimits
from modelserve_worker.engine_client import EngineClient, EngineDead
from modelserve_worker.scheduling.stats import EngineStats
from modelserve_worker.server.adapters.desired import DesiredSet, DesiredVersion
from modelserve_worker.server.adapters.files import look_at
from modelserve_worker.server.adapters.registry import AdapterRegistry
from modelserve_worker.server.adapters.residents import Probe, ResidentAdapters
from modelserve_worker.server.adapters.sources import AdapterSources
from modelserve_worker.server.adapters.versions import AdapterFault, AdapterState, AdapterVersion
from modelserve_worker.server.errors.errors import ApiError, from_validation

LOADED_BY_HAND = "by-hand"  # id of versions that a call of /v1/load_lora_adapter made
_AT_ONCE = 4  # versions that are fetched and looked at
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # before another try of what another try may cure

log = logging.getLogger(__name__)


class AdapterService:
    """For one event loop, but for `registry`. Until `start` nothing is loaded, and sets are kept."""

    def __init__(
        self,
        limits: AdapterLimits,
        architecture: ModelArchitecture,
        names: Sequence[str],
        *,
        sources: AdapterSources | None = None,
        directory: Path | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """`names`: those of the model itself. `directory`: below which `load` takes paths."""
        self.limits = limits
        self.registry = AdapterRegistry(self._on_idle)
        self._architecture, self._names, self._directory = architecture, frozenset(names), directory
        self._sources = sources or AdapterSources()
        self._first_pause_s = first_pause_s
        self._wanted: dict[tuple[str, str], AdapterVersion] = {}
        self._leaving: list[AdapterVersion] = []
        self._tasks: dict[AdapterVersion, asyncio.Task[None]] = {}
        self._held: set[AdapterVersion] = set()  # the engine has them
        self._pinned: frozenset[str] = frozenset()
        self._engine: EngineClient | None = None
        self.stats: Callable[[], EngineStats] = EngineStats
        self._loop: asyncio.AbstractEventLoop | None = None
        self._residents: ResidentAdapters
        self._at_once: asyncio.Semaphore

    @property
    def versions(self) -> Iterator[AdapterVersion]:
        """Those wanted, then those that leave; the same version is not told twice."""
        yield from self._wanted.values()
        for each in self._leaving:
            if (each.name, each.wanted.id) not in self._wanted:
                yield each

    def start(
        self, engine: EngineClient, *, probe: Probe | None = None, stats: Callable[[], EngineStats] = EngineStats
    ) -> None:
        """Load what is wanted, from now on at once. Within the loop. `probe`: what an adapter has to pass before it is
        Ready; `stats`: of the engine."""
        self._engine, self._loop, self.stats = engine, asyncio.get_running_loop(), stats
        self._residents = ResidentAdapters(engine, self.limits.most, probe, self._sources.release)
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        for each in self._wanted.values():
            self._load(each)

    def document(self) -> dict[str, Any]:
        """The body of GET /v1/adapters."""
        limits = self.limits
        return {
            "limits": {
                "max": limits.most,
                "rank": limits.rank,
                "slots": limits.slots,
                "targets": [each.value for each in limits.targets],
            },
            "versionNames": True,
            "adapters": [each.document() for each in self.versions],
        }

    def take(self, desired: DesiredSet) -> None:
        """Serve this set, whatever was before; what was loaded by hand stays. Raises ApiError 400, and has changed
        nothing."""
        by_hand = {key: each for key, each in self._wanted.items() if not each.managed}
        names = self._names | {name for name, _ in by_hand}
        desired.check(taken=names, most=self.limits.most - len(by_hand))
        wanted = dict(by_hand)
        fresh: list[AdapterVersion] = []
        for adapter in desired.adapters:
            for version in adapter.versions:
                found = self._known(adapter.name, version)
                if found is None:
                    found = AdapterVersion(adapter.name, version)
                    fresh.append(found)
                elif self._follow(found, version):
                    fresh.append(found)
                wanted[adapter.name, version.id] = found
        gone = [each for key, each in self._wanted.items() if wanted.get(key) is not each]
        self._wanted = wanted
        self.registry.tell(wanted.values())
        for each in gone:
            self._retire(each)
        for each in fresh:
            self._load(each)
        self._pin()

    async def load(self, name: str, path: str) -> None:
        """Serve the adapter of a directory, and wait until it is Ready. Raises ApiError."""
        if self._directory is None:
            raise ApiError(
                "no directory of adapters is set: start the server with --adapter-directory", param="lora_path",
                status=403, code="not_allowed",
            )  # fmt: skip
        directory = (self._directory / path).resolve()
        if not directory.is_relative_to(self._directory.resolve()):
            message = f"{path!r} does not lie below {self._directory}, where this server's adapters are"
            raise ApiError(message, param="lora_path", code="invalid_value")
        if name in self._names or any(each == name for each, _ in self._wanted):
            raise ApiError(f"the name {name!r} is served already", param="lora_name", code="invalid_value")
        if len(self._wanted) >= self.limits.most:
            message = f"{len(self._wanted)} adapters are loaded, and there is room for no more: unload one"
            raise ApiError(message, param="lora_name", code="invalid_value")
        try:
            version = AdapterVersion(name, DesiredVersion(id=LOADED_BY_HAND, uri=str(directory)), managed=False)
        except ValidationError as error:
            raise from_validation(error) from error
        key = (name, LOADED_BY_HAND)
        self._wanted[key] = version
        self.registry.tell(self._wanted.values())
        self._load(version)
        told: str | None = "the call was given up"
        try:
            await asyncio.wait({self._tasks[version]})
            told = version.message
        finally:
            if version.state is not AdapterState.READY and self._wanted.get(key) is version:
                self._forget(key)
        if told is not None:
            raise ApiError(f"the adapter {name!r} was not loaded: {told}", param="lora_path", code="invalid_value")

    def unload(self, name: str) -> None:
        """Let go of an adapter that was loaded by hand; its requests are finished. Raises ApiError."""
        key = (name, LOADED_BY_HAND)
        found = self._wanted.get(key)
        if found is None or found.managed:
            told = "is of the set that this server was given" if any(n == name for n, _ in self._wanted) else "is none"
            raise ApiError(
                f"the adapter {name!r} {told}: it was not loaded by /v1/load_lora_adapter", status=404,
                param="lora_name", code="not_found",
            )  # fmt: skip
        self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        gone = self._wanted.pop(key)
        self.registry.tell(self._wanted.values())
        self._retire(gone)

    def _known(self, name: str, version: DesiredVersion) -> AdapterVersion | None:
        """The same files, wanted already."""
        found = self._wanted.get((name, version.id))
        return found if found is not None and found.wanted.same_files(version) else None

    def _follow(self, found: AdapterVersion, version: DesiredVersion) -> bool:
        """Take on its weight; whether it is to be loaded again, since it failed and there is another token."""
        again = found.state is AdapterState.FAILED and found.wanted.token != version.token
        found.wanted = version
        if again:
            self._stop(found)
            found.become(AdapterState.LOADING)
        return again

    def _load(self, version: AdapterVersion) -> None:
        if self._engine is not None:
            task = asyncio.create_task(self._bring(version))
            self._tasks[version] = task
            task.add_done_callback(lambda done: self._loaded(version, done))

    def _loaded(self, version: AdapterVersion, done: asyncio.Task[None]) -> None:
        if self._tasks.get(version) is done:
            del self._tasks[version]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("adapter %s: loading failed", version.name, exc_info=error)
            if version.state is AdapterState.LOADING:
                version.become(AdapterState.FAILED, "InternalError", f"{type(error).__name__}: {error}")

    async def _bring(self, version: AdapterVersion) -> None:
        """To Ready, or to what it is instead; tried again where that may help, as long as somebody waits for it."""
        pause = self._first_pause_s
        while True:
            began = time.monotonic()
            try:
                await self._once(version)
            except AdapterFault as fault:
                version.probe = fault.probe or version.probe
                version.become(fault.state, fault.reason, str(fault))
                log.warning("adapter %s (%s): %s: %s", version.name, version.wanted.uri, fault.reason, fault)
                if not fault.passing or not version.managed:
                    return
            except EngineDead as error:
                version.become(AdapterState.FAILED, "EngineStopped", str(error))
                return
            else:
                version.load_seconds = time.monotonic() - began
                version.become(AdapterState.READY)
                log.info(
                    "adapter %s is ready after %.2f s: %s%s",
                    version.name, version.load_seconds, version.wanted.uri, _strengths(version),
                )  # fmt: skip
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _once(self, version: AdapterVersion) -> None:
        async with self._at_once:
            directory = await self._sources.obtain(version.wanted)
            try:
                within = None if version.managed else self._directory
                files = await asyncio.to_thread(look_at, directory, self._architecture, within=within)
                version.digest, version.rank, version.nbytes = files.digest, files.rank, files.nbytes
                if files.fault is not None:
                    raise files.fault
            except BaseException:
                self._sources.release(directory)
                raise
        version.probe = await self._residents.hold(files)
        self._held.add(version)
        self._pin()

    def _pin(self) -> None:
        """Have the engine keep those in their slots that are to stay there: as many as leave one for all others, the
        first of the set."""
        pinned: dict[str, None] = {}
        for version in self._wanted.values():
            asked = version.wanted.pin and version in self._held and version.digest is not None
            room = version.digest in pinned or len(pinned) < self.limits.slots - 1
            if asked and not room and not version.pinned_in_vain:
                log.warning(
                    "adapter %s is not pinned: of %d slots %d have one that is, and one is left for others: raise the "
                    "slots, or pin fewer", version.name, self.limits.slots, len(pinned),
                )  # fmt: skip
            version.pinned, version.pinned_in_vain = asked and room, asked and not room
            if version.pinned and version.digest is not None:
                pinned[version.digest] = None
        if frozenset(pinned) != self._pinned and self._engine is not None and self._engine.is_alive():
            self._pinned = frozenset(pinned)
            self._engine.adapters.pin(self._pinned)

    def _retire(self, version: AdapterVersion) -> None:
        self._leaving.append(version)
        self._stop(version)
        if self.registry.retire(version):
            self._drained(version)

    def _stop(self, version: AdapterVersion) -> None:
        if (task := self._tasks.pop(version, None)) is not None:
            task.cancel()

    def _on_idle(self, version: AdapterVersion) -> None:
        assert self._loop is not None, "it has served"
        self._loop.call_soon_threadsafe(self._drained, version)

    def _drained(self, version: AdapterVersion) -> None:
        if version in self._leaving:
            self._leaving.remove(version)
            self._give_back(version)

    def _give_back(self, version: AdapterVersion) -> None:
        if version in self._held and version.digest is not None:
            self._held.remove(version)
            self._residents.let_go(version.digest)
            self._pin()


def _strengths(version: AdapterVersion) -> str:
    """Of its terms beside what they are added to, for the log."""
    found = {} if version.probe is None else version.probe.by_linear
    told = ", ".join(f"{linear} {ratio:.2g}" for linear, ratio in found.items())
    return told and f"; its terms beside their products: {told}"
