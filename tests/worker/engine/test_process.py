"""The engine in a process of its own: streams, refusals, hangs, deaths of either side, starts that fail."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import stub_engine
from stub_engine import Fault

from modelserve.errors import InvalidInput
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationReason
from modelserve_worker.engine.deadline import HEARTBEAT_S
from modelserve_worker.engine.fair_queue import FairLimits
from modelserve_worker.engine.loop import EngineLoop, FrontEndSocket
from modelserve_worker.engine.process import EngineProcess, EngineStartFailed
from modelserve_worker.engine.wire import Stop, Stopped, encode
from modelserve_worker.engine_client import EngineBusy, EngineDead
from modelserve_worker.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from modelserve_worker.terminal_error import TerminalError

Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    engines: list[EngineProcess] = []

    async def started(of: type[EngineProcess] = EngineProcess, **settings: Any) -> EngineProcess:
        engines.append(of(functools.partial(stub_engine.build, **settings)))
        await engines[-1].start(lambda done, total: None)
        return engines[-1]

    yield started
    for engine in engines:
        await engine.shutdown()


def request(name: str, max_tokens: int = 5, *, seed: int = 0, **sampling: Any) -> Request:
    return Request(name, (2, 3), SamplingParams(seed=seed, max_tokens=max_tokens, **sampling))


def test_a_step_without_a_token_is_told_and_where_nothing_ran_the_loop_pauses() -> None:
    """A prompt's chunk moves the figures; a scheduler that can schedule nothing is not asked again at once."""
    ours, theirs = socket.socketpair()
    told: list[Any] = []
    paused: list[float] = []

    class Noted(FrontEndSocket):
        def send(self, message: Any) -> None:
            told.append(message)

        def pause(self, seconds: float) -> None:
            paused.append(seconds)

    class Chunks(stub_engine.StubEngine):
        def step(self) -> list[RequestOutput]:
            if self.steps_done == 1 and not paused:
                return []
            self.steps_done += 1
            if self.steps_done == 2:
                ours.sendall(encode(Stop()))
            return []

    engine = Chunks()
    engine.add(request("a"))
    with ours, theirs:
        EngineLoop(engine, Noted(theirs)).run()  # type: ignore[arg-type]
    *reports, last = told
    assert [report.steps_done for report in reports] == [1, 2]
    assert isinstance(last, Stopped)
    assert len(paused) == 1


async def collect(engine: EngineProcess, *requests: Request) -> list[RequestOutput]:
    return [output async for outputs in engine.generate(requests) for output in outputs]


