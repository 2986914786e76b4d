"""Adapters that the engine holds: of many that come together the first are soon Ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

from adapter_server import ARCHITECTURE, AdapterEngine, write_adapter

from modelserve_worker.engine_client import EngineClient
from modelserve_worker.server.adapters.files import look_at
from modelserve_worker.server.adapters.residents import ResidentAdapters
from modelserve_worker.server.adapters.versions import ProbeResult


async def test_two_are_probed_at_a_time_and_one_that_is_slow_keeps_one_place(tmp_path: Path) -> None:
    waiting: dict[str, asyncio.Event] = {}

    async def probe(engine: EngineClient, digest: str) -> ProbeResult:
        waiting[digest] = asyncio.Event()
        await waiting[digest].wait()
        return ProbeResult(kl=1.0, top1_changed=1.0, prompts=8, base_kl=0.0)

    engine = AdapterEngine()
    held = ResidentAdapters(engine, 8, probe, lambda directory: None)
    files = [look_at(write_adapter(tmp_path / str(seed), seed=seed), ARCHITECTURE) for seed in range(4)]
    tasks = [asyncio.create_task(held.hold(each)) for each in files]

    async def until_probed(count: int) -> None:
        async with asyncio.timeout(30):
            while len(waiting) < count:  # noqa: ASYNC110 - nothing tells that a probe began
                await asyncio.sleep(0.01)

    await until_probed(2)
    while len(engine.read_digests) < len(files):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert len(waiting) == 2, "all are read, and two are being probed"
    slow, *_ = waiting
    for count in (3, 4):
        for digest, event in waiting.items():
            if digest != slow:
                event.set()
        await until_probed(count)
    for event in waiting.values():
        event.set()
    assert [each.kl for each in await asyncio.gather(*tasks)] == [1.0] * 4
