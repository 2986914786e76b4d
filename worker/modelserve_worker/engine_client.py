"""The door between the HTTP server and the engine: the server sees nothing else of it. Torch-free."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from modelserve_worker.request import Request, RequestOutput


class EngineDead(Exception):  # noqa: N818 - a state of the engine that callers name, as in "raises EngineDead"
    """The engine stopped; the text says why. Every open request gets it, and /health answers 503."""


class EngineClient(Protocol):
    max_model_len: int

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request until one carries a finish_reason.

        Closing the iterator early aborts the request: its pages are free at the next step. Raises EngineDead.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; unknown or finished ids are ignored."""
        ...

    def is_alive(self) -> bool: ...

    def plan_report(self) -> dict[str, Any]:
        """The body of /v1/plan: predicted beside allocated, in the shape of status.plan plus `allocated`."""
        ...