def token_ids(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is another process's
            await asyncio.sleep(0.005)


@asynccontextmanager
async def bystander(engine: EngineProcess) -> AsyncIterator[None]:
    """A request that runs while the context lasts, and has heard every token of its own in turn at the end."""
    heard: list[RequestOutput] = []

    async def listen(enough: asyncio.Event, begun: asyncio.Event) -> None:
        async with aclosing(engine.generate([request("bystander", 100_000)])) as steps:
            async for outputs in steps:
                heard.extend(outputs)
                begun.set()
                if enough.is_set():
                    return

    begun, enough = asyncio.Event(), asyncio.Event()
    listening = asyncio.create_task(listen(enough, begun))
    await begun.wait()
    yield
    before = len(token_ids(heard))
    enough.set()
    await listening
    tokens = token_ids(heard)
    assert len(tokens) > before, "it goes on"
    assert tokens == [stub_engine.FIRST_TOKEN + number % 100 for number in range(len(tokens))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False


async def test_streams_get_their_own_tokens_and_the_client_tells_the_engine(start: Start) -> None:
    loading: list[tuple[int, int]] = []
    engine = EngineProcess(functools.partial(stub_engine.build))
    try:
        ready = await engine.start(lambda done, total: loading.append((done, total)))
        assert loading[0][1] == 3
        assert loading[-1] == (3, 3)
        assert (engine.max_model_len, ready.cache_config) == (4096, {"block_size": "64"})
        assert engine.plan_report() == {"pid": engine.pid}
        assert engine.pid != os.getpid()
        streams = await asyncio.gather(*(collect(engine, request(f"r{i}", 1 + i)) for i in range(32)))
        for i, outputs in enumerate(streams):
            assert token_ids(outputs) == list(range(600, 601 + i))
            assert [output.finish_reason for output in outputs] == [None] * i + [FinishReason.LENGTH]
        (output,) = await collect(engine, request("p", 1, logprobs=1))
        assert output.logprobs == (TokenLogprobs(-0.5, 1, ((7, -0.5),)),)
        assert engine.stats().num_running == 0
        assert engine.is_alive()
    finally:
        await engine.shutdown()
    assert not is_running(engine.pid)


async def test_several_requests_come_through_one_iterator(start: Start) -> None:
    engine = await start(step_seconds=0.002)
    outputs = await collect(engine, request("a", 3), request("b", 40), request("c", 1))
    by_id = {name: [output for output in outputs if output.request_id == name] for name in "abc"}
    assert {name: len(token_ids(found)) for name, found in by_id.items()} == {"a": 3, "b": 40, "c": 1}
    assert await collect(engine) == []


async def test_the_plan_says_how_long_steps_take_once_there_were_enough(start: Start) -> None:
    engine = await start()
    await collect(engine, request("short", 10))
    assert engine.plan_report() == {"pid": engine.pid}
    heard: list[int] = []
    engine.on_steps = lambda events: heard.extend(events.step_tokens)
    await collect(engine, request("long", 60))
    (measured,) = engine.plan_report()["speed"]
    assert (measured["kind"], measured["milliseconds"], measured["contextTokens"]) == ("Decode", 20, 100)
    assert measured["steps"] >= 60
    assert len(heard) >= 60


async def test_a_slow_reader_gets_several_steps_at_once(start: Start) -> None:
    engine = await start()
    lists = []
    async with aclosing(engine.generate([request("a", 50)])) as steps:
        async for outputs in steps:
            lists.append(outputs)
            await asyncio.sleep(0.1)
    assert token_ids([output for outputs in lists for output in outputs]) == list(range(600, 650))
    assert len(lists) < 50


async def test_closing_a_stream_aborts_it_and_leaves_the_others_alone(start: Start) -> None:
    engine = await start(step_seconds=0.005)
    async with bystander(engine):
        async with aclosing(engine.generate([request("gone", 100_000)])) as steps:
            await anext(steps)
            await until(lambda: engine.stats().num_running == 2)
        with pytest.raises(InvalidInput, match="'gone' is in use"):
            await collect(engine, request("gone"))
        await until(lambda: engine.stats().num_running == 1)
        assert token_ids(await collect(engine, request("gone"))) == [600, 601, 602, 603, 604]


async def test_abort_ends_one_of_several(start: Start) -> None:
    engine = await start(step_seconds=0.005)
    outputs: list[RequestOutput] = []
    async with aclosing(engine.generate([request("a", 100_000), request("b", 30)])) as steps:
        async for step in steps:
            outputs += step
            engine.abort("a")
            engine.abort("unknown")
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason is not None}
    assert ends == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}
    assert len(token_ids([output for output in outputs if output.request_id == "b"])) == 30


