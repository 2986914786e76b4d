"""A lane of copies to or from host memory, on streams whose copies end when the test says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from modelserve.architecture import LayerKind
from modelserve_worker.batch import HostCopy
from modelserve_worker.execution import host_lanes
from modelserve_worker.execution.host_lanes import HostMemoryError, StreamLane

DEVICE = torch.device("cpu")
PATIENCE_S = 60.0


class Streams:
    """Stands for torch.cuda: every event ends when it is let go."""

    def __init__(self) -> None:
        self.recorded: list[Event] = []
        self.awaited: list[Event] = []  # by the compute stream
        self.grew = threading.Condition()

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
    fails: bool = False

    def copy(self, copies: Sequence[HostCopy]) -> None:
        if self.fails:
            raise RuntimeError("the device refuses the copy")
        self.started.append(len(copies))

    def ended(self, step: int) -> None:
        self.told.append(step)
        self.heard.set()

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
    copies = Copies(streams, fails=True)
    lane = copies.lane("loads")
    lane.submit(5, pages(2))
    with pytest.raises(HostMemoryError, match="loads of step 5"):
        lane.await_ended(5)
    lane.submit(6, pages(2))  # into a lane that has ended: nobody hears of it, and nothing is raised
    assert copies.told == []
