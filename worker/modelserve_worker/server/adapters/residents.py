"""Adapters that the engine holds, by digest: those of one content are one, however many versions are it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from modelserve.errors import InvalidInput
from modelserve_worker.engine_client import EngineClient
from modelserve_worker.server.adapters.files import AdapterFiles, first_names
from modelserve_worker.server.adapters.versions import AdapterFault, AdapterState, ProbeResult

_PROBES_AT_ONCE = 2
"""Of many adapters that come together the first are Ready early, and prompts of one share a step and a slot."""

Probe = Callable[[EngineClient, str], Awaitable[ProbeResult | None]]
"""Of an adapter that the engine has, by digest. Raises AdapterFault for one that changes nothing."""


@dataclass(eq=False)
class _Resident:
    """`ready`: read and probed; `read`: the engine has it."""

    directory: Path
    ready: asyncio.Task[ProbeResult | None]
    users: int = 0
    read: bool = False
    leaving: bool = False


class ResidentAdapters:
    """At most `most` of them; others wait for one to go. For one event loop. `release` hears of directories that are
    read no more."""

    def __init__(self, engine: EngineClient, most: int, probe: Probe | None, release: Callable[[Path], None]) -> None:
        self._engine, self._most, self._probe, self._release = engine, most, probe, release
        self._residents: dict[str, _Resident] = {}
        self._changed = asyncio.Condition()
        self._probing = asyncio.Semaphore(_PROBES_AT_ONCE)
        self._pending: set[asyncio.Task[None]] = set()

    async def hold(self, files: AdapterFiles) -> ProbeResult | None:
        """Have it in the engine, probed; its directory is released in time, whatever comes of it.

        `let_go` once for each call that returned. Raises AdapterFault, EngineDead.
        """
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: files.digest in self._residents or len(self._residents) < self._most
                )
        except BaseException:
            self._release(files.directory)
            raise
        resident = self._residents.get(files.digest)
        if resident is None:
            resident = _Resident(files.directory, asyncio.create_task(self._bring(files)))
            resident.ready.add_done_callback(_look)
            self._residents[files.digest] = resident
        else:
            self._release(files.directory)
        resident.users += 1
        try:
            return await asyncio.shield(resident.ready)
        except BaseException:
            self.let_go(files.digest)
            raise

    def let_go(self, digest: str) -> None:
        """One user less; after the last one the engine lets go of it, unless somebody wants it again."""
        resident = self._residents[digest]
        resident.users -= 1
        if not resident.users and not resident.leaving:
            resident.leaving = True
            leaving = asyncio.create_task(self._leave(digest, resident))
            self._pending.add(leaving)
            leaving.add_done_callback(self._pending.discard)

    async def _leave(self, digest: str, resident: _Resident) -> None:
        await asyncio.wait({resident.ready})  # an engine that reads it would have it behind the removal
        async with self._changed:
            resident.leaving = False
            if resident.users:
                return
            del self._residents[digest]
            if resident.read and self._engine.is_alive():
                self._engine.adapters.remove(digest)
            self._release(resident.directory)
            self._changed.notify_all()

    async def _bring(self, files: AdapterFiles) -> ProbeResult | None:
        try:
            await self._engine.adapters.read(files.digest, str(files.directory))
        except InvalidInput as error:
            raise AdapterFault("NotServable", str(error)) from error
        self._residents[files.digest].read = True
        await asyncio.to_thread(files.check_unchanged)
        if self._probe is None:
            return None
        async with self._probing:
            result = await self._probe(self._engine, files.digest)
        if result is not None and (silent := _silent(files, result)):
            raise AdapterFault(
                "ModulesWithoutEffect",
                f"{len(silent)} trained matrices add nothing to any place of the probe's prompts: "
                f"{first_names(silent)}. Look at their factors A, or train without these modules",
                state=AdapterState.PARTLY_NO_EFFECT,
                probe=result,
            )
        return result


def _silent(files: AdapterFiles, result: ProbeResult) -> list[str]:
    """Matrices whose B is not zero and whose term was, all over the probe."""
    return [
        f"{each.linear}[{part}]" + ("" if each.layer is None else f" of layer {each.layer}")
        for each in result.strengths
        for part in each.silent
        if (each.linear, each.layer, part) in files.trained
    ]


def _look(done: asyncio.Task[ProbeResult | None]) -> None:
    """What went wrong is told to those that wait; there may be none by now."""
    if not done.cancelled():
        done.exception()
