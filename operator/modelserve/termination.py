"""How a worker or an inspect Job tells the operator, through Kubernetes alone, why it ended for good.

A container that exits with TERMINAL_EXIT_CODE will fail again in the same way: the operator stops it for good.
The text lies in the container's termination message (kubelet limit 4,096 bytes).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

TERMINAL_EXIT_CODE = 78  # EX_CONFIG of sysexits.h; no signal and no Python traceback uses it
NO_ROOM_EXIT_CODE = 28  # ENOSPC: of a download of an adapter that is larger than what it was given
TERMINATION_MESSAGE_PATH = "/dev/termination-log"
MESSAGE_LIMIT_BYTES = 4096


class TerminationReason(StrEnum):
    """CamelCase, stable: the operator copies it into the Stalled condition."""

    InvalidCheckpoint = "InvalidCheckpoint"  # missing, broken or mismatching safetensors, config.json or tokenizer
    UnsupportedModel = "UnsupportedModel"  # a valid config.json of a model this release does not serve
    InsufficientMemory = "InsufficientMemory"  # the pool is below what minModelLen needs
    InvalidEngineArgs = "InvalidEngineArgs"  # the EngineArgs file or a flag is wrong
    AcceleratorMismatch = "AcceleratorMismatch"  # asked for CUDA, or for a KV dtype, that this device lacks
    UnsupportedArchitecture = "UnsupportedArchitecture"  # the CPUs run no replica of so many ranks
    KernelsUnavailable = "KernelsUnavailable"  # a kernel is in no cache, and there is no C compiler to build it with
    ModelUnavailable = "ModelUnavailable"  # the Hub has no such repository or revision, or the token no access to it
    ModelCommitGone = "ModelCommitGone"  # the Hub no longer has the commit that the model was resolved to
    LoadStalled = "LoadStalled"  # no progress for 300 s while loading


class TerminationMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: TerminationReason
    message: str = Field(description="What was wrong, the value, the limit, the remedy.")
    shortfallBytes: int | None = Field(  # noqa: N815 - the JSON name
        default=None, description="Bytes missing per GPU, for InsufficientMemory."
    )
    measured: dict[str, int] | None = Field(
        default=None,
        description="Bytes per GPU by term (weights, activation, context, nccl), for InsufficientMemory on a GPU.",
    )
    engineVersion: str | None = Field(  # noqa: N815
        default=None, description="The release that measured."
    )

    def encode(self) -> str:
        """JSON of at most MESSAGE_LIMIT_BYTES bytes; a longer `message` is cut at its end."""
        text = self.model_dump_json(exclude_none=True)
        excess = len(text.encode()) - MESSAGE_LIMIT_BYTES
        if excess <= 0:
            return text
        kept = self.message.encode()[: -excess - 3].decode(errors="ignore") + "..."
        return self.model_copy(update={"message": kept}).encode()


class ResolvedModel(BaseModel):
    """What a container that ended well tells of the model: the commit of the Hub that its revision stands for."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    commit: str = Field(pattern=r"^[0-9a-f]{40}$")


class FetchedDrafter(BaseModel):
    """What the download of an assistant tells: the commit that it fetched, or why there is none."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    problem: str | None = None


def write_termination(message: TerminationMessage, path: str = TERMINATION_MESSAGE_PATH) -> None:
    """Write the message where the kubelet reads it; outside a container there is no such file: nothing is written."""
    _write(message.encode(), path)


def write_resolved(commit: str, path: str = TERMINATION_MESSAGE_PATH) -> None:
    """The same, for a commit. Raises ValidationError for what is none."""
    _write(ResolvedModel(commit=commit).model_dump_json(), path)


def write_fetched_drafter(told: FetchedDrafter, path: str = TERMINATION_MESSAGE_PATH) -> None:
    """The same, for an assistant; a longer problem is cut at its end."""
    problem = told.problem[: MESSAGE_LIMIT_BYTES // 4] if told.problem else None
    _write(told.model_copy(update={"problem": problem}).model_dump_json(exclude_none=True), path)


def _write(text: str, path: str) -> None:
    target = Path(path)
    if target.exists():
        target.write_text(text)
