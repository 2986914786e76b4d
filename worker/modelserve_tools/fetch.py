"""`modelserve-worker fetch`: download a model from the Hugging Face Hub into a directory that pods share.

Runs in an init container, the only one that sees the token (environment variable HF_TOKEN). A lock file lets one of
several pods download while the others wait; an interrupted download continues where it stopped; a completed one is
marked and never asks the Hub again, so a replica restarts without network and all replicas serve the same files.

A branch moves, so another init container runs `fetch --resolve` before: it tells the commit that the revision stands
for, in its termination message and in a file for `fetch --commit-file`. It asks the Hub only where nobody has told it
before: neither the operator, in a mounted file, nor the marker of what was downloaded already.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from modelserve.errors import InvalidInput
from modelserve.model.adapters.config import ADAPTER_CONFIG_FILE, ADAPTER_FILE, PICKLED_FILE, PICKLED_NOT_READ
from modelserve.model.checkpoint_files import DOWNLOAD_LOCK, DOWNLOAD_MARKER
from modelserve.termination import (
    NO_ROOM_EXIT_CODE,
    TERMINAL_EXIT_CODE,
    FetchedDrafter,
    TerminationMessage,
    TerminationReason,
    write_fetched_drafter,
    write_resolved,
    write_termination,
)
from modelserve_tools.hub_client import (
    REPOSITORY,
    CommitGoneError,
    DownloadError,
    address,
    files_of_model,
    go_online,
    hub_client,
)
from modelserve_tools.weight_headers import fetch_headers

if TYPE_CHECKING:
    from huggingface_hub import HfApi

OPTIONAL_PAUSES_S = (2.0, 8.0)  # before other tries of a download that a model does not wait for long
FOLDER = re.compile(r"\w[\w.-]{0,127}")

logger = logging.getLogger(__name__)


class Fetched(BaseModel):
    """What a directory holds in full: content of the marker file, which other releases read and write too."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    uri: str
    revision: str
    metadata_only: bool
    commit: str | None = None  # that the revision stood for

    def covers(self, wanted: Fetched) -> bool:
        same = (self.uri, self.revision) == (wanted.uri, wanted.revision)
        return same and (wanted.metadata_only or not self.metadata_only)


class NoRoomError(InvalidInput):
    """An adapter is larger than the room that was given for it."""


def resolve(uri: str, revision: str, dest: Path, *, recorded: Path | None = None) -> str:
    """The commit that `revision` stands for: as `recorded` (a file) has it, else as `dest` was filled, else as the Hub
    says now. Raises InvalidInput and DownloadError as `fetch` does.
    """
    repository, _ = address(uri)
    if recorded is not None and recorded.exists() and (told := recorded.read_text().strip()):
        return told
    present = _marker(dest)
    if present is not None and (present.uri, present.revision) == (uri, revision) and present.commit:
        return present.commit
    with hub_client(repository, revision) as api:
        return str(api.model_info(repository, revision=revision).sha)


def fetch(
    uri: str,
    revision: str,
    dest: Path,
    *,
    metadata_only: bool = False,
    commit: str | None = None,
    endpoint: str | None = None,
) -> None:
    """Make `dest` hold the files of `uri` (hf://OWNER/NAME, or hf://OWNER/NAME/FILE.gguf for that one with its other
    parts) at `revision`; with metadata_only the headers of the weight files stand in for these.

    `commit`: what the revision was resolved to. `endpoint`: where the Hub is, if not at HF_ENDPOINT. Raises
    InvalidInput for what another try cannot cure (malformed uri, unknown or closed repository or revision, a directory
    that holds another model or cannot be written), CommitGoneError, DownloadError for the rest.
    """
    repository, file = address(uri)
    wanted = Fetched(uri=uri, revision=revision, metadata_only=metadata_only)
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with locked(dest / DOWNLOAD_LOCK):
            present = _marker(dest)
            if present is not None and present.covers(wanted) and commit in (None, present.commit):
                logger.info("%s already holds %s at %s", dest, uri, revision)
                return
            if present is not None and (present.uri, present.revision) != (uri, revision):
                raise InvalidInput(
                    f"{dest} holds {present.uri} at {present.revision}, not {uri} at {revision}: use another directory "
                    "(storage.subPath) for each model and revision"
                )
            with hub_client(repository, commit or revision, resolved=bool(commit), endpoint=endpoint) as api:
                found = _transfer(api, repository, commit or revision, dest, file=file, metadata_only=metadata_only)
            (dest / DOWNLOAD_MARKER).write_text(wanted.model_copy(update={"commit": found}).model_dump_json())
    except OSError as error:
        raise InvalidInput(f"{dest} cannot be written: {error}") from error


