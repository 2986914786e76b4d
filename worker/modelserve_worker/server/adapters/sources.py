"""From an address to a directory that holds an adapter's files."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from modelserve.model.adapters.addresses import BUCKET, HUB
from modelserve_worker.server.adapters.desired import DesiredVersion
from modelserve_worker.server.adapters.versions import AdapterFault


class AdapterDownload(Protocol):
    """Fetches from the Hub. `release`: nobody needs the directory of this version any more."""

    async def obtain(self, version: DesiredVersion) -> Path:
        """Raises AdapterFault."""
        ...

    def release(self, directory: Path) -> None: ...


class AdapterSources:
    """`download` None: nothing is fetched here."""

    def __init__(self, download: AdapterDownload | None = None) -> None:
        self._download = download

    async def obtain(self, version: DesiredVersion) -> Path:
        """The directory; the files in it have not been looked at. Raises AdapterFault."""
        if version.uri.startswith(BUCKET):
            message = f"{version.uri}: this server has no client for s3://; use hf://, or a directory that it mounts"
            raise AdapterFault("UnsupportedSource", message)
        if not version.uri.startswith(HUB):
            return Path(version.uri)
        if self._download is None:
            message = f"{version.uri}: this server downloads nothing; use a directory that it mounts"
            raise AdapterFault("UnsupportedSource", message)
        return await self._download.obtain(version)

    def release(self, directory: Path) -> None:
        """It is read no more."""
        if self._download is not None:
            self._download.release(directory)
