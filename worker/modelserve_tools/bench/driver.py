"""Sends the requests of one load: a closed loop of fixed concurrency, or an open loop of arrivals."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from modelserve_tools.bench.record import Record
from modelserve_tools.bench.workload import Ask


class Sender(Protocol):
    """Endpoint.send."""

    def __call__(self, ask: Ask, *, began: float, planned: float | None = None) -> Awaitable[Record]: ...


@dataclass
class Load:
    """What one load brought so far. It may be stopped at any time. Seconds; `cpu_s` is this process's own.

    A session's next request is sent `think_s` after the answer to the one before, as long as none fails.

    `concurrency` is None in an open loop, and `rate` (requests a second) in a closed one.
    """

    concurrency: int | None
    rate: float | None
    requests: int
    think_s: float = 0.0
    records: list[Record] = field(default_factory=list)
    warmup: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    cpu_s: float = 0.0


async def run_load(
    load: Load,
    send: Sender,
    asks: Sequence[Ask],
    *,
    warmup: Sequence[Ask],
    arrivals: Iterable[float],
    on_done: Callable[[], None],
) -> None:
    """Warm up in a closed loop, then send `asks` and what follows them. `arrivals` has a time for each of them; a
    closed loop reads none. Of a session the warm-up sends the first request alone."""
    warming = load.concurrency or 1
    first = [replace(ask, follow=None) for ask in warmup]
    await _closed_loop(first, send, concurrency=warming, records=load.warmup, on_done=on_done, began=0.0)
    gc.collect()
    gc.freeze()  # no later collection walks through what is here now: that would delay the times of events
    began, cpu_began = time.perf_counter(), time.process_time()
    try:
        if load.concurrency is None:
            await _open_loop(
                asks, send, arrivals=arrivals, records=load.records, on_done=on_done, began=began, think_s=load.think_s
            )
        else:
            await _closed_loop(
                asks, send, concurrency=load.concurrency, records=load.records, on_done=on_done, began=began,
                think_s=load.think_s,
            )  # fmt: skip
    finally:
        load.duration_s, load.cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        gc.unfreeze()


async def _closed_loop(
    asks: Sequence[Ask],
    send: Sender,
    *,
    concurrency: int,
    records: list[Record],
    on_done: Callable[[], None],
    began: float,
    think_s: float = 0.0,
) -> None:
    async def take(work: Iterator[Ask]) -> None:
        for ask in work:
            await _session(ask, send, records=records, on_done=on_done, began=began, think_s=think_s)

    work = iter(asks)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asks))):
            group.create_task(take(work))


async def _open_loop(
    asks: Sequence[Ask],
    send: Sender,
    *,
    arrivals: Iterable[float],
    records: list[Record],
    on_done: Callable[[], None],
    began: float,
    think_s: float,
) -> None:
    async def one(ask: Ask, planned: float) -> None:
        await _session(ask, send, records=records, on_done=on_done, began=began, think_s=think_s, planned=planned)

    async with asyncio.TaskGroup() as group:
        for ask, planned in zip(asks, arrivals, strict=False):  # arrivals have no end
            await asyncio.sleep(max(0.0, began + planned - time.perf_counter()))
            group.create_task(one(ask, planned))


async def _session(
    ask: Ask,
    send: Sender,
    *,
    records: list[Record],
    on_done: Callable[[], None],
    began: float,
    think_s: float,
    planned: float | None = None,
) -> None:
    while True:
        record = await send(ask, began=began, planned=planned)
        records.append(record)
        on_done()
        if ask.follow is None or record.error_kind is not None:
            return
        await asyncio.sleep(think_s)
        ask, planned = ask.follow(record.answer), None
