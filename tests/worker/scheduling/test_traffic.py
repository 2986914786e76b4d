"""Random traffic through the scheduler onto a device with stamped rows: two steps in flight, tiny pools, failures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from stamped_device import StampedDevice, StampedModel

from modelserve.architecture import LayerKind
from modelserve.errors import InvalidInput
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.request import FinishReason, Request, RequestOutput, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.arena import Page, PageArena
from modelserve_worker.scheduling.scheduler import Scheduler

S, G = LayerKind.SLIDING, LayerKind.GLOBAL
EOS = 1
STEPS = 100_000
# Prompt length, max_tokens, and the number of the sampled token that is EOS.
ARRIVALS = st.tuples(st.integers(1, 30), st.integers(1, 40), st.none() | st.integers(1, 40))

MODELS = (
    StampedModel((S, G)),
    StampedModel((S, S, G, S, G), shared=2),
    StampedModel((S, G, S, S, G), shared=3),
    StampedModel((S, S)),
    StampedModel((G,)),
)


@dataclass
class Client:
    """What one request is to say, and what it was told so far."""

    prompt: int
    max_tokens: int
    stop_after: int | None  # it samples EOS as its n-th token
    number: int
    received: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def token_at(self, position: int) -> int:
        if self.stop_after is not None and position == self.prompt + self.stop_after - 1:
            return EOS
        return 2 + (self.number * 7919 + position * 31) % 997


class Traffic(RuleBasedStateMachine):
    """Every arrival, abort, launch, answer and failure is a step; after each one the bytes are recounted."""

    steps = 0
    preemptions = 0
    moves = 0
    reuses = 0
    rows_read = 0
    faults: ClassVar[dict[str, Any]] = {}

    @initialize(
        model=st.sampled_from(MODELS),
        window=st.integers(1, 9),
        page_tokens=st.tuples(st.integers(1, 4), st.integers(1, 3)),
        rows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        limits=st.tuples(st.integers(1, 16), st.integers(1, 6), st.integers(3, 60)),
        pool=st.integers(100, 250),
        arrivals=st.lists(ARRIVALS, min_size=1, max_size=6),
    )
    def start(self, model, window, page_tokens, rows, limits, pool, arrivals) -> None:
        self.geometry = model.geometry(
            window=window,
            global_tokens=page_tokens[0],
            sliding_tokens=page_tokens[1],
            global_row=rows[0],
            sliding_row=rows[1],
        )
        budget, seqs, self.max_model_len = limits
        self.pool_bytes = self.geometry.held_bytes(self.max_model_len) * pool // 100
        self.scheduler = Scheduler(
            SchedulerLimits(budget, seqs, self.max_model_len, (EOS,)), self.geometry, self.pool_bytes
        )
        self.clients: dict[str, Client] = {}
        self.device = StampedDevice(
            model,
            self.geometry,
            self.pool_bytes,
            lambda request_id, position: self.clients[request_id].token_at(position),
            **self.faults,
        )
        self.stream: deque[ScheduledBatch] = deque()
        for arrival in arrivals:
            self.add(arrival)

    @rule(arrival=ARRIVALS)
    def add(self, arrival: tuple[int, int, int | None]) -> None:
        prompt, max_tokens, stop = arrival
        request_id = f"r{len(self.clients)}"
        client = Client(prompt, max_tokens, stop, number=len(self.clients))
        tokens = tuple(client.token_at(position) for position in range(prompt))
        self.clients[request_id] = client
        request = Request(request_id, tokens, SamplingParams(seed=0, max_tokens=max_tokens))
        rows = min(prompt + max_tokens, self.max_model_len) - 1
        if prompt >= self.max_model_len or self.geometry.held_bytes(rows) > self.pool_bytes:
            with pytest.raises(InvalidInput):
                self.scheduler.add(request)
            client.finish = FinishReason.ERROR
        else:
            self.scheduler.add(request)
        self.recount()

    @precondition(lambda self: len(self.stream) < 2)
    @rule()
    def schedule(self) -> None:
        batch = self.scheduler.schedule()
        if batch:
            assert 0 < batch.num_tokens <= self.scheduler.limits.max_num_batched_tokens
            assert all(self.clients[request.request_id].finish is None for request in batch.requests)
            self.stream.append(batch)
        elif not self.stream:
            assert not self.scheduler.has_requests, "requests wait and nothing runs"
        self.recount()

    @precondition(lambda self: self.stream)
    @rule()
    def answer(self) -> None:
        self._deliver(self.scheduler.update(self.device.execute(self.stream.popleft())))
        self.recount()

    @precondition(lambda self: len(self.stream) < 2)
    @rule(turns=st.integers(1, 4), arrivals=st.lists(ARRIVALS, max_size=2))
    def overlap(self, turns: int, arrivals: list[tuple[int, int, int | None]]) -> None:
        """What the engine does while requests come."""
        for arrival in arrivals:
            self.add(arrival)
        for _ in range(turns):
            self.schedule()
            if len(self.stream) == 2:
                self.answer()

    @precondition(lambda self: self.stream)
    @rule(luck=st.integers(0, 9))
    def fail(self, luck: int) -> None:
        if luck:
            self.answer()
            return
        batch = self.stream.popleft()
        self.device.lose(batch)
        outputs = self.scheduler.fail(batch.step, "the device is gone")
        assert {output.request_id for output in outputs} <= {request.request_id for request in batch.requests}
        self._deliver(outputs)
        self.recount()

    @rule(which=st.integers(0, 24))
    def abort(self, which: int) -> None:
        request_id = f"r{len(self.clients) - 1 - which}"
        client = self.clients.get(request_id)
        output = self.scheduler.abort(request_id)
        assert (output is not None) == (client is not None and client.finish is None)
        if output:
            self._deliver([output])
        self.recount()

    def recount(self) -> None:
        type(self).steps += 1
        self.scheduler.check_integrity()
        assert self.scheduler.stats().num_running <= self.scheduler.limits.max_running

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_requests or self.stream:
            while len(self.stream) < 2 and (batch := self.scheduler.schedule()):
                self.stream.append(batch)
            self.answer()
        assert all(client.finish for client in self.clients.values())
        stats = self.scheduler.stats()
        assert (stats.held_bytes, stats.num_running, stats.num_waiting) == (0, 0, 0)
        traffic = type(self)
        traffic.preemptions += stats.preemptions_total
        traffic.moves += stats.page_moves_total
        traffic.reuses += self.device.reuses_in_place
        traffic.rows_read += self.device.rows_read

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            client = self.clients[output.request_id]
            assert client.finish is None, "nothing follows a finish reason"
            for token in output.tokens:
                assert token.token_id == client.token_at(client.prompt + len(client.received))
                client.received.append(token.token_id)
            client.finish = output.finish_reason
            full = min(client.max_tokens, self.max_model_len - client.prompt)
            if client.finish is FinishReason.STOP:
                assert client.received[-1] == EOS == output.stop_token_id
            elif client.finish is FinishReason.LENGTH:
                assert len(client.received) == full
            else:
                assert EOS not in client.received
                assert len(client.received) < full


def run(machine: type[Traffic], *, examples: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=100,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(300)
def test_attention_reads_exactly_its_rows_and_no_byte_is_lost() -> None:
    run(Traffic, examples=400)
    assert Traffic.steps >= STEPS
    # The traffic is worth its name only if it went through every mechanism.
    assert Traffic.preemptions > 200
    assert Traffic.moves > 30
    assert Traffic.reuses > 10_000
    assert Traffic.rows_read > 1_000_000


@pytest.mark.parametrize(
    "fault",
    [{"write_first": True}, {"ignore_sharing": True}, {"window_error": 1}, {"window_error": -1}, {"skip_moves": True}],
    ids=lambda fault: "-".join(fault) + str(*fault.values()),
)
def test_the_simulation_notices_a_device_that_breaks_the_rules(fault: dict[str, int]) -> None:
    broken = type("Broken", (Traffic,), {"faults": fault})
    with pytest.raises(AssertionError):
        run(broken, examples=60, phases=(Phase.generate,))


def test_the_simulation_notices_a_page_given_to_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PageArena.allocate

    def allocate(arena: PageArena, kind: LayerKind) -> Page:
        page = honest(arena, kind)
        return Page(kind, page.number - 1) if page.number == 5 else page

    monkeypatch.setattr(PageArena, "allocate", allocate)
    monkeypatch.setattr(PageArena, "release", lambda arena, page: None)
    monkeypatch.setattr(Traffic, "recount", lambda traffic: None)
    monkeypatch.setattr(Traffic, "teardown", lambda traffic: None)
    with pytest.raises(AssertionError, match="not its own"):
        run(Traffic, examples=60, phases=(Phase.generate,))
