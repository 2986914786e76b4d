"""Errors of the core.

ModelServeError
├── InvalidInput        the user's document, flag or file is wrong: the CLI exits 2, the operator writes a condition
│   └── UnsupportedModel    a well-formed config.json of a model this release cannot serve
└── DoesNotFit          valid input, but no accelerator given can hold it: the CLI exits 3
"""

from __future__ import annotations

from pydantic import ValidationError


class ModelServeError(Exception):
    """Root of every error raised on purpose; the text says what was wrong, the value, the limit, the remedy."""


class InvalidInput(ModelServeError):  # noqa: N818 - reads as the reason it states
    """The user's input is wrong. `field` is a dotted path into the document when one is known."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedModel(InvalidInput):
    """A config.json was read, but it describes a model this release does not serve."""


class DoesNotFit(ModelServeError):  # noqa: N818 - reads as the reason it states
    """No offered accelerator can hold the model under the given limits. `shortfall_bytes` is per GPU."""

    def __init__(self, message: str, *, shortfall_bytes: int) -> None:
        super().__init__(message)
        self.shortfall_bytes = shortfall_bytes


def first_fault(error: ValidationError) -> tuple[str, str]:
    """Dotted path, "" where it is the whole document, and message of the first of what a model found wrong."""
    first = error.errors(include_url=False)[0]
    return ".".join(str(part) for part in first["loc"]), first["msg"]
