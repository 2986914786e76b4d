"""A lane of copies to or from host memory, on streams whose copies end when the test says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import HostCopy
from modelserve_worker.cache import host_lanes
from modelserve_worker.cache.host_lanes import HostMemoryError, Lane, StreamLane
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.host_pages import LANE_ENDED

DEVICE = torch.device("cpu")
PATIENCE_S = 60.0


class Streams:
    """Stands for torch.cuda: every event ends when it is let go."""

    def __init__(self) -> None:
        self.recorded: list[Event] = []
        self.awaited: list[Event] = []  # by the compute stream
        self.grew = threading.Condition()
        self.synchronised = 0
        self.error: Exception | None = None

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        self.synchronised += threading.current_thread() is not threading.main_thread()

    def event(self, **_: Any) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        if threading.current_thread() is threading.main_thread():
            self.awaited.append(event)

    def nth(self, number: int) -> Event:
        """The event behind the `number`-th copies."""
        with self.grew:
            assert self.grew.wait_for(lambda: len(self.recorded) > number, PATIENCE_S)
        return self.recorded[number]


class Event:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._over = threading.Event()
        self.ended = self._over.set

    def record(self, *_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # those of the compute stream end at once
            with self._streams.grew:
                self._streams.recorded.append(self)
                self._streams.grew.notify_all()

    def synchronize(self) -> None:
        assert self._over.wait(PATIENCE_S)


@dataclass
class Copies:
    """What a lane did."""

    streams: Streams
    started: list[int] = field(default_factory=list)  # how many copies, call by call
    told: list[int] = field(default_factory=list)
    heard: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    ended_for_good: threading.Event = field(default_factory=threading.Event)

    def copy(self, copies: Sequence[HostCopy]) -> None:
        if self.error is not None:
            raise self.error
        self.started.append(len(copies))

    def ended(self, step: int) -> None:
        self.told.append(step)
        (self.ended_for_good if step == LANE_ENDED else self.heard).set()

    def lane(self, name: str) -> StreamLane:
        return StreamLane(name, DEVICE, self.copy, self.ended)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    fake = Streams()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    yield fake
    for event in fake.recorded:
        event.ended()


def pages(count: int) -> list[HostCopy]:
    return [HostCopy(LayerKind.GLOBAL, page, page) for page in range(count)]


def test_copies_of_one_direction_do_not_wait_for_those_of_the_other(streams: Streams) -> None:
    stores, loads = Copies(streams), Copies(streams)
    stores.lane("stores").submit(1, pages(100))
    behind_stores = streams.nth(0)
    loads.lane("loads").submit(1, pages(3))
    streams.nth(1).ended()
    assert loads.heard.wait(PATIENCE_S)
    assert loads.told == [1]
    assert stores.told == []
    behind_stores.ended()
    assert stores.heard.wait(PATIENCE_S)


def test_all_copies_of_a_step_are_started_at_once_and_told_when_they_have_ended(streams: Streams) -> None:
    copies = Copies(streams)
    copies.lane("loads").submit(7, pages(1100))
    event = streams.nth(0)
    assert copies.started == [1100]
    assert copies.told == []
    event.ended()
    assert copies.heard.wait(PATIENCE_S)
    assert copies.told == [7]


def test_the_compute_stream_waits_for_the_copies_of_the_steps_that_were_asked_for(streams: Streams) -> None:
    copies = Copies(streams)
    lane = copies.lane("loads")
    lane.submit(3, pages(600))
    lane.submit(4, pages(2))
    first = streams.nth(0)
    lane.await_ended(3)
    assert streams.awaited == [first]
    first.ended()
    second = streams.nth(1)
    lane.await_ended(4)
    assert streams.awaited == [first, second], "the first have ended, and are waited for no more"


def test_copies_that_do_not_start_are_waited_for_no_longer_than_the_limit(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lanes, "_ISSUE_TIMEOUT_S", 0.05)
    copies, release = Copies(streams), threading.Event()
    monkeypatch.setattr(copies, "copy", lambda _: release.wait(PATIENCE_S))
    lane = copies.lane("loads")
    lane.submit(5, pages(2))
    with pytest.raises(HostMemoryError, match="loads of step 5"):
        lane.await_ended(5)
    release.set()


def test_a_lane_that_fails_has_ended_what_it_issued_drops_the_rest_and_keeps_no_step(streams: Streams) -> None:
    """The first copies are on their way when the second ones cannot be started, and others are queued behind them."""
    copies = Copies(streams)
    lane = copies.lane("loads")
    lane.submit(3, pages(600))
    first = streams.nth(0)
    copies.error = RuntimeError("the device refuses the copy")
    lane.submit(4, pages(2))
    lane.submit(5, pages(2))
    first.ended()
    assert copies.ended_for_good.wait(PATIENCE_S)
    assert copies.told == [3, LANE_ENDED]
    assert streams.synchronised == 1, "by the thread that issued them"
    lane.submit(6, pages(2))
    lane.await_ended(6)
    assert streams.awaited == [], "what is dropped is not waited for"
    assert copies.started == [600]
    assert lane.fault is None, "of this lane alone"


@pytest.mark.parametrize(
    ("refuses", "never_ends"),
    [
        pytest.param("CUDA: CUDA_ERROR_ILLEGAL_ADDRESS (700)", None, id="a fault that lasts"),
        pytest.param("no more", "CUDA error: unspecified launch failure", id="it shows when the stream is awaited"),
        pytest.param("no more", "who knows", id="nobody knows whether the copies have ended"),
    ],
)
def test_a_lane_behind_which_nothing_is_sound_ends_the_engine(
    streams: Streams, refuses: str, never_ends: str | None
) -> None:
    copies = Copies(streams, error=RuntimeError(refuses))
    streams.error = RuntimeError(never_ends) if never_ends else None
    lane = copies.lane("loads")
    lane.submit(5, pages(2))
    assert copies.ended_for_good.wait(PATIENCE_S)
    assert isinstance(lane.fault, EngineDead)
    with pytest.raises(EngineDead):
        lane.await_ended(5)


def test_a_lane_of_the_cpu_raises_nothing_into_a_step_either() -> None:
    copies = Copies(Streams())
    lane = Lane("stores", DEVICE, copies.copy, copies.ended)
    lane.submit(1, pages(2))
    copies.error = RuntimeError("the device refuses the copy")
    lane.submit(2, pages(2))
    copies.error = None
    lane.submit(3, pages(2))
    assert (copies.started, copies.told, lane.fault) == ([2], [1, LANE_ENDED], None)
