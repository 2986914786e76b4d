"""Adapters from the Hub: downloaded by a process of their own into a cache of bounded size."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from modelserve.model.adapters.addresses import HUB
from modelserve.termination import NO_ROOM_EXIT_CODE
from modelserve_worker.server.adapters.desired import DesiredVersion
from modelserve_worker.server.adapters.versions import AdapterFault

MOST_SECONDS = 1800.0  # of one download, which the next try continues
_COMMAND = (sys.executable, "-m", "modelserve_worker", "fetch", "--adapter")
_COMPLETE = ".complete"
_SHOWN = 600  # characters of what a download said

log = logging.getLogger(__name__)


class HubDownload:
    """Folders of `cache`, one for each address, revision and token: who has no token finds nothing that another's
    brought. Those that nobody uses stay until their room is needed, also over a restart; `most_bytes` in all.

    One download at a time. For one event loop.
    """

    def __init__(self, cache: Path, most_bytes: int, *, command: Sequence[str] = _COMMAND) -> None:
        self._cache, self._most_bytes, self._command = cache, most_bytes, tuple(command)
        self._users: Counter[Path] = Counter()
        self._one = asyncio.Lock()

    async def obtain(self, version: DesiredVersion) -> Path:
        """See AdapterDownload."""
        folder = self._cache / _name(version)
        self._users[folder] += 1
        try:
            async with self._one:
                if not (folder / _COMPLETE).exists():
                    await self._download(version, folder)
                await asyncio.to_thread((folder / _COMPLETE).touch)  # used now
        except OSError as error:
            self._users[folder] -= 1
            raise AdapterFault("DownloadFailed", f"{folder} cannot be written: {error}", passing=True) from error
        except BaseException:
            self._users[folder] -= 1
            raise
        inside = version.uri.removeprefix(HUB).split("/")[2:]
        return folder.joinpath(*inside)

    def release(self, directory: Path) -> None:
        """See AdapterDownload; another directory is none of its business."""
        if directory.is_relative_to(self._cache):
            self._users[self._cache / directory.relative_to(self._cache).parts[0]] -= 1

    async def _download(self, version: DesiredVersion, folder: Path) -> None:
        await asyncio.to_thread(self._cache.mkdir, mode=0o700, parents=True, exist_ok=True)
        held = await asyncio.to_thread(_bytes_below, self._cache, folder)
        code, said = await self._run(version, folder, self._most_bytes - held)
        if code == NO_ROOM_EXIT_CODE:
            await asyncio.to_thread(self._clear)
            held = await asyncio.to_thread(_bytes_below, self._cache, folder)
            code, said = await self._run(version, folder, self._most_bytes - held)
        if code == NO_ROOM_EXIT_CODE:
            message = f"{said}: {self._most_bytes} are set for all (--adapter-cache-bytes), {held} of them are in use"
            raise AdapterFault("NoRoomOnDisk", message, passing=True)
        if code:
            raise AdapterFault("DownloadFailed", said or f"the download ended with {code}", passing=True)

    async def _run(self, version: DesiredVersion, folder: Path, room: int) -> tuple[int, str]:
        """Exit code, and the last words."""
        revision = ("--revision", version.revision) if version.revision else ()
        environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        if version.token is not None:
            environment["HF_TOKEN"] = version.token
        process = await asyncio.create_subprocess_exec(
            *self._command, "--uri", version.uri, *revision, "--dest", str(folder), "--most-bytes", str(max(0, room)),
            env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, told = await asyncio.wait_for(process.communicate(), MOST_SECONDS)
        except TimeoutError:
            return 1, f"downloading {version.uri} took more than {MOST_SECONDS:g} s; the next try continues it"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        code = process.returncode or 0
        if not code:
            (folder / _COMPLETE).touch()
        return code, told.decode(errors="replace").strip()[-_SHOWN:]

    def _clear(self) -> None:
        """What nobody uses."""
        for each in self._cache.iterdir():
            if not self._users[each]:
                log.info("the cache of adapters gives up %s", each.name)
                shutil.rmtree(each)


def _name(version: DesiredVersion) -> str:
    parts = (version.uri, version.revision or "", version.token or "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _bytes_below(directory: Path, but: Path) -> int:
    files = (each for each in directory.rglob("*") if each.is_file() and not each.is_relative_to(but))
    return sum(each.stat().st_size for each in files)
