"""The Hugging Face Hub's client for downloads: addresses, its errors as ours, and which files make a model."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from modelserve.errors import InvalidInput, ModelServeError
from modelserve.model.gguf.files import SUFFIX, listed, models_of, whole

if TYPE_CHECKING:
    from huggingface_hub import HfApi

METADATA_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_PATTERNS = ("*.safetensors",)
REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
FILE = re.compile(r"(?:\w[\w.-]{0,127}/){0,3}\w[\w.-]{0,250}\.gguf")
REFUSALS = frozenset({401, 403})

logger = logging.getLogger(__name__)


class DownloadError(ModelServeError):
    """The Hub could not be reached or a transfer broke off; trying again continues the download."""


class CommitGoneError(InvalidInput):
    """The Hub no longer has the commit that this model was resolved to."""


class AccessDeniedError(InvalidInput):
    """The Hub lets nobody have the repository, or not whom the token stands for."""


def go_online() -> None:
    """What the image says of the worker, that it asks no Hub, is not said of a download. Before the client is there."""
    os.environ.pop("HF_HUB_OFFLINE", None)


def address(uri: str) -> tuple[str, str | None]:
    """(repository, the GGUF file in it that is named)"""
    owner, _, rest = uri.removeprefix("hf://").partition("/")
    name, _, file = rest.partition("/")
    if (
        not uri.startswith("hf://")
        or not REPOSITORY.fullmatch(f"{owner}/{name}")
        or (file and not FILE.fullmatch(file))
    ):
        raise InvalidInput(
            f"{uri!r} is not of the form hf://OWNER/NAME or hf://OWNER/NAME/FILE.gguf", field="model.uri"
        )
    return f"{owner}/{name}", file or None


@contextmanager
def hub_client(
    repository: str,
    revision: str,
    *,
    resolved: bool = False,
    access_field: str = "model.authSecretRef",
    endpoint: str | None = None,
) -> Iterator[HfApi]:
    """The Hub's client; what it raises becomes InvalidInput, AccessDeniedError, CommitGoneError (if
    `resolved`) or DownloadError.

    `access_field`: the field that names the token's.
    """
    from huggingface_hub import HfApi, errors

    token = os.environ.get("HF_TOKEN")
    try:
        yield HfApi(endpoint=endpoint, token=token or False)
    except errors.GatedRepoError as error:
        have = "the token given has no access" if token else "no token was given"
        raise AccessDeniedError(
            f"hf://{repository} is gated and {have}: accept its licence on the Hub and set {access_field}",
            field=access_field,
        ) from error
    except errors.RepositoryNotFoundError as error:
        # The Hub answers 401 of what is not there as well, to whom it does not know.
        kind = InvalidInput if error.response.status_code not in REFUSALS else AccessDeniedError
        raise kind(
            f"hf://{repository} does not exist on the Hub, or is private and the token has no access to it",
            field="model.uri",
        ) from error
    except errors.RevisionNotFoundError as error:
        if resolved:
            raise CommitGoneError(
                f"hf://{repository} no longer has commit {revision}, which this model was resolved to: set "
                "model.revision to a commit, branch or tag that is there",
                field="model.revision",
            ) from error
        raise InvalidInput(f"hf://{repository} has no revision {revision!r}", field="model.revision") from error
    except InvalidInput:
        raise
    except errors.HfHubHTTPError as error:
        if error.response.status_code not in REFUSALS:
            raise DownloadError(_broken_off(repository, endpoint, error)) from error
        raise AccessDeniedError(
            f"hf://{repository}: the Hub refuses the token ({error.response.status_code}): set {access_field} to one "
            "that is valid and may read the repository",
            field=access_field,
        ) from error
    except Exception as error:  # the transfer stack raises errors of several libraries, all cured by another try
        raise DownloadError(_broken_off(repository, endpoint, error)) from error


def _broken_off(repository: str, endpoint: str | None, error: Exception) -> str:
    where = endpoint or _endpoint()
    return f"downloading hf://{repository} from {where} failed: {_with_cause(error)}: the next try continues it"


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


def files_of_model(repository: str, names: Iterable[str], file: str | None) -> tuple[list[str], list[str]]:
    """(metadata, weights) of the names in a repository: the top folder's safetensors files and what is beside them,
    else a GGUF model, which has its metadata in it. Raises InvalidInput where there is no model, or which is not said.
    """
    names = list(names)
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if _matches(name, WEIGHT_PATTERNS)] if file is None else []
    metadata = [name for name in top if _matches(name, METADATA_PATTERNS)] if weights else []
    return metadata, weights or _gguf_parts(repository, names, file)


def _gguf_parts(repository: str, names: Iterable[str], file: str | None) -> list[str]:
    """The files of the GGUF model that is asked for: of the one that `file` is a part of, or of the only one."""
    models = models_of(names := list(names))
    held = {name for parts in models.values() for name in parts}
    for tower in (name for name in names if name.endswith(SUFFIX) and name not in held):
        logger.info("%s is left: text needs no tower of images or audio", tower)
    if file is not None:
        found = next((parts for parts in models.values() if file in parts), None)
        if found is None:
            known = f"; it has {listed(models)}" if models else ""
            raise InvalidInput(f"{repository} holds no model {file!r}{known}", field="model.uri")
        return whole(found)
    if not models:
        raise InvalidInput(f"{repository} holds no *.safetensors and no *.gguf file", field="model.uri")
    if len(models) > 1:
        raise InvalidInput(
            f"{repository} holds {len(models)} GGUF models: name one, as hf://OWNER/NAME/FILE.gguf ({listed(models)})",
            field="model.uri",
        )
    return whole(next(iter(models.values())))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
