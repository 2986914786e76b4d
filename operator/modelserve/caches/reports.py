"""What the Job that fills a cache tells the operator: progress over HTTP while it runs, its end in its termination
message. Both outlive a release on one side: what the other adds is not looked at, and names stay.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from modelserve.termination import MESSAGE_LIMIT_BYTES, TERMINATION_MESSAGE_PATH

PROGRESS_PATH = "/v1/progress"
MOST_BYTES = 1 << 53
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
_Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]


class CacheFailure(StrEnum):
    """Why a cache was not filled, where another try alone cures nothing. CamelCase, stable."""

    MODEL_NOT_FOUND = "ModelNotFound"  # the Hub has no such repository, revision or file
    ACCESS_DENIED = "AccessDenied"  # it wants a token, or refuses the one that was given
    CACHE_FULL = "CacheFull"  # the volume has no room for the model
    HASH_MISMATCH = "HashMismatch"  # what arrives, twice, is not what the Hub says it has
    NOT_WRITABLE = "NotWritable"  # the volume cannot be written


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True)


class CacheProgress(_Told):
    """How far a download is. `commit` is empty until the Hub has said it; `seconds_left` None: nothing moves."""

    commit: str = Field(default="", max_length=40)
    bytes: _Bytes = 0
    total_bytes: _Bytes = 0
    bytes_per_second: _Bytes = 0
    seconds_left: Annotated[int, Field(ge=0, le=MOST_BYTES)] | None = None


class FilledCache(_Told):
    """The end of a Job that filled a cache."""

    commit: Commit
    bytes: _Bytes = Field(description="Of the files of the commit.")
    fetched_bytes: _Bytes = Field(default=0, description="That came over the network this time.")
    repaired: int = Field(default=0, ge=0, le=1 << 20, description="Files that were there and damaged.")
    held: tuple[Commit, ...] = Field(default=(), max_length=64, description="Commits that are complete on the volume.")


class UnfilledCache(_Told):
    """The end of one that did not."""

    reason: CacheFailure
    message: str


def read_end(text: str) -> FilledCache | UnfilledCache | None:
    """A termination message; None for what is none of ours, such as the end of a log."""
    for kind in (FilledCache, UnfilledCache):
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            continue
    return None


def write_end(told: FilledCache | UnfilledCache, path: str = TERMINATION_MESSAGE_PATH) -> None:
    """Write it where the kubelet reads it; outside a container there is no such file, and nothing is written. A message
    that is too long is cut.
    """
    if isinstance(told, UnfilledCache):
        told = told.model_copy(update={"message": told.message[: MESSAGE_LIMIT_BYTES // 4]})
    target = Path(path)
    if target.exists():
        target.write_text(told.model_dump_json(by_alias=True))
