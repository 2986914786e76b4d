"""The interface between the HTTP server and the engine: the server sees nothing else of it. Torch-free."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from modelserve_worker.request import AdapterStrength, Request, RequestOutput


class EngineDead(Exception):  # noqa: N818 - a state of the engine that callers name, as in "raises EngineDead"
    """The engine stopped; the text says why. Every open request gets it, and /health answers 503."""


class EngineBusy(Exception):  # noqa: N818 - as EngineDead
    """Too many requests wait already; this one was not taken."""


class AdapterClient(Protocol):
    async def read(self, digest: str, directory: str) -> None:
        """Have an adapter, named by the digest of its files, where requests may ask for it. Raises InvalidInput for
        one that cannot be served, and EngineDead."""
        ...

    async def strengths(self, digest: str) -> tuple[AdapterStrength, ...]:
        """How large its terms are beside the products that they are added to, in a step that scored a prompt with it;
        empty where none was measured. Raises EngineDead."""
        ...

    def remove(self, digest: str) -> None:
        """Let go of an adapter that no open request has."""
        ...

    def pin(self, digests: frozenset[str]) -> None:
        """These of the adapters that it has, and no others, keep their place in device memory once they have one; one
        place less than there are, at most."""
        ...


class EngineClient(Protocol):
    max_model_len: int

    @property
    def adapters(self) -> AdapterClient: ...

    def generate(self, requests: Sequence[Request], *, client: str = "") -> AsyncGenerator[list[RequestOutput], None]:
        """Stream the outputs of `requests` until each has had one with a finish_reason.

        Calls of different clients, by name, take turns, and so do the calls of one client.
        One list holds what came since the last one, in order: one step's outputs, or several steps' when the caller is
        slower than the engine. Closing the iterator aborts what still runs: its pages are free at the next step.
        Raises InvalidInput when the engine refuses a request, EngineBusy before there is an output, and EngineDead.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End one request of an open iterator, whose others go on; unknown and finished ids are ignored."""
        ...

    def is_alive(self) -> bool: ...

    def plan_report(self) -> dict[str, Any]:
        """The body of /v1/plan: predicted beside allocated, in the shape of status.plan plus `allocated`."""
        ...
