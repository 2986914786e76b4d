"""Where results go, and what a command needs to know before a run: the API key, and files that can be written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

STDOUT = "-"


class BadInput(Exception):  # noqa: N818 - reads as the reason it states
    """A flag is well-formed and yet wrong here; the text says which, its value and the remedy."""


def read_api_key(variable: str | None, environment: Mapping[str, str], *, flag: str = "--api-key-env") -> str | None:
    """The value of the environment variable, None where none is named. Raises BadInput when it is not set."""
    if variable is not None and not environment.get(variable):
        raise BadInput(f"{flag} {variable}: the variable is not set; export it, or leave the flag out")
    return None if variable is None else environment[variable]


def require_writable(path: Path) -> None:
    """Before the run: results of an hour must not be lost at its end. Raises BadInput."""
    try:
        path.open("a").close()
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}); name another file") from error


def publish(destination: str | None, document: BaseModel, *, table: str) -> None:
    """The table on standard output, or on standard error where the JSON takes standard output."""
    text = document.model_dump_json(indent=2) + "\n"
    if destination not in (None, STDOUT):
        Path(destination).write_text(text)  # first: whoever reads the table may close the pipe
    print(table, file=sys.stderr if destination == STDOUT else sys.stdout, flush=True)
    if destination == STDOUT:
        print(text, end="", flush=True)
