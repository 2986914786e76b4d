"""`modelserve-worker fetch`: download a model from the Hugging Face Hub into a directory that pods share.

Runs in an init container, the only one that sees the token (environment variable HF_TOKEN). A lock file lets one of
several pods download while the others wait; an interrupted download continues where it stopped; a completed one is
marked and never asks the Hub again, so a replica restarts without network and all replicas serve the same files.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from modelserve.errors import InvalidInput, ModelServeError
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason, write_termination

if TYPE_CHECKING:
    from huggingface_hub import HfApi

METADATA_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_PATTERNS = ("*.safetensors",)
LOCK = ".modelserve-fetch.lock"
MARKER = ".modelserve-fetched.json"
REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")

logger = logging.getLogger(__name__)


class DownloadError(ModelServeError):
    """The Hub could not be reached or a transfer broke off; trying again continues the download."""


class Fetched(BaseModel):
    """What a directory holds in full: content of the marker file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    revision: str
    metadata_only: bool

    def covers(self, wanted: Fetched) -> bool:
        same = (self.uri, self.revision) == (wanted.uri, wanted.revision)
        return same and (wanted.metadata_only or not self.metadata_only)


def fetch(uri: str, revision: str, dest: Path, *, metadata_only: bool = False) -> None:
    """Make `dest` hold the files of `uri` (hf://OWNER/NAME) at `revision`; with metadata_only all but the weights.

    Raises InvalidInput for what another try cannot cure (malformed uri, unknown or closed repository or revision, a
    directory that holds another model or cannot be written), DownloadError for the rest.
    """
    repository = _repository(uri)
    wanted = Fetched(uri=uri, revision=revision, metadata_only=metadata_only)
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with _locked(dest / LOCK):
            present = _marker(dest)
            if present is not None and present.covers(wanted):
                logger.info("%s already holds %s at %s", dest, uri, revision)
                return
            if present is not None and (present.uri, present.revision) != (uri, revision):
                raise InvalidInput(
                    f"{dest} holds {present.uri} at {present.revision}, not {uri} at {revision}: use another directory "
                    "(storage.subPath) for each model and revision"
                )
            _download(repository, revision, dest, metadata_only=metadata_only)
            (dest / MARKER).write_text(wanted.model_dump_json())
    except OSError as error:
        raise InvalidInput(f"{dest} cannot be written: {error}") from error


def _repository(uri: str) -> str:
    repository = uri.removeprefix("hf://")
    if repository == uri or not REPOSITORY.fullmatch(repository):
        raise InvalidInput(f"{uri!r} is not of the form hf://OWNER/NAME", field="model.uri")
    return repository


def _marker(dest: Path) -> Fetched | None:
    try:
        return Fetched.model_validate_json((dest / MARKER).read_text())
    except (FileNotFoundError, ValidationError):  # a marker cut short by a crash means: not complete
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another pod is downloading into %s: waiting for it", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(repository: str, revision: str, dest: Path, *, metadata_only: bool) -> None:
    from huggingface_hub import HfApi, errors

    token = os.environ.get("HF_TOKEN")
    try:
        _transfer(HfApi(token=token or False), repository, revision, dest, metadata_only=metadata_only)
    except errors.GatedRepoError as error:
        have = "the token given has no access" if token else "no token was given"
        raise InvalidInput(
            f"hf://{repository} is gated and {have}: accept its licence on the Hub and set model.authSecretRef",
            field="model.authSecretRef",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InvalidInput(
            f"hf://{repository} does not exist on the Hub, or is private and the token has no access to it",
            field="model.uri",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidInput(f"hf://{repository} has no revision {revision!r}", field="model.revision") from error
    except InvalidInput:
        raise
    except Exception as error:  # the transfer stack raises errors of several libraries, all cured by another try
        raise DownloadError(
            f"downloading hf://{repository} from {_endpoint()} failed: {_with_cause(error)}: the next try continues it"
        ) from error


def _endpoint() -> str:
    """Where the Hub is asked: HF_ENDPOINT, else its own address. Proxies and CA bundles are the client's variables."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _with_cause(error: BaseException) -> str:
    """An error with the one at its root: the client's own words are about a cache, not about the network."""
    root = error
    while (before := root.__cause__ or root.__context__) is not None:
        root = before
    told = f"{type(error).__name__}: {error}"
    return told if root is error else f"{told} (caused by {type(root).__name__}: {root})"


def _transfer(api: HfApi, repository: str, revision: str, dest: Path, *, metadata_only: bool) -> None:
    """Download and compare names and sizes with the Hub's listing.

    The listing is asked for first because snapshot_download, when it cannot reach the Hub, returns a directory that is
    not empty as if it were complete.
    """
    patterns = METADATA_PATTERNS if metadata_only else METADATA_PATTERNS + WEIGHT_PATTERNS
    info = api.model_info(repository, revision=revision, files_metadata=True)
    sizes = {
        file.rfilename: file.size
        for file in info.siblings or ()
        if "/" not in file.rfilename and any(fnmatch(file.rfilename, pattern) for pattern in patterns)
    }
    if not metadata_only and not any(fnmatch(name, pattern) for name in sizes for pattern in WEIGHT_PATTERNS):
        raise InvalidInput(f"hf://{repository} at {revision!r} holds no *.safetensors file", field="model.uri")
    logger.info("downloading %d files, %d bytes", len(sizes), sum(size or 0 for size in sizes.values()))
    api.snapshot_download(repository, revision=info.sha, local_dir=dest, allow_patterns=list(sizes))
    for name, size in sizes.items():
        held = (dest / name).stat().st_size
        if size is not None and held != size:
            raise OSError(f"{name} has {held} bytes, the Hub says {size}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when complete, 1 when another try may help, TERMINAL_EXIT_CODE when none can."""
    parser = argparse.ArgumentParser(
        prog="modelserve-worker fetch", description="Download a model from the Hugging Face Hub."
    )
    parser.add_argument("--uri", required=True, help="hf://OWNER/NAME")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    parser.add_argument("--dest", required=True, type=Path, help="directory to fill")
    parser.add_argument("--metadata-only", action="store_true", help="leave out the weights")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        fetch(arguments.uri, arguments.revision, arguments.dest, metadata_only=arguments.metadata_only)
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        write_termination(TerminationMessage(reason=TerminationReason.ModelUnavailable, message=str(error)))
        return TERMINAL_EXIT_CODE
    except DownloadError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
