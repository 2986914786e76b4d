"""Of several operators only the holder of one Lease works; the others wait, and read and write nothing else.

The library's election does the work. What is added: no request outlives its turn, whoever sees another holder stops at
once, and whoever stops gives the Lease back, so that the next one need not wait for it to expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from modelserve_operator.process import metrics

logger = logging.getLogger(__name__)


# A holder that cannot renew stops before anyone else may take over: its last try begins RETRY + RENEW seconds after the
# last renewal, and two requests later it is over; that is below LEASE.
class LeaseTimes(NamedTuple):
    """Seconds; the library takes whole ones for all but a request's."""

    lease: int = 15
    renew: int = 8
    retry: int = 2
    request: float = 2


class LeaseLostError(Exception):
    """Another operator holds the Lease, or it could not be renewed in time: this one must not write any more."""


class _Lease(LeaseLock):
    """A Lease whose requests to `leases` end in time, and whose holder notices another one."""

    def __init__(
        self, name: str, namespace: str, holder: str, leases: client.CoordinationV1Api, request_s: float
    ) -> None:
        super().__init__(name, namespace, holder, leases.api_client)
        self.api_instance = leases
        self.held = False
        self._request_s = request_s

    async def get(
        self, name: str, namespace: str
    ) -> tuple[bool, LeaderElectionRecord] | tuple[bool, Exception] | tuple[bool, None]:
        try:
            async with asyncio.timeout(self._request_s):
                found, record = await super().get(name, namespace)
        except (aiohttp.ClientError, TimeoutError) as error:
            return False, ApiException(status=0, reason=f"no answer from the API server: {error!r}")
        if isinstance(record, LeaderElectionRecord) and self.held and record.holder_identity != self.identity:
            raise LeaseLostError(f"Lease {namespace}/{name} is now held by {record.holder_identity!r}")
        return found, record  # type: ignore[return-value]  # a union of pairs, taken apart

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        # Not the library's: it passes `pretty=True`, which its own client refuses since 37.
        body = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        return await self._in_time(self._create(namespace, body))

    async def _create(self, namespace: str, body: client.V1Lease) -> bool:
        try:
            await self.api_instance.create_namespaced_lease(namespace, body)
        except ApiException as error:
            logger.warning("the Lease was not created: %s %s", error.status, error.reason)
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        return await self._in_time(super().update(name, namespace, updated_record))

    async def release(self) -> None:
        """Name no holder, if it is still ours: the next operator takes over at its next look."""
        with suppress(ApiException, aiohttp.ClientError, TimeoutError, LeaseLostError):
            found, _ = await self.get(self.name, self.namespace)
            if found and self.lease_reference is not None and self.lease_reference.spec is not None:
                self.lease_reference.spec.holder_identity = ""
                async with asyncio.timeout(self._request_s):  # refused with 409 when somebody took it meanwhile
                    await self.api_instance.replace_namespaced_lease(self.name, self.namespace, self.lease_reference)

    async def _in_time(self, request: Awaitable[Any]) -> bool:
        try:
            async with asyncio.timeout(self._request_s):
                return bool(await request)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("the Lease was not written: %r", error)
            return False


class Leadership:
    """One operator's part in the election. Without a Lease's name there is none: it works at once, for ever."""

    def __init__(
        self,
        leases: client.CoordinationV1Api,
        *,
        name: str,
        namespace: str,
        holder: str,
        times: LeaseTimes = LeaseTimes(),  # noqa: B008 - immutable
    ) -> None:
        self._times = times
        self._lease = _Lease(name, namespace, holder, leases, times.request) if name else None
        self.waiting = True
        metrics.LEADER.set(0)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Wait until this operator holds the Lease, and give it back in the end.

        Yields what renews it for as long as that goes, and raises LeaseLostError then.
        """
        if self._lease is None:
            self._begin()
            yield _for_ever
            return
        lease, where = self._lease, f"Lease {self._lease.namespace}/{self._lease.name}"
        waits, starts = self._times, {"onstarted_leading": _nothing, "onstopped_leading": _nothing}
        election = LeaderElection(Config(lease, waits.lease, waits.renew, waits.retry, **starts))

        async def keep() -> None:
            await election.renew_loop()
            raise LeaseLostError(f"{where} could not be renewed for {waits.renew} s")

        logger.info("waiting for %s as %s", where, lease.identity)
        try:
            await election.acquire()
            lease.held = True
            logger.info("holding %s", where)
            self._begin()
            yield keep
        finally:
            metrics.LEADER.set(0)
            if lease.held:
                await lease.release()

    def _begin(self) -> None:
        self.waiting = False
        metrics.LEADER.set(1)


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _nothing() -> None:
    """The library asks for something to start; the composition root does that itself."""