def fetch_adapter(uri: str, revision: str, dest: Path, *, most_bytes: int) -> None:
    """Download the two files of a LoRA adapter, hf://OWNER/NAME[/FOLDER], to `dest` or the folder in it.

    Their sizes are looked at before a byte is transferred. Raises NoRoomError beyond `most_bytes`, InvalidInput for
    what another try cannot cure, DownloadError for the rest.
    """
    owner, *rest = uri.removeprefix("hf://").split("/")
    repository, folders = "/".join((owner, *rest[:1])), rest[1:]
    if not uri.startswith("hf://") or not REPOSITORY.fullmatch(repository) or not all(map(FOLDER.fullmatch, folders)):
        raise InvalidInput(f"{uri!r} is not of the form hf://OWNER/NAME or hf://OWNER/NAME/FOLDER", field="uri")
    names = ["/".join((*folders, each)) for each in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)]
    with hub_client(repository, revision, access_field="secretRef") as api:
        info = api.model_info(repository, revision=revision, files_metadata=True)
        there = {each.rfilename: each.size for each in info.siblings or ()}
        if missing := [each for each in names if each not in there]:
            pickled = "/".join((*folders, PICKLED_FILE)) in there
            told = f"; {PICKLED_NOT_READ}. Save it as safetensors" if pickled else ""
            raise InvalidInput(f"{uri} at {revision!r} has no {' and no '.join(missing)}{told}", field="uri")
        size = sum(there[each] or 0 for each in names)
        if size > most_bytes:
            raise NoRoomError(f"{uri} has {size} bytes; there is room for {most_bytes}")
        api.snapshot_download(repository, revision=info.sha, local_dir=dest, allow_patterns=names)
        for each in names:
            held = (dest / each).stat().st_size
            if there[each] is not None and held != there[each]:
                raise OSError(f"{each} has {held} bytes, the Hub says {there[each]}")


def _marker(dest: Path) -> Fetched | None:
    try:
        return Fetched.model_validate_json((dest / DOWNLOAD_MARKER).read_text())
    except (FileNotFoundError, ValidationError):  # a marker cut short by a crash means: not complete
        return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another pod is downloading into %s: waiting for it", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _transfer(api: HfApi, repository: str, revision: str, dest: Path, *, file: str | None, metadata_only: bool) -> str:
    """Download and compare names and sizes with the Hub's listing. Returns the commit.

    The listing is asked for first because snapshot_download, when it cannot reach the Hub, returns a directory that is
    not empty as if it were complete.
    """
    info = api.model_info(repository, revision=revision, files_metadata=True)
    there = {each.rfilename: each.size for each in info.siblings or ()}
    metadata, weights = files_of_model(f"hf://{repository} at {revision!r}", there, file)
    sizes = {name: there[name] for name in (*metadata, *(() if metadata_only else weights))}
    logger.info("downloading %d files, %d bytes", len(sizes), sum(size or 0 for size in sizes.values()))
    if sizes:
        api.snapshot_download(repository, revision=info.sha, local_dir=dest, allow_patterns=list(sizes))
    for name, size in sizes.items():
        held = (dest / name).stat().st_size
        if size is not None and held != size:
            raise OSError(f"{name} has {held} bytes, the Hub says {size}")
    if metadata_only:
        fetch_headers(api, repository, str(info.sha), weights, dest)
    return str(info.sha)


