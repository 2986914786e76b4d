"""What the front end says of prompts that it holds back: whenever it changes, and to the scheduler."""

from __future__ import annotations

import asyncio
import socket

import stub_engine
from stub_engine import Fault

from modelserve_worker.engine.fair_queue import FairLimits
from modelserve_worker.engine.loop import EngineLoop, FrontEndSocket
from modelserve_worker.engine.process import EngineProcess
from modelserve_worker.engine.wire import Command, HoldingBack, Stop, encode
from modelserve_worker.request import Request, SamplingParams


async def _run(engine: EngineProcess, *requests: Request) -> None:
    async for _ in engine.generate(requests):
        pass


async def test_what_is_held_back_is_told_whenever_it_changes() -> None:
    def long(name: str) -> Request:
        return Request(name, (5,) * 100, SamplingParams(seed=Fault.HANG, max_tokens=5))

    limits = FairLimits(places=64, step_tokens=100, max_waiting=64)
    told: list[int] = []

    class Noted(EngineProcess):
        def _send(self, command: Command) -> None:
            told.extend([command.prompt_tokens] if isinstance(command, HoldingBack) else [])
            super()._send(command)

    engine = Noted(stub_engine.build, limits)
    try:
        await engine.start(lambda done, total: None)
        calls = [("1", "2", "3", "4", "5", "6", "7", "8"), ("a", "b", "c"), ("d", "e")]
        tasks = [asyncio.create_task(_run(engine, *map(long, names))) for names in calls]
        await asyncio.sleep(0)
        assert told == [300, 500], "eight prompts are enough ahead"
        engine.abort("a")
        engine.abort("1")
        engine.abort("unknown")
        assert told == [300, 500, 400], "of what the engine has, and of nobody, nothing is held back"
        tasks[2].cancel()
        await asyncio.wait(tasks[2:])
        assert told == [300, 500, 400, 200], "a call that is closed takes its requests along"
        tasks[1].cancel()
        await asyncio.wait(tasks[1:])
        assert told == [300, 500, 400, 200, 0]
        tasks[0].cancel()
    finally:
        engine.kill()
        await engine.shutdown()


def test_the_loop_tells_the_scheduler_what_is_held_back() -> None:
    ours, theirs = socket.socketpair()
    engine = stub_engine.StubEngine()
    ours.sendall(encode(HoldingBack(700)) + encode(HoldingBack(500)) + encode(Stop()))
    with ours, theirs:
        EngineLoop(engine, FrontEndSocket(theirs)).run()  # type: ignore[arg-type]
    assert engine.held_back.rows == 500
