"""The two-ended arena against a naive model: which bytes each page covers, who owns them, what was copied where, and
what a device knows that has only the table updates to go by."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from stamped_device import StampedModel

from modelserve.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import PageMove, TableUpdates
from modelserve_worker.scheduling.arena import OutOfPagesError, Page, PageArena

S, G = LayerKind.SLIDING, LayerKind.GLOBAL
MODEL = StampedModel((S, G))


def geometry(sliding_bytes: int, global_bytes: int) -> CacheGeometry:
    return MODEL.geometry(
        window=4, global_tokens=1, sliding_tokens=1, global_row=global_bytes, sliding_row=sliding_bytes
    )


class ArenaAgainstModel(RuleBasedStateMachine):
    """The model is the bytes themselves: each holds the name of the page that owns it, or None."""

    steps = 0
    moves = 0
    refusals = 0

    @initialize(sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)), pool=st.integers(0, 60))
    def start(self, sizes: tuple[int, int], pool: int) -> None:
        self.size = {S: sizes[0], G: sizes[1]}
        self.pool = pool
        self.arena = PageArena(geometry(*sizes), pool)
        self.bytes: list[int | None] = [None] * pool
        self.pages: dict[int, Page] = {}
        self.named = 0
        self.table: dict[LayerKind, dict[int, int]] = {S: {}, G: {}}  # what the device knows: page numbers by entry

    @rule(kind=st.sampled_from([S, G]), count=st.integers(1, 12))
    def allocate(self, kind: LayerKind, count: int) -> None:
        free = self.bytes.count(None)
        entries = range(self.named + 1, self.named + 1 + count)
        if count * self.size[kind] > free:
            with pytest.raises(OutOfPagesError, match=f"{free} of the pool's {self.pool} are free"):
                self.arena.allocate(kind, 0, entries)
            type(self).refusals += 1
            entries = entries[: free // self.size[kind]]
        pages = self.arena.allocate(kind, 0, entries)
        for move in self.arena.take_moves():
            self._copy(move)
        for name, page in zip(entries, pages, strict=True):
            self.pages[name] = page
            self._fill(kind, page.number, name)
        self.named += len(pages)

    @rule(places=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=2))
    def release(self, places: list[int]) -> None:
        for place in places:
            if self.pages:
                name = sorted(self.pages)[place % len(self.pages)]
                page = self.pages.pop(name)
                self._clear(page.kind, page.number, name)
                self.arena.release(page)

    @rule(place=st.integers(0, 1 << 16))
    def resend(self, place: int) -> None:
        if self.pages:
            name = sorted(self.pages)[place % len(self.pages)]
            page = self.pages[name]
            self._upload()
            del self.table[page.kind][name]
            self.arena.resend(page)

    @rule()
    def step(self) -> None:
        self._upload()
        for name, page in self.pages.items():
            assert self.table[page.kind][name] == page.number

    def _upload(self) -> None:
        for kind, table in self.table.items():
            updates = self.arena.take_updates(kind)
            entries = updates.indices.tolist()
            assert len(set(entries)) == len(entries)
            assert {name for name in entries if self.pages[name].kind is not kind} == set(), "released or another's"
            assert not updates.slots.any()
            table.update(zip(entries, updates.pages.tolist(), strict=True))

    @invariant()
    def every_page_owns_its_bytes(self) -> None:
        if not hasattr(self, "arena"):
            return
        type(self).steps += 1
        self.arena.check_integrity()
        for name, page in self.pages.items():
            assert [self.bytes[i] for i in self._range(page.kind, page.number)] == [name] * self.size[page.kind]
        assert self.arena.free_bytes == self.bytes.count(None)
        assert self.arena.held_bytes == self.pool - self.bytes.count(None)

    def _range(self, kind: LayerKind, number: int) -> range:
        size = self.size[kind]
        start = number * size if kind is S else self.pool - (number + 1) * size
        assert 0 <= start <= self.pool - size
        return range(start, start + size)

    def _fill(self, kind: LayerKind, number: int, name: int) -> None:
        for i in self._range(kind, number):
            assert self.bytes[i] is None, "two owners"
            self.bytes[i] = name

    def _clear(self, kind: LayerKind, number: int, name: int) -> None:
        for i in self._range(kind, number):
            assert self.bytes[i] == name
            self.bytes[i] = None

    def _copy(self, move: PageMove) -> None:
        type(self).moves += 1
        name = self.bytes[self._range(move.kind, move.source)[0]]
        self._clear(move.kind, move.source, name)
        self._fill(move.kind, move.destination, name)


def test_bytes_are_conserved_and_allocation_fails_only_when_they_are_short() -> None:
    run_state_machine_as_test(
        ArenaAgainstModel,
        settings=settings(
            max_examples=300,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert ArenaAgainstModel.steps > 10_000
    assert ArenaAgainstModel.moves > 50  # 200 to 270; hypothesis also draws constants of the modules that are loaded
    assert ArenaAgainstModel.refusals > 1000


def test_each_kind_hands_out_its_lowest_free_number() -> None:
    arena = PageArena(geometry(2, 3), 60)
    sliding = arena.allocate(S, 0, range(4))
    globals_ = arena.allocate(G, 0, range(4))
    assert [page.number for page in sliding] == [page.number for page in globals_] == [0, 1, 2, 3]
    for page in (sliding[2], sliding[1], globals_[0]):
        arena.release(page)
    assert [page.number for page in arena.allocate(S, 1, range(3))] == [1, 2, 4]
    assert [page.number for page in arena.allocate(G, 1, range(1))] == [0]
    assert arena.take_moves() == ()


def entries(updates: TableUpdates) -> list[tuple[int, int, int]]:
    """(slot, index, page) of each update."""
    return list(zip(updates.slots.tolist(), updates.indices.tolist(), updates.pages.tolist(), strict=True))


def test_the_other_kinds_edge_moves_out_of_the_way() -> None:
    arena = PageArena(geometry(2, 4), 12)
    sliding = arena.allocate(S, 7, range(6))
    assert entries(arena.take_updates(S)) == [(7, i, i) for i in range(6)]
    arena.release(sliding[0])
    arena.release(sliding[2])
    (page,) = arena.allocate(G, 1, range(1))
    assert page.number == 0
    assert arena.take_moves() == (PageMove(S, 5, 0), PageMove(S, 4, 2))
    assert [sliding[i].number for i in (1, 3, 4, 5)] == [1, 3, 2, 0]
    assert entries(arena.take_updates(S)) == [(7, 5, 0), (7, 4, 2)], "the holders are told, whoever is in the step"
    assert entries(arena.take_updates(G)) == [(1, 0, 0)]
    with pytest.raises(OutOfPagesError, match=r"1 sliding_attention pages need 2 bytes; 0 of the pool's 12"):
        arena.allocate(S, 1, range(1))
    arena.check_integrity()


def test_an_entry_that_changes_twice_is_sent_once_with_its_last_page() -> None:
    arena = PageArena(geometry(2, 4), 12)
    first, second, third = arena.allocate(S, 0, range(3))
    arena.release(first)
    arena.release(second)
    arena.allocate(G, 3, range(2))
    assert third.number == 0
    assert entries(arena.take_updates(S)) == [(0, 2, 0)], "allocated and moved; what was released is not sent"
    assert entries(arena.take_updates(S)) == []
    arena.resend(third)
    arena.resend(third)
    assert entries(arena.take_updates(S)) == [(0, 2, 0)]


def test_a_page_is_released_once() -> None:
    arena = PageArena(geometry(2, 4), 12)
    page, _ = arena.allocate(S, 0, range(2))
    arena.release(page)
    with pytest.raises(AssertionError, match="released once"):
        arena.release(page)


def test_the_recount_notices_damage() -> None:
    arena = PageArena(geometry(2, 4), 12)
    (page,) = arena.allocate(S, 0, range(1))
    arena.check_integrity()
    page.number = 3
    with pytest.raises(AssertionError, match="numbers match"):
        arena.check_integrity()
    page.number = 0
    arena.allocate(S, 0, range(1))
    with pytest.raises(AssertionError, match="two pages of one table entry"):
        arena.check_integrity()
