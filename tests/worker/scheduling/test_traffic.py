"""Random traffic through the scheduler onto a device with stamped rows: two steps in flight, tiny pools, failures."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from run_length import share, share_apart
from stamped_device import StampedDevice, StampedModel
from step_times import AnyDraftTime

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.draft_pages import DraftCache
from modelserve_worker.batch import NOT_A_NUMBER, AskedDrafter, ScheduledBatch, commit_first_tokens
from modelserve_worker.request import FinishReason, Request, RequestOutput, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.drafting import Drafting
from modelserve_worker.scheduling.pages.arena import Page, PageArena
from modelserve_worker.scheduling.pages.page_table import PageTable
from modelserve_worker.scheduling.prefix.token_chain import TokenChain
from modelserve_worker.scheduling.prefix_reuse import PrefixReuse
from modelserve_worker.scheduling.scheduler import Scheduler

S, G = LayerKind.SLIDING, LayerKind.GLOBAL
EOS = 1
STEPS = 100_000
TURNS = 150  # of one engine's traffic

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
    ends: tuple[int, int] | None  # (n, what it samples as its n-th token: EOS or NOT_A_NUMBER)
    number: int
    earlier: Client | None = None  # whose first `shared` tokens are its own
    shared: int = 0
    received: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def token_at(self, position: int) -> int:
        if self.earlier is not None and position < self.shared:
            return self.earlier.token_at(position)
        if self.ends is not None and position == self.prompt + self.ends[0] - 1:
            return self.ends[1]
        return 2 + (self.number * 7919 + position * 31) % 997


class Traffic:
    """One engine with random limits. Every arrival, abort, launch, answer and failure is a step, after which the bytes
    are recounted. `seen` counts what happened. Faults are those of the device, and `commit_first_error`, the tokens by
    which it exceeds what may be written before attention. With `prefix_caching` most requests begin like another one,
    with `drafting` up to 3 tokens are proposed at a time, with `draft_rows` by a drafter with rows of its own.
    """

    shortest = 3  # maxModelLen
    recent = 6  # requests that others begin like
    cached_failures = 0.2  # weight of failures with a prefix cache, which each of them empties

    def __init__(
        self,
        seed: int,
        seen: Counter[str],
        *,
        prefix_caching: bool,
        drafting: bool = False,
        draft_rows: bool = False,
        commit_first_error: int = 0,
        **faults: Any,
    ) -> None:
        self.random = random = Random(seed)
        self.seen = seen
        model = random.choice([each for each in MODELS if G in each.kinds or not draft_rows])
        drafts = random.randint(1, 3) if drafting else 0
        self.geometry = model.geometry(
            window=random.randint(1, 9),
            global_tokens=random.randint(1, 4),
            sliding_tokens=random.randint(1 + drafts, 3 + drafts),
            global_row=random.randint(1, random.choice([2, 9])),
            sliding_row=random.randint(1, random.choice([2, 9])),
            **(a_drafter(random, drafts) if draft_rows else {}),
        )
        self.max_model_len = random.randint(self.shortest, 60)
        budget = random.randint(1, random.choice([4, 16]))
        limits = SchedulerLimits(
            budget, random.randint(1, 6), self.max_model_len, (EOS,),
            max_num_mixed_tokens=random.choice([2, 5, 512]),
            doubling_context=random.choice([math.inf, 20, 3]),
            captured_rows=random.choice([(), (2, 4, 8, 16)]),
        )  # fmt: skip
        most = random.choice([120, 140, 200])  # percent of what the longest request holds
        most *= random.choice([1, 3]) if prefix_caching else 1
        self.pool_bytes = self.geometry.held_bytes(self.max_model_len) * random.randint(100, most) // 100
        when_asked = drafting and random.random() < 0.5
        self.scheduler = self.make_scheduler(limits, drafts=drafts, prefix_caching=prefix_caching)
        if when_asked:
            self.scheduler.drafting = Drafting(
                drafts, limits.max_num_seqs, AnyDraftTime(random), asked=[AskedDrafter(drafts)]
            )
        self.prefix_caching = prefix_caching
        self.clients: dict[str, Client] = {}
        allowed = commit_first_tokens(self.geometry) if self.geometry.sliding_page.layers else 0
        self.device = StampedDevice(
            model,
            self.geometry,
            self.pool_bytes,
            lambda request_id, position: self.clients[request_id].token_at(position),
            slots=limits.max_num_seqs,
            longest=self.max_model_len,
            whose=self.namespace,
            commit_first=random.choice([0, allowed]) if not commit_first_error else allowed + commit_first_error,
            drafts=drafts,
            when_asked=when_asked,
            **faults,
        )
        self.stream: deque[ScheduledBatch] = deque()
        self.holders: dict[int, str] = {}  # request ids by slot, as scheduled

    def make_scheduler(self, limits: SchedulerLimits, *, drafts: int, prefix_caching: bool) -> Scheduler:
        return Scheduler(limits, self.geometry, self.pool_bytes, draft_tokens=drafts, prefix_caching=prefix_caching)

    def run(self) -> None:
        """Random turns, and then everything that is left."""
        turns = (self.add, self.schedule, self.answer, self.overlap, self.abort, self.fail)
        failures = self.cached_failures if self.prefix_caching else 1
        for _ in range(TURNS):
            (turn,) = self.random.choices(turns, weights=(3, 3, 3, 6, 2, failures))
            turn()
        while self.scheduler.has_requests or self.stream:
            self.schedule()
            self.schedule()
            self.answer()
        assert all(client.finish for client in self.clients.values())
        stats = self.scheduler.stats()
        assert (stats.held_bytes, stats.num_running, stats.num_waiting) == (0, 0, 0)
        self.seen["hits"] += self.scheduler.stats().prefix_hits_total
        self.seen["evictions"] += self.scheduler.stats().prefix_evictions_total
        self.seen["copies"] += self.scheduler.arena.copies_made
        self.seen["spare rows"] += self.device.spare_rows
        self.seen["preemptions"] += stats.preemptions_total
        self.seen["moves"] += stats.page_moves_total
        self.seen["reuses"] += self.device.reuses_in_place
        self.seen["rows_read"] += self.device.rows_read
        self.seen["accepted drafts"] += self.device.accepted
        if self.device.when_asked:
            self.seen["accepted asked drafts"] += self.device.accepted

    def add(self) -> None:
        random = self.random
        prompt, max_tokens = random.randint(1, random.choice([8, 30])), random.randint(1, random.choice([8, 40]))
        ends = (random.randint(1, 40), random.choice([EOS, EOS, EOS, NOT_A_NUMBER])) if random.random() < 0.7 else None
        request_id = f"r{len(self.clients)}"
        client = Client(prompt, max_tokens, ends, number=len(self.clients))
        if self.prefix_caching and self.clients and random.random() < 0.8:
            earlier = random.choice(list(self.clients.values())[-self.recent :])
            client.earlier = earlier
            client.shared = random.randint(1, earlier.prompt + len(earlier.received))
            client.prompt = prompt = client.shared + random.choice([0, 0, 1, 2, prompt])
        tokens = tuple(client.token_at(position) for position in range(prompt))
        self.clients[request_id] = client
        checkpoints = tuple(random.sample(range(1, prompt + 1), k=min(prompt, random.choice([0, 0, 1, 2]))))
        request = Request(
            request_id, tokens, SamplingParams(seed=0, max_tokens=max_tokens),
            tenant=self.namespace(request_id), client=self.namespace(request_id), checkpoints=checkpoints,
        )  # fmt: skip
        rows = min(prompt + max_tokens, self.max_model_len) - 1
        if prompt >= self.max_model_len or self.geometry.held_bytes(rows) > self.pool_bytes:
            with pytest.raises(InvalidInput):
                self.scheduler.add(request)
            client.finish = FinishReason.ERROR
        else:
            self.scheduler.add(request)
        self.recount()

    def namespace(self, request_id: str) -> str:
        """Of two tenants."""
        return "" if int(request_id[1:]) % 5 else "other"

    def schedule(self) -> None:
        if len(self.stream) == 2:
            return
        batch = self.scheduler.schedule()
        if batch:
            assert batch.num_tokens or batch.stores or batch.loads or batch.checks
            assert batch.num_tokens <= self.scheduler.limits.max_num_batched_tokens
            self.holders.update({admitted.slot: admitted.request_id for admitted in batch.admitted})
            assert all(self.clients[request_id].finish is None for request_id in self.names(batch))
            self.stream.append(batch)
        elif not self.stream:
            assert not self.scheduler.has_requests or self.waits_for_copies, "requests wait and nothing runs"
        self.recount()

    def answer(self) -> None:
        if self.stream:
            self._deliver(self.scheduler.update(self.device.execute(self.stream.popleft())))
            self.recount()

    def overlap(self) -> None:
        """What the engine does while requests come."""
        for _ in range(self.random.randint(1, 4)):
            self.schedule()
            if len(self.stream) == 2:
                self.answer()

    def fail(self) -> None:
        """The oldest step fails, alone or with another behind it."""
        if not self.stream:
            return
        if self.random.random() < 0.5:
            self.schedule()
        batch = self.stream.popleft()
        names, preemptions = self.names(batch), self.scheduler.stats().preemptions_total
        self.device.lose(batch, behind=self.stream)
        outputs = self.scheduler.fail(batch.step, "the device is gone")
        assert {output.request_id for output in outputs} <= names
        self._deliver(outputs)
        self.seen["failures"] += 1
        stats = self.scheduler.stats()
        self.seen["failures with requests that go on"] += stats.num_running > 0
        self.seen["failures with requests to recompute"] += stats.preemptions_total > preemptions
        self.recount()

    def abort(self) -> None:
        request_id = f"r{len(self.clients) - 1 - self.random.randint(0, 24)}"
        client = self.clients.get(request_id)
        output = self.scheduler.abort(request_id)
        assert (output is not None) == (client is not None and client.finish is None)
        if output:
            self._deliver([output])
        self.recount()

    @property
    def waits_for_copies(self) -> bool:
        """Whether something but a step may let requests go on."""
        return False

    def names(self, batch: ScheduledBatch) -> set[str]:
        return {self.holders[slot] for slot in batch.slots.tolist()}

    def recount(self) -> None:
        self.seen["steps"] += 1
        self.scheduler.check_integrity()
        assert self.scheduler.stats().num_running <= self.scheduler.limits.max_running

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            client = self.clients[output.request_id]
            assert client.finish is None, "nothing follows a finish reason"
            for token_id in output.token_ids:
                text = client.token_at(client.prompt + len(client.received))
                assert token_id == text != NOT_A_NUMBER, "a wrong token was handed out"
                client.received.append(token_id)
            client.finish = output.finish_reason
            full = min(client.max_tokens, self.max_model_len - client.prompt)
            if client.finish is FinishReason.STOP:
                assert client.received[-1] == EOS == output.stop_token_id
            elif client.finish is FinishReason.LENGTH:
                assert len(client.received) == full
            elif output.error and "not numbers" in output.error:
                assert client.token_at(client.prompt + len(client.received)) == NOT_A_NUMBER
                self.seen["nans"] += 1
            else:
                assert EOS not in client.received
                assert len(client.received) < full


def a_drafter(random: Random, drafts: int) -> dict[str, Any]:
    """Of the geometry: a drafter with rows of its own, of which one kind of layers may be wanting."""
    full, window = random.choice([(1, 1), (0, 2), (2, 1), (1, 2), (2, 0)])
    draft = DraftCache(
        full, window, random.choice([1, 5, 20, 40]) if window else 0, kv_heads=1, head_dim=random.randint(1, 3),
        v_only=True, element_bytes=1,
    )  # fmt: skip
    return {"draft": draft, "drafts": drafts, "first_ring_entry": 60 + random.choice([0, 1, 7])}


def run(*, examples: int, apart: int = 1, prefix_caching: bool = False, **faults: Any) -> Counter[str]:
    """What happened in the traffic of `examples` engines, or of every `apart`-th of them."""
    seen: Counter[str] = Counter()
    for seed in range(0, examples, apart):
        traffic = Traffic(seed, seen, prefix_caching=prefix_caching, **faults)
        try:
            traffic.run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    return seen


@pytest.mark.timeout(300)
def test_attention_reads_exactly_its_rows_and_no_byte_is_lost() -> None:
    seen = run(examples=300, apart=share_apart())
    # The traffic is worth its name only if it went through every mechanism.
    for happened, least in {
        "steps": STEPS,
        "preemptions": 200,
        "moves": 30,
        "reuses": 3_000,
        "rows_read": 800_000,
        "failures": 1_000,
        "failures with requests that go on": 10,
        "failures with requests to recompute": 50,
        "nans": 100,
    }.items():
        assert seen[happened] >= share(least), happened


@pytest.mark.timeout(300)
def test_prefixes_are_read_where_texts_are_the_same_and_no_byte_is_lost() -> None:
    seen = run(examples=40, apart=share_apart(), prefix_caching=True)
    assert seen["steps"] > share(10_000)
    assert seen["hits"] > share(400)
    assert seen["copies"] > share(200)
    assert seen["spare rows"] > share(50)
    assert seen["moves"] > share(100)
    assert seen["evictions"] > share(300)
    assert seen["preemptions"] > share(18)
    assert seen["failures"] > share(10)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_drafts_leave_no_row_to_anybody(prefix_caching: bool) -> None:
    """Those that are not accepted, and those that two steps in flight took to be."""
    seen = run(examples=40, apart=share_apart(), prefix_caching=prefix_caching, drafting=True)
    assert seen["accepted drafts"] > share(1_000)
    assert seen["accepted asked drafts"] > share(300)
    assert seen["preemptions"] > share(20)
    assert seen["reuses"] > share(100)
    if prefix_caching:
        assert seen["hits"] > share(400)
        assert seen["copies"] > share(200)
        assert seen["evictions"] > share(300)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1023, id="pages behind a window that is being resumed are given up too"),
        pytest.param(1401, id="a window of one row is gone when a step in flight writes the next page"),
    ],
)
def test_traffic_that_once_broke_a_prefix_cache(seed: int) -> None:
    Traffic(seed, Counter(), prefix_caching=True).run()


@pytest.mark.drawn
@pytest.mark.parametrize(
    "fault",
    [
        {"ignore_sharing": True},
        {"window_error": 1},
        {"ring_error": -1},
        {"skip_moves": True},
        {"skip_move_updates": True},
        {"commit_first_error": 1},
        {"commit_first_error": 1000},
    ],
    ids=lambda fault: "-".join(fault) + str(*fault.values()),
)
def test_the_simulation_notices_a_device_that_breaks_the_rules(fault: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(examples=200, **fault)


def test_the_simulation_notices_updates_of_a_failed_step_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageTable, "resend", lambda table: None)
    with pytest.raises(AssertionError, match="entries that no update named"):
        run(examples=200)


def test_the_simulation_notices_requests_that_outlive_what_their_pages_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step that recomputes nobody."""
    honest = Scheduler.fail

    def fail(scheduler: Scheduler, step: int, error: str) -> list[RequestOutput]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "_preempt", lambda *_, **__: None)
            return honest(scheduler, step, error)

    monkeypatch.setattr(Scheduler, "fail", fail)
    with pytest.raises(AssertionError, match=r"rows that are not its own|a wrong token was handed out"):
        run(examples=200)