async def test_a_request_that_the_scheduler_refuses_fails_alone(start: Start) -> None:
    engine = await start(step_seconds=0.005)
    async with bystander(engine):
        with pytest.raises(InvalidInput, match="7 pages are asked for and there are 5") as refused:
            await collect(engine, request("beside", 100_000), request("refused", seed=Fault.REFUSED))
        assert refused.value.field == "max_tokens"
        (output,) = await collect(engine, request("broken", seed=Fault.BROKEN))
        assert output.finish_reason is FinishReason.ERROR
        assert "ZeroDivisionError: a page of no bytes" in (output.error or "")
        await until(lambda: engine.stats().num_running == 1)
    assert engine.is_alive()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.FATAL, r"modelserve-rank-1 \(exit code -9\) ended during a step"),
        (Fault.BUG, r"the engine loop failed: KeyError: 'slot 3'"),
    ],
)
async def test_a_fatal_step_reaches_every_waiter(start: Start, fault: Fault, reason: str) -> None:
    engine = await start(step_seconds=0.005)
    streams = [asyncio.create_task(collect(engine, request(f"r{i}", 100_000))) for i in range(3)]
    await until(lambda: engine.stats().num_running == 3)
    for stream in [*streams, asyncio.create_task(collect(engine, request("fatal", seed=fault)))]:
        with pytest.raises(EngineDead, match=reason):
            await stream
    assert not engine.is_alive()
    with pytest.raises(EngineDead, match=reason):
        await collect(engine, request("late"))
    await until(lambda: not is_running(engine.pid))


async def test_a_killed_engine_is_noticed_at_once(start: Start) -> None:
    engine = await start(step_seconds=0.005, with_rank=True)
    stream = asyncio.create_task(collect(engine, request("a", 100_000)))
    await until(lambda: engine.stats().num_running == 1)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="the engine's process was killed by signal 9"):  # not that it is silent
        await stream
    assert not engine.is_alive()
    rank = engine.plan_report()["rank"]
    await until(lambda: not is_running(rank))


async def test_a_hang_is_noticed_and_ends_the_process(start: Start) -> None:
    engine = await start(step_seconds=0.005, deadline_s=1.5)
    stream = asyncio.create_task(collect(engine, request("a", 100_000)))
    await asyncio.sleep(2)  # steps that end are no hang, however long a request takes
    assert engine.is_alive()
    with pytest.raises(EngineDead, match=r"no step has ended for .* s with 2 requests open \(limit 1.5 s\)"):
        await collect(engine, request("hang", seed=Fault.HANG))
    with pytest.raises(EngineDead, match="hangs"):
        await stream
    assert not engine.is_alive()
    await until(lambda: not is_running(engine.pid))


class Impatient(EngineProcess):
    silent_heartbeats = 2


async def test_a_stopped_process_is_noticed_and_a_long_step_is_none(start: Start) -> None:
    stopped, busy, idle = await start(Impatient, step_seconds=0.005), await start(Impatient), await start(Impatient)
    stream = asyncio.create_task(collect(stopped, request("a", 100_000)))
    long_step = asyncio.create_task(collect(busy, request("long", seed=Fault.HANG)))
    await until(lambda: stopped.stats().num_running == 1)
    os.kill(stopped.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDead, match=r"has said nothing for 4 s: it is stopped or stuck"):
            await stream
    await until(lambda: not is_running(stopped.pid))
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert (stopped.is_alive(), busy.is_alive(), idle.is_alive()) == (False, True, True)
    assert not long_step.done()
    assert len(token_ids(await collect(idle, request("b")))) == 5
    os.kill(busy.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="killed"):
        await long_step


async def test_an_idle_engine_does_not_hang(start: Start) -> None:
    engine = await start(deadline_s=1.5)
    await collect(engine, request("a"))
    await asyncio.sleep(2)
    assert len(token_ids(await collect(engine, request("b")))) == 5


async def test_shutdown_ends_streams_and_process(start: Start) -> None:
    engine = await start(step_seconds=0.005, with_rank=True)
    stream = asyncio.create_task(collect(engine, request("a", 100_000)))
    await until(lambda: engine.stats().num_running == 1)
    await engine.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await stream
    await engine.shutdown()
    assert not is_running(engine.pid)
    rank = engine.plan_report()["rank"]
    await until(lambda: not is_running(rank))


