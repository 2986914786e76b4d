"""What every API's answer has, so that one handler serves them all."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from modelserve_worker.server.errors import ApiError
from modelserve_worker.server.sequences import SequenceRunner


class Answer(Protocol):
    """One request on its way to its answer; making it raises ApiError when the request cannot be served.

    `stream_end` is sent behind the last event, also behind the one of `failure`.
    """

    stream_end: bytes

    async def whole(self, runner: SequenceRunner) -> dict[str, Any]:
        """The body of the response."""
        ...

    def events(self, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
        """Encoded server-sent events."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The event that tells of an error in a stream that has begun."""
        ...
