"""Two operators and one Lease: who works, when the other takes over, and that nobody works without it."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException

from modelserve_operator.process import metrics
from modelserve_operator.process.leadership import Leadership, LeaseLostError, LeaseTimes


class Leases:
    """The API server's part for one Lease: versions, 404 and 409. `down`: it does not answer any more."""

    def __init__(self) -> None:
        self.stored: Any = None
        self.version = 0
        self.down = False
        self.api_client = SimpleNamespace()

    async def _reach(self) -> None:
        if self.down:
            await asyncio.sleep(3600)

    async def read_namespaced_lease(self, name: str, namespace: str) -> Any:
        await self._reach()
        if self.stored is None:
            refused = ApiException(status=404, reason="Not Found")
            refused.body = '{"code": 404}'
            raise refused
        return copy.deepcopy(self.stored)

    async def create_namespaced_lease(self, namespace: str, body: Any) -> None:
        await self._reach()
        if self.stored is not None:
            raise ApiException(status=409, reason="AlreadyExists")
        self._store(body)

    async def replace_namespaced_lease(self, name: str, namespace: str, body: Any) -> None:
        await self._reach()
        if body.metadata.resource_version != self.stored.metadata.resource_version:
            raise ApiException(status=409, reason="Conflict")
        self._store(body)

    def _store(self, body: Any) -> None:
        self.version += 1
        self.stored = copy.deepcopy(body)
        self.stored.metadata.resource_version = str(self.version)
        for field in ("acquire_time", "renew_time"):  # text goes in, the client reads times
            text = getattr(self.stored.spec, field)
            if isinstance(text, str):
                setattr(self.stored.spec, field, leadership_time(text))

    @property
    def holder(self) -> str:
        return self.stored.spec.holder_identity if self.stored else ""


def leadership_time(text: str) -> Any:
    from datetime import datetime

    return datetime.fromisoformat(text.removesuffix("Z"))


@pytest.fixture
def leases() -> Leases:
    return Leases()


def _operator(name: str, leases: Leases) -> Leadership:
    times = LeaseTimes(lease=4, renew=2, retry=1, request=0.5)  # whole seconds: the shortest that the library takes
    where = {"name": "modelserve-operator", "namespace": "modelserve-system"}
    return Leadership(leases, **where, holder=name, times=times)


class Work:
    """What an operator does while it holds the Lease."""

    def __init__(self, name: str, leases: Leases) -> None:
        self.leadership = _operator(name, leases)
        self.working = False
        self.began = asyncio.Event()
        self.stop = asyncio.Event()

    async def run(self) -> None:
        async with self.leadership.held() as keep:
            self.working = True
            self.began.set()
            keeping, stopping = asyncio.create_task(keep()), asyncio.create_task(self.stop.wait())
            try:
                done, _ = await asyncio.wait({keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if keeping in done:
                    keeping.result()
            finally:
                self.working = False
                keeping.cancel()
                stopping.cancel()


async def test_one_of_two_works_and_hands_over_at_once_when_it_stops(leases: Leases) -> None:
    first, second = Work("first", leases), Work("second", leases)
    running = [asyncio.create_task(first.run())]
    await asyncio.wait_for(first.began.wait(), 20)
    running.append(asyncio.create_task(second.run()))
    await asyncio.sleep(1.5)
    assert (leases.holder, first.working, second.working) == ("first", True, False)
    assert second.leadership.waiting
    first.stop.set()
    await running[0]
    assert leases.holder == "", "given back, not left to expire"
    await asyncio.wait_for(second.began.wait(), 20)
    assert (leases.holder, first.working) == ("second", False)
    second.stop.set()
    await running[1]
    assert metrics.LEADER._value.get() == 0


async def test_who_sees_another_holder_stops_and_leaves_the_lease_alone(leases: Leases) -> None:
    work = Work("first", leases)
    running = asyncio.create_task(work.run())
    await asyncio.wait_for(work.began.wait(), 20)
    leases.stored.spec.holder_identity = "stranger"
    with pytest.raises(LeaseLostError, match="now held by 'stranger'"):
        await asyncio.wait_for(running, 20)
    assert not work.working
    assert leases.holder == "stranger"


async def test_who_cannot_renew_stops_before_another_may_take_over(leases: Leases) -> None:
    first, second = Work("first", leases), Work("second", leases)
    running = asyncio.create_task(first.run())
    await asyncio.wait_for(first.began.wait(), 20)
    leases.down = True
    with pytest.raises(LeaseLostError, match="could not be renewed"):
        await asyncio.wait_for(running, 30)
    leases.down = False
    taking = asyncio.create_task(second.run())
    await asyncio.wait_for(second.began.wait(), 30)
    assert (first.working, leases.holder) == (False, "second")
    second.stop.set()
    await taking


async def test_the_last_try_of_a_holder_ends_before_its_lease_does() -> None:
    """The last renewal is followed by a pause, tries within the deadline, and one try that may begin at its end."""
    times = LeaseTimes()
    assert times.retry + times.renew + 2 * times.request < times.lease


async def test_without_a_lease_there_is_no_election() -> None:
    alone = Leadership(Leases(), name="", namespace="n", holder="h")
    async with alone.held() as keep:
        assert not alone.waiting
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keep(), 0.05)