def fetch_drafter(
    uri: str, revision: str, dest: Path, *, recorded: Path | None, pause: Callable[[float], None] = time.sleep
) -> FetchedDrafter:
    """Make `dest` hold an assistant, at the commit that `recorded` (a file), the directory or the Hub says that the
    revision stands for. Raises nothing that a model should wait for: what went wrong is in the answer.
    """
    problem = ""
    for seconds in (*OPTIONAL_PAUSES_S, None):
        try:
            commit = resolve(uri, revision, dest, recorded=recorded)
            fetch(uri, revision, dest, commit=commit)
            return FetchedDrafter(commit=commit)
        except InvalidInput as error:
            return FetchedDrafter(problem=str(error))
        except (DownloadError, ValidationError, OSError) as error:
            problem = str(error)
        if seconds is not None:
            pause(seconds)
    return FetchedDrafter(problem=problem)


def _fetch_adapter(arguments: argparse.Namespace) -> int:
    """For a worker that runs, whose termination message is its own: what went wrong is on standard error alone."""
    quiet_before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        fetch_adapter(arguments.uri, arguments.revision, arguments.dest, most_bytes=arguments.most_bytes)
    except NoRoomError as error:
        sys.stderr.write(f"{error}\n")
        return NO_ROOM_EXIT_CODE
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        return TERMINAL_EXIT_CODE
    except (DownloadError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        logging.disable(quiet_before)
    return 0


def main(
    argv: Sequence[str] | None = None, *, tell_drafter: Callable[[FetchedDrafter], None] = write_fetched_drafter
) -> int:
    """Exit 0 when complete, 1 when another try may help, TERMINAL_EXIT_CODE when none can."""
    parser = argparse.ArgumentParser(
        prog="modelserve-worker fetch", description="Download a model from the Hugging Face Hub."
    )
    parser.add_argument("--uri", required=True, help="hf://OWNER/NAME, or hf://OWNER/NAME/FILE.gguf")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    parser.add_argument("--dest", required=True, type=Path, help="directory to fill")
    parser.add_argument("--metadata-only", action="store_true", help="of weights only their headers")
    parser.add_argument("--resolve", action="store_true", help="only tell the commit that the revision stands for")
    parser.add_argument("--recorded", type=Path, help="--resolve, --optional: a file with the commit, once it is known")
    parser.add_argument(
        "--optional", action="store_true", help="exit 0 whatever comes of it, and tell the commit or what went wrong"
    )
    parser.add_argument("--commit-file", type=Path, help="where --resolve leaves the commit for the download")
    parser.add_argument("--adapter", action="store_true", help="the two files of a LoRA adapter, and no other")
    parser.add_argument("--most-bytes", type=int, default=sys.maxsize, help="--adapter: of both files")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    go_online()
    if arguments.adapter:
        return _fetch_adapter(arguments)
    if arguments.optional:
        told = fetch_drafter(arguments.uri, arguments.revision, arguments.dest, recorded=arguments.recorded)
        logger.info("%s", told.problem or f"{arguments.uri} at {arguments.revision} is commit {told.commit}")
        tell_drafter(told)
        return 0
    try:
        if arguments.resolve:
            commit = resolve(arguments.uri, arguments.revision, arguments.dest, recorded=arguments.recorded)
            logger.info("%s at %s is commit %s", arguments.uri, arguments.revision, commit)
            if arguments.commit_file is not None:
                arguments.commit_file.write_text(commit)
            write_resolved(commit)
        else:
            known = arguments.commit_file.read_text() if arguments.commit_file is not None else None
            only = arguments.metadata_only
            fetch(arguments.uri, arguments.revision, arguments.dest, metadata_only=only, commit=known)
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        gone = isinstance(error, CommitGoneError)
        reason = TerminationReason.ModelCommitGone if gone else TerminationReason.ModelUnavailable
        write_termination(TerminationMessage(reason=reason, message=str(error)))
        return TERMINAL_EXIT_CODE
    except (DownloadError, ValidationError) as error:  # the latter: what the Hub names is no commit
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
