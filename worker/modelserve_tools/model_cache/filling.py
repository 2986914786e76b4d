"""Fill a cache: a folder of one volume with a folder for each commit of a model, each of which is complete or not yet.

ROOT/COMMIT/config.json, ...        what workers read
ROOT/COMMIT/.modelserve-fetched.json    the marker: it is complete, and what it is of
ROOT/COMMIT/.modelserve-incomplete/     files that are under way
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from modelserve.caches.reports import FilledCache
from modelserve.errors import InvalidInput
from modelserve.model.checkpoint_files import DOWNLOAD_LOCK, DOWNLOAD_MARKER
from modelserve_tools.fetch import Fetched, locked
from modelserve_tools.hub_client import address, files_of_model, hub_client
from modelserve_tools.model_cache.progress import Progress
from modelserve_tools.model_cache.transfer import (
    PARTIAL_FOLDER,
    CacheFullError,
    HubFile,
    bring,
    intact,
    partial_of,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_COMMIT = re.compile("[0-9a-f]{40}")
ROOM_LEFT_BYTES = 64 << 20  # beside the model: folders, and the marker


class NotWritableError(InvalidInput):
    """The volume cannot be written."""


def fill(
    uri: str,
    revision: str,
    root: Path,
    *,
    keep: Iterable[str] = (),
    verify: bool = False,
    connections: int = 4,
    progress: Progress | None = None,
    fetch_file: Callable[..., None] = bring,
) -> FilledCache:
    """Make ROOT hold the commit that the revision stands for now, and no other commit but those of `keep`.

    `verify`: files that are there are read and hashed, too; one that is damaged is fetched anew. Raises InvalidInput
    for what another try cannot cure (of which AccessDeniedError, CacheFullError, HashMismatchError and NotWritableError
    are), and DownloadError for the rest.
    """
    progress = progress or Progress()
    repository, file = address(uri)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / DOWNLOAD_LOCK), hub_client(repository, revision, access_field="spec.secretRef") as api:
            commit, files = _listing(api, repository, revision, file)
            collect(root, {commit, *keep})
            folder, size = root / commit, sum(each.size for each in files)
            progress.expect(commit, size)
            missing = [each for each in files if not intact(folder / each.name, each, verify=verify)]
            progress.found(size - sum(each.size for each in missing))
            repaired = sum((folder / each.name).exists() for each in missing) if complete(root, commit) else 0
            _check_room(root, folder, missing)
            _bring_all(api, repository, commit, missing, folder, connections, partial(fetch_file, progress=progress))
            shutil.rmtree(folder / PARTIAL_FOLDER, ignore_errors=True)
            marker = Fetched(uri=uri, revision=revision, metadata_only=False, commit=commit)
            _write_whole(folder / DOWNLOAD_MARKER, marker.model_dump_json())
    except OSError as error:
        raise NotWritableError(f"{root} cannot be written: {error}") from error
    return FilledCache(
        commit=commit, bytes=size, fetched_bytes=progress.bytes_fetched, repaired=repaired, held=held(root)
    )


def held(root: Path) -> tuple[str, ...]:
    """Commits that are complete, in order."""
    return tuple(sorted(path.name for path in root.iterdir() if path.is_dir() and complete(root, path.name)))


def complete(root: Path, commit: str) -> bool:
    """Whether all files of a commit are there, as its marker says."""
    try:
        return Fetched.model_validate_json((root / commit / DOWNLOAD_MARKER).read_text()).commit == commit
    except (FileNotFoundError, ValidationError):
        return False


def collect(root: Path, keep: set[str]) -> None:
    """Remove every commit but these, and nothing else that is there.

    The marker goes first, so that none is taken for complete meanwhile.
    """
    for path in root.iterdir():
        if path.is_dir() and _COMMIT.fullmatch(path.name) and path.name not in keep:
            (path / DOWNLOAD_MARKER).unlink(missing_ok=True)
            shutil.rmtree(path)


def _listing(api: HfApi, repository: str, revision: str, file: str | None) -> tuple[str, list[HubFile]]:
    info = api.model_info(repository, revision=revision, files_metadata=True)
    there = {each.rfilename: each for each in info.siblings or ()}
    metadata, weights = files_of_model(f"hf://{repository} at {revision!r}", there, file)
    files = []
    for name in (*metadata, *weights):
        found = there[name]
        if found.size is None:
            raise ValueError(f"the Hub does not say how many bytes {name} has")
        sha256 = found.lfs.sha256 if found.lfs is not None else None
        files.append(HubFile(name, int(found.size), sha256, found.blob_id if sha256 is None else None))
    return str(info.sha), files


def _check_room(root: Path, folder: Path, missing: list[HubFile]) -> None:
    """Before a byte is fetched: hours of a download that cannot end help nobody."""
    partials = (partial_of(folder, each) for each in missing)
    there = sum(path.stat().st_size for path in partials if path.exists())
    needed, free = sum(each.size for each in missing) - there, shutil.disk_usage(root).free
    if missing and needed + ROOM_LEFT_BYTES > free:
        raise CacheFullError(
            f"the volume has {free} bytes free, and {needed} are to be fetched: give it room for {needed - free} more "
            f"and {ROOM_LEFT_BYTES} beside, or free some"
        )


def _bring_all(
    api: HfApi,
    repository: str,
    commit: str,
    missing: list[HubFile],
    folder: Path,
    connections: int,
    fetch_file: Callable[..., None],
) -> None:
    """The largest first, as many at a time as there are connections; the first that fails ends those that wait."""
    from huggingface_hub import hf_hub_url

    headers = {"Authorization": f"Bearer {api.token}"} if api.token else {}  # sent to no host it is redirected to
    with ThreadPoolExecutor(connections) as pool:
        running = [
            pool.submit(
                fetch_file,
                each,
                hf_hub_url(repository, each.name, revision=commit, endpoint=api.endpoint),
                folder,
                headers=headers,
            )
            for each in sorted(missing, key=lambda each: -each.size)
        ]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_whole(path: Path, text: str) -> None:
    """Under a temporary name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
