"""Who reaches the webhook's port and asks without end holds up nobody: places by address, bodies within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from io import BytesIO
from typing import Any

import aiohttp

from modelserve_operator.settings import Settings
from modelserve_operator.webhook import server
from modelserve_operator.webhook.certificates import new_pair
from modelserve_operator.webhook.server import LARGEST_REVIEW, Previewer, ServedCertificate, serve
from modelserve_operator.webhook.turns import MOST, MOST_OF_ADDRESS, Turns

REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "request": {"uid": "u", "object": {"kind": "ModelServe", "metadata": {"name": "m", "namespace": "ml"}, "spec": {}}},
}


def test_one_address_leaves_places_to_others() -> None:
    turns = Turns()
    held = [turns.place("pod") for _ in range(MOST_OF_ADDRESS)]
    assert all(each.__enter__() for each in held)
    with turns.place("pod") as again, turns.place("api-server") as other:
        assert (again, other) == (False, True)
    for each in held:
        each.__exit__(None, None, None)
    with turns.place("pod") as free:
        assert free


def test_all_of_them_together_have_a_bound() -> None:
    turns = Turns()
    held = [turns.place(f"pod-{number}") for number in range(MOST)]
    assert all(each.__enter__() for each in held)
    with turns.place("api-server") as free:
        assert not free, "answered at once, without a preview, rather than late"
    held.pop().__exit__(None, None, None)
    with turns.place("api-server") as free:
        assert free


class _Slow:
    """A reader that answers nobody until it is told to."""

    def __init__(self) -> None:
        self.go, self.asked = asyncio.Event(), 0

    async def observe(self, *_: Any) -> Any:
        self.asked += 1
        await self.go.wait()
        raise TimeoutError


@asynccontextmanager
async def _asked(reader: _Slow) -> AsyncIterator[Any]:
    served = ServedCertificate()
    served.show(new_pair(("127.0.0.1",), datetime.now(UTC)))
    connector = aiohttp.TCPConnector(ssl=False, limit=0)
    previewer = Previewer(reader, Settings())  # type: ignore[arg-type]
    async with (
        serve(previewer, served.context, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def ask(*, seconds: int = 30, **body: Any) -> int:
            address = f"https://127.0.0.1:{port}{server.PATH}?timeout={seconds}s"
            async with session.post(address, **(body or {"json": REVIEW})) as answer:
                return answer.status

        yield ask


async def test_what_is_beyond_the_places_is_answered_at_once_and_asks_the_cluster_nothing() -> None:
    reader = _Slow()
    async with _asked(reader) as ask:
        waiting = [asyncio.create_task(ask()) for _ in range(MOST_OF_ADDRESS)]
        async with asyncio.timeout(60):
            while reader.asked < MOST_OF_ADDRESS:  # noqa: ASYNC110 - nothing tells when it changes
                await asyncio.sleep(0.001)
        assert await ask() == 429, "the API server goes on without a preview"
        assert reader.asked == MOST_OF_ADDRESS
        reader.go.set()
        assert await asyncio.gather(*waiting) == [200] * MOST_OF_ADDRESS
        assert await ask() == 200


async def test_bodies_that_are_too_large_or_never_end_are_given_up() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    reader = _Slow()
    async with _asked(reader) as ask:
        assert await ask(data=BytesIO(b" " * (LARGEST_REVIEW + 1))) == 413
        assert await ask(seconds=0, data=endless()) == 408
    assert reader.asked == 0
