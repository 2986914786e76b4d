"""The error that ends a worker for good: with its reason it becomes exit code 78 and a termination message."""

from __future__ import annotations

from collections.abc import Mapping

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.termination import TerminationReason


class TerminalError(Exception):
    """The worker would fail again in the same way: no restart can help.

    `shortfall_bytes` is per GPU, `measured` what was measured of it by then, in bytes by term.
    """

    def __init__(
        self,
        reason: TerminationReason,
        text: str,
        *,
        shortfall_bytes: int | None = None,
        measured: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(text)
        self.reason = reason
        self.shortfall_bytes = shortfall_bytes
        self.measured = dict(measured or {})

    @classmethod
    def of_input(cls, error: InvalidInput) -> TerminalError:
        """What a fault that a start met means for the worker: by the reason that the error has, and of an error that
        has none, the settings are at fault."""
        reason = getattr(error, "reason", TerminationReason.InvalidEngineArgs)
        return cls(TerminationReason.UnsupportedModel if isinstance(error, UnsupportedModel) else reason, str(error))

    @classmethod
    def of_checkpoint(cls, error: InvalidInput) -> TerminalError:
        """What a fault that was found while a checkpoint was read means for the worker."""
        unsupported = isinstance(error, UnsupportedModel)
        reason = TerminationReason.UnsupportedModel if unsupported else TerminationReason.InvalidCheckpoint
        return cls(reason, str(error))
