"""Many clients on one engine thread: streams, aborts, failures, draining and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from modelserve.errors import InvalidInput
from modelserve_worker.engine.async_engine import AsyncEngine
from modelserve_worker.engine_client import EngineClient, EngineDead
from modelserve_worker.request import FinishReason, Request, RequestOutput, SamplingParams

Build = Callable[..., AsyncEngine]


def request(name: str, prompt: int = 4, max_tokens: int = 5) -> Request:
    return Request(name, tuple(range(10, 10 + prompt)), SamplingParams(seed=0, max_tokens=max_tokens))


async def collect(engine: EngineClient, asked: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(asked)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is another thread's
            await asyncio.sleep(0.005)


async def test_64_requests_at_once_each_get_their_own_tokens(build_async_engine: Build) -> None:
    engine = build_async_engine(requests_of_100=3)  # far fewer than 64: they queue and are preempted
    streams = await asyncio.gather(
        *(collect(engine, request(f"r{i}", prompt=1 + i % 30, max_tokens=2 + i)) for i in range(64))
    )
    for i, outputs in enumerate(streams):
        first = 101 + i % 30
        assert [token.token_id for output in outputs for token in output.tokens] == list(range(first, first + 2 + i))
        assert [output.finish_reason for output in outputs] == [None] * (1 + i) + [FinishReason.LENGTH]
    await until(lambda: engine.stats().num_running == 0)
    stats = engine.stats()
    assert (stats.held_bytes, stats.num_waiting, stats.generation_tokens_total) == (0, 0, sum(range(2, 66)))
    assert engine.plan_report() == {"maxModelLen": 100}
    assert engine.max_model_len == 100


async def test_closing_a_stream_frees_its_pages_and_leaves_the_others_alone(build_async_engine: Build, runner) -> None:
    runner.step_seconds = 0.002
    engine = build_async_engine()
    other = asyncio.create_task(collect(engine, request("other", max_tokens=60)))
    async with aclosing(engine.generate(request("gone", max_tokens=90))) as outputs:
        await anext(outputs)
        await until(lambda: engine.stats().num_running == 2)
    await until(lambda: engine.stats().num_running == 1)
    assert sum(len(output.tokens) for output in await other) == 60
    steps_of_gone = sum("gone" in {share.request_id for share in batch.requests} for batch in runner.batches)
    assert steps_of_gone < 60
    assert engine.stats().held_bytes == 0


async def test_abort_tells_the_waiter(build_async_engine: Build, runner) -> None:
    runner.step_seconds = 0.002
    engine = build_async_engine(seqs=1)
    running = asyncio.create_task(collect(engine, request("a", max_tokens=90)))
    waiting = asyncio.create_task(collect(engine, request("b", max_tokens=90)))
    await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
    for name in ("b", "a", "unknown"):
        await engine.abort(name)
    assert (await running)[-1].finish_reason is FinishReason.ABORT
    assert await waiting == [RequestOutput("b", (), FinishReason.ABORT)]
    await until(lambda: engine.stats().held_bytes == 0)


async def test_an_idle_engine_sleeps_and_wakes(build_async_engine: Build, runner) -> None:
    engine = build_async_engine()
    for name in "abc":
        await collect(engine, request(name, max_tokens=1))
        await asyncio.sleep(0.02)
    assert len(runner.batches) == 3


async def test_impossible_requests_are_refused_before_they_start(build_async_engine: Build) -> None:
    engine = build_async_engine()
    with pytest.raises(InvalidInput, match="100 tokens"):
        engine.generate(request("a", prompt=100))
    running = engine.generate(request("a", max_tokens=50))
    await anext(running)
    with pytest.raises(InvalidInput, match="'a' is in use"):
        await collect(engine, request("a"))
    await running.aclose()
    async with asyncio.timeout(10):
        while True:  # the id is free again with the abort
            try:
                outputs = await collect(engine, request("a"))
                break
            except InvalidInput:
                await asyncio.sleep(0.005)
    assert [token.token_id for output in outputs for token in output.tokens] == [104, 105, 106, 107, 108]


async def test_a_failed_step_reaches_its_client(build_async_engine: Build, runner) -> None:
    runner.result_errors[1] = RuntimeError("overheated")
    engine = build_async_engine()
    (output,) = await collect(engine, request("a"))
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "the step failed: RuntimeError: overheated")
    assert len(await collect(engine, request("b"))) == 5
    assert engine.is_alive()


async def test_death_reaches_every_waiter(build_async_engine: Build, runner) -> None:
    runner.gate.clear()
    runner.result_errors.update(dict.fromkeys(range(1, 99), RuntimeError("device lost")))
    engine = build_async_engine(budget=1, seqs=8)
    clients = [asyncio.create_task(collect(engine, request(f"r{i}"))) for i in range(8)]
    await until(lambda: len(runner.batches) == 2)
    runner.gate.set()
    ends = await asyncio.gather(*clients, return_exceptions=True)
    dead = [end for end in ends if isinstance(end, EngineDead)]
    assert dead
    assert "device lost" in str(dead[0])
    assert all(isinstance(end, EngineDead) or end[-1].finish_reason is FinishReason.ERROR for end in ends)
    assert not engine.is_alive()
    with pytest.raises(EngineDead, match="device lost"):
        engine.generate(request("late"))
    await until(lambda: runner.shut_down)


async def test_drain_lets_open_requests_finish(build_async_engine: Build, runner) -> None:
    runner.step_seconds = 0.001
    engine = build_async_engine()
    client = asyncio.create_task(collect(engine, request("a", max_tokens=30)))
    await until(lambda: engine.stats().num_running == 1)
    draining = asyncio.create_task(engine.drain(20))
    await asyncio.sleep(0)
    with pytest.raises(EngineDead, match="draining"):
        engine.generate(request("late"))
    assert await draining
    assert len(await client) == 30
    assert await engine.drain(0), "an idle engine is drained at once"


async def test_drain_aborts_what_is_late(build_async_engine: Build, runner) -> None:
    runner.step_seconds = 0.02
    engine = build_async_engine()
    client = asyncio.create_task(collect(engine, request("a", max_tokens=90)))
    await until(lambda: engine.stats().num_running == 1)
    assert not await engine.drain(0.05)
    assert (await client)[-1].finish_reason is FinishReason.ABORT


async def test_shutdown_ends_thread_runner_and_streams(build_async_engine: Build, runner) -> None:
    runner.step_seconds = 0.005
    engine = build_async_engine()
    client = asyncio.create_task(collect(engine, request("a", max_tokens=90)))
    await until(lambda: engine.stats().num_running == 1)
    await engine.shutdown()
    assert runner.shut_down
    with pytest.raises(EngineDead, match="shut down"):
        await client
