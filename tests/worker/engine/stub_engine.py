"""An engine without scheduler, model or torch, to be built in a process of its own; a request's seed says what happens.

Every request gets the tokens FIRST_TOKEN to FIRST_TOKEN + 99 in turn, one a step, all requests at once; a Fault as its
seed ends that.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

from modelserve.errors import InvalidInput
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationReason
from modelserve_worker.engine.child import BuiltEngine
from modelserve_worker.engine.wire import Ready
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import FinishReason, Request, RequestOutput, TokenLogprobs
from modelserve_worker.scheduling.held_back import HeldBack
from modelserve_worker.scheduling.stats import EngineStats, StepEvents, TimedStep
from modelserve_worker.terminal_error import TerminalError

FIRST_TOKEN = 600  # words, in the trained checkpoints of tests/models


class Fault(IntEnum):
    REFUSED = 1001  # `add` raises InvalidInput
    BROKEN = 1002  # `add` raises what no one foresaw
    HANG = 1003  # its first step never ends
    FATAL = 1004  # its first step says that the engine is dead
    BUG = 1005  # its first step raises what no one foresaw


@dataclass
class StubEngine:
    """Stands for Engine, its scheduler and its runner."""

    step_seconds: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    steps_done: int = 0
    has_work_in_flight: bool = False
    held_back: HeldBack = field(default_factory=HeldBack)

    @property
    def scheduler(self) -> StubEngine:
        return self

    @property
    def runner(self) -> Any:
        return SimpleNamespace(check=lambda: None, shutdown=lambda: None)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        if request.sampling.seed == Fault.REFUSED:
            raise InvalidInput("7 pages are asked for and there are 5", field="max_tokens")
        if request.sampling.seed == Fault.BROKEN:
            raise ZeroDivisionError("a page of no bytes")
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> RequestOutput | None:
        known = self.requests.pop(request_id, None)
        return None if known is None else RequestOutput(request_id, (), FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        seeds = {request.sampling.seed for request in self.requests.values()}
        if Fault.HANG in seeds:
            time.sleep(600)
        if Fault.FATAL in seeds:
            raise EngineDead("modelserve-rank-1 (exit code -9) ended during a step")
        if Fault.BUG in seeds:
            raise KeyError("slot 3")
        time.sleep(self.step_seconds)
        self.steps_done += 1
        return [self._output(request) for request in list(self.requests.values())]

    def _output(self, request: Request) -> RequestOutput:
        logprobs = () if request.sampling.logprobs is None else (TokenLogprobs(-0.5, 1, ((7, -0.5),)),)
        token_id = FIRST_TOKEN + len(request.output_token_ids) % 100
        request.output_token_ids.append(token_id)
        if len(request.output_token_ids) < request.sampling.max_tokens:
            return RequestOutput(request.request_id, (token_id,), logprobs=logprobs)
        del self.requests[request.request_id]
        return RequestOutput(request.request_id, (token_id,), FinishReason.LENGTH, logprobs=logprobs)

    def take_events(self) -> StepEvents:
        admitted = [(name, time.monotonic(), 0) for name, request in self.requests.items() if not request.admitted]
        for request in self.requests.values():
            request.admitted = True
        timed = [TimedStep(0.02, len(self.requests), 100.0, 0, 0.0)] if self.requests else []
        return StepEvents(admitted, [len(self.requests)], timed)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.requests), generation_tokens_total=self.steps_done)


def build(
    progress: Callable[[int, int], None],
    *,
    step_seconds: float = 0.0,
    deadline_s: float = 60.0,
    max_model_len: int = 4096,
    with_rank: bool = False,
    end: str = "",
) -> BuiltEngine:
    """`end` is how the start fails; `with_rank` gives the engine a child that ends with it, as a rank does."""
    if end:
        _fail(end)
    assert "torch" not in sys.modules
    report: dict[str, Any] = {"pid": os.getpid()}
    if with_rank:
        context = multiprocessing.get_context("spawn")
        running, told = context.Pipe(duplex=False)
        rank = context.Process(target=_rank, args=(told,), daemon=True)
        rank.start()
        running.recv()  # one that still reads its modules would end only behind them
        report["rank"] = rank.pid
    for done in range(1, 4):
        progress(done, 3)
    ready = Ready(max_model_len, deadline_s, report, {"block_size": "64"}, EngineStats(num_waiting=0))
    return BuiltEngine(StubEngine(step_seconds), ready)  # type: ignore[arg-type]


def _fail(end: str) -> None:
    if end == "memory":
        raise TerminalError(
            TerminationReason.InsufficientMemory, "12 bytes are missing per device", shortfall_bytes=12,
            measured={"context": 7},
        )  # fmt: skip
    if end == "stalled":  # as the load watchdog does, which has written the termination message
        os._exit(TERMINAL_EXIT_CODE)
    if end == "killed":
        os.kill(os.getpid(), 9)
    if end == "never":
        time.sleep(600)
    raise RuntimeError(end)


def _rank(told: Connection[str, None]) -> None:
    told.send("running")
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