@contextmanager
def front_end(folder: Path, chosen: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that has started an engine with a rank under these variables, and both of its children."""
    (folder / "front_end.py").write_text(
        "import asyncio, functools, stub_engine, time\n"
        "from modelserve_worker.engine.process import EngineProcess\n"
        "async def main():\n"
        "    engine = EngineProcess(functools.partial(stub_engine.build, with_rank=True))\n"
        "    await engine.start(lambda done, total: None)\n"
        "    print(engine.pid, engine.plan_report()['rank'], flush=True)\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = {**own, **chosen, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(folder / "front_end.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        assert len(children) == 2
        try:
            yield process, children
        finally:
            process.kill()


def _environment(pid: int) -> dict[str, str]:
    """What a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_the_engine_do_not_spin_for_long_unless_the_user_wants_it(
    tmp_path: Path, chosen: dict[str, str], expected: str | None
) -> None:
    with front_end(tmp_path, chosen) as (_, children):
        for found in map(_environment, children):
            assert found.get("GOMP_SPINCOUNT") == expected
            assert found.get("OMP_WAIT_POLICY") == chosen.get("OMP_WAIT_POLICY")


@pytest.mark.parametrize("cancelled", [False, True])
async def test_shutdown_while_it_loads_waits_for_nothing(cancelled: bool) -> None:
    engine = EngineProcess(functools.partial(stub_engine.build, end="never"))
    starting = asyncio.create_task(engine.start(lambda done, total: None))
    await asyncio.sleep(0)
    if cancelled:
        starting.cancel()
    async with asyncio.timeout(60):
        await engine.shutdown()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert not is_running(engine.pid)


async def test_a_terminal_start_keeps_its_reason_and_shortfall(start: Start) -> None:
    with pytest.raises(TerminalError, match="12 bytes are missing per device") as failure:
        await start(end="memory")
    assert (failure.value.reason, failure.value.shortfall_bytes) == (TerminationReason.InsufficientMemory, 12)
    assert failure.value.measured == {"context": 7}


@pytest.mark.parametrize(
    ("end", "text", "exit_code"),
    [
        ("loose contact", "the engine could not be started: RuntimeError: loose contact", 1),
        ("stalled", f"the engine's process ended with exit code {TERMINAL_EXIT_CODE}", TERMINAL_EXIT_CODE),
        ("killed", "the engine's process was killed by signal 9", 1),
    ],
)
async def test_other_failed_starts_say_what_the_worker_ends_with(
    start: Start, end: str, text: str, exit_code: int
) -> None:
    with pytest.raises(EngineStartFailed, match=text) as failure:
        await start(end=end)
    assert failure.value.exit_code == exit_code


def test_engine_and_rank_end_when_the_front_end_is_killed(tmp_path: Path) -> None:
    with front_end(tmp_path, {}) as (process, children):
        assert all(map(is_running, children))
        process.kill()
    asyncio.run(until(lambda: not any(map(is_running, children))))


async def test_what_waits_for_its_turn_is_counted_refused_and_ended_without_the_engine() -> None:
    limits = FairLimits(places=1, step_tokens=100, max_waiting=2)
    engine = EngineProcess(functools.partial(stub_engine.build, step_seconds=0.005), limits)
    try:
        await engine.start(lambda done, total: None)
        first = asyncio.create_task(collect(engine, request("a", 100_000)))
        await until(lambda: engine.stats().num_running == 1)
        second = asyncio.create_task(collect(engine, request("b", 3), request("c", 3)))
        await until(lambda: engine.stats().num_waiting == 2)
        with pytest.raises(EngineBusy, match="2 requests are waiting already"):
            await collect(engine, request("d"))
        engine.abort("c")
        engine.abort("a")
        assert (await first)[-1].finish_reason is FinishReason.ABORT
        outputs = await second
        assert [output.request_id for output in outputs if output.finish_reason is FinishReason.ABORT] == ["c"]
        assert len(token_ids(outputs)) == 3
        assert len(token_ids(await collect(engine, request("c", 4)))) == 4, "its id is free again"
    finally:
        await engine.shutdown()