def test_the_simulation_notices_a_shared_page_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageTable, "_own", lambda table, page, index, *, rows_needed: page)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(examples=60, prefix_caching=True)


def test_the_simulation_notices_a_copy_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageArena, "copy", lambda arena, source, destination: None)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(examples=60, prefix_caching=True)


def test_the_simulation_notices_tenants_that_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their texts are equal, and not the same."""
    honest = TokenChain.__init__
    monkeypatch.setattr(TokenChain, "__init__", lambda chain, _, *rest: honest(chain, "", *rest))
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(examples=60, prefix_caching=True)


def test_the_simulation_notices_rows_of_a_failed_step_that_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixReuse, "clear", lambda reuse: None)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(examples=200, prefix_caching=True)


def test_the_simulation_notices_a_page_given_to_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, drop = PageArena.allocate, PageArena.drop
    numbers: dict[Page, int] = {}  # true ones

    def allocate_twice(arena: PageArena, kind: LayerKind, slot: int, indices: range) -> list[Page]:
        pages = allocate(arena, kind, slot, indices)
        for page in pages:
            if page.number == 5:
                numbers[page], page.number = 5, 4
        return pages

    def drop_once(arena: PageArena, page: Page, slot: int, index: int) -> None:
        page.number = numbers.pop(page, page.number)
        drop(arena, page, slot, index)

    monkeypatch.setattr(PageArena, "allocate", allocate_twice)
    monkeypatch.setattr(PageArena, "drop", drop_once)
    monkeypatch.setattr(Scheduler, "check_integrity", lambda scheduler: None)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(examples=60)
