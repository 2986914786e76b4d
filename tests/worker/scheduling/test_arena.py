"""The two-ended arena against a naive model: which bytes each page covers, who owns them, what was copied where, and
what a device knows that has only the table updates to go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from stamped_device import StampedModel

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import PageMove, TableUpdates
from modelserve_worker.scheduling.pages.arena import OutOfPagesError, Page, PageArena

S, G = LayerKind.SLIDING, LayerKind.GLOBAL
MODEL = StampedModel((S, G))


def geometry(sliding_bytes: int, global_bytes: int) -> CacheGeometry:
    return MODEL.geometry(
        window=4, global_tokens=1, sliding_tokens=1, global_row=global_bytes, sliding_row=sliding_bytes
    )


@dataclass
class Owned:
    """A page and who owns it, as the model sees it."""

    page: Page
    entries: list[int]  # indices in the table of slot 0
    keepers: int = 0


class ArenaAgainstModel(RuleBasedStateMachine):
    """The model is the bytes themselves: each holds the name of the page that lies there, or None."""

    steps = 0
    moves = 0
    refusals = 0
    reclaimed = 0
    shared = 0

    @initialize(sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)), pool=st.integers(0, 60))
    def start(self, sizes: tuple[int, int], pool: int) -> None:
        self.size = {S: sizes[0], G: sizes[1]}
        self.pool = pool
        self.arena = PageArena(geometry(*sizes), pool)
        self.arena.register(self)
        self.bytes: list[int | None] = [None] * pool
        self.pages: dict[int, Owned] = {}  # by name
        self.named = 0
        self.table: dict[LayerKind, dict[int, int]] = {S: {}, G: {}}  # what the device knows: page numbers by entry

    def reclaim(self, needed_bytes: int) -> None:
        """As a prefix cache does, the oldest page first."""
        for name, owned in list(self.pages.items()):
            while owned.keepers and self.arena.free_bytes < needed_bytes:
                self._let_go(name)
                type(self).reclaimed += 1

    def forget(self, page: Page) -> None:
        raise AssertionError("the arena forgets no page by itself")

    @rule(kind=st.sampled_from([S, G]), count=st.integers(1, 12))
    def allocate(self, kind: LayerKind, count: int) -> None:
        available = self.bytes.count(None) + sum(self.size[o.page.kind] for o in self.pages.values() if not o.entries)
        entries = range(self.named + 1, self.named + 1 + count)
        if count * self.size[kind] > available:
            with pytest.raises(OutOfPagesError, match=f"{available} of the pool's {self.pool} are free"):
                self.arena.allocate(kind, 0, entries)
            type(self).refusals += 1
            entries = entries[: available // self.size[kind]]
        pages = self.arena.allocate(kind, 0, entries)
        for move in self.arena.take_moves():
            self._copy(move)
        for name, page in zip(entries, pages, strict=True):
            self.pages[name] = Owned(page, [name])
            self._fill(kind, page.number, name)
        self.named += len(pages)

    @rule(places=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=2))
    def drop(self, places: list[int]) -> None:
        for place in places:
            if name := self._pick(place, lambda owned: bool(owned.entries)):
                owned = self.pages[name]
                entry = owned.entries.pop(place % len(owned.entries))
                self._clear_if_free(name)
                self.arena.drop(owned.page, 0, entry)

    @rule(place=st.integers(0, 1 << 16))
    def share(self, place: int) -> None:
        if name := self._pick(place):
            self.named += 1
            self.arena.share(self.pages[name].page, 0, self.named)
            self.pages[name].entries.append(self.named)
            type(self).shared += 1

    @rule(places=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=4))
    def cache(self, places: list[int]) -> None:
        """As a request that ends, and whose rows others may want."""
        for place in places:
            if name := self._pick(place, lambda owned: bool(owned.entries)):
                owned = self.pages[name]
                self.arena.keep(owned.page)
                owned.keepers += 1
                for entry in owned.entries:
                    self.arena.drop(owned.page, 0, entry)
                owned.entries = []

    @rule(place=st.integers(0, 1 << 16))
    def keep(self, place: int) -> None:
        if name := self._pick(place):
            self.arena.keep(self.pages[name].page)
            self.pages[name].keepers += 1

    @rule(place=st.integers(0, 1 << 16))
    def let_go(self, place: int) -> None:
        if name := self._pick(place, lambda owned: owned.keepers > 0):
            self._let_go(name)

    @rule(place=st.integers(0, 1 << 16))
    def resend(self, place: int) -> None:
        if name := self._pick(place, lambda owned: bool(owned.entries)):
            owned = self.pages[name]
            self._upload()
            del self.table[owned.page.kind][owned.entries[0]]
            self.arena.resend(owned.page, 0, owned.entries[0])

    @rule()
    def step(self) -> None:
        self._upload()
        for owned in self.pages.values():
            for entry in owned.entries:
                assert self.table[owned.page.kind][entry] == owned.page.number

    def _upload(self) -> None:
        kinds = {entry: owned.page.kind for owned in self.pages.values() for entry in owned.entries}
        for kind, table in self.table.items():
            updates = self.arena.take_updates(kind)
            entries = updates.indices.tolist()
            assert len(set(entries)) == len(entries)
            assert {kinds[entry] for entry in entries} <= {kind}, "given back, or another's"
            assert not updates.slots.any()
            table.update(zip(entries, updates.pages.tolist(), strict=True))

    @invariant()
    def every_page_has_its_bytes(self) -> None:
        if not hasattr(self, "arena"):
            return
        type(self).steps += 1
        self.arena.check_integrity()
        held = cached = 0
        for name, owned in self.pages.items():
            kind = owned.page.kind
            assert [self.bytes[i] for i in self._range(kind, owned.page.number)] == [name] * self.size[kind]
            held += self.size[kind] * bool(owned.entries)
            cached += self.size[kind] * (not owned.entries)
        assert self.arena.free_bytes == self.bytes.count(None)
        assert (self.arena.held_bytes, self.arena.cached_bytes) == (held, cached)

    def _pick(self, place: int, suits: Callable[[Owned], bool] = lambda _: True) -> int | None:
        names = sorted(name for name, owned in self.pages.items() if suits(owned))
        return names[place % len(names)] if names else None

    def _let_go(self, name: int) -> None:
        owned = self.pages[name]
        owned.keepers -= 1
        self._clear_if_free(name)
        self.arena.let_go(owned.page)

    def _clear_if_free(self, name: int) -> None:
        owned = self.pages[name]
        if not owned.entries and not owned.keepers:
            del self.pages[name]
            self._clear(owned.page.kind, owned.page.number, name)

    def _range(self, kind: LayerKind, number: int) -> range:
        size = self.size[kind]
        start = number * size if kind is S else self.pool - (number + 1) * size
        assert 0 <= start <= self.pool - size
        return range(start, start + size)

    def _fill(self, kind: LayerKind, number: int, name: int) -> None:
        for i in self._range(kind, number):
            assert self.bytes[i] is None, "two pages in one place"
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
            max_examples=200,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert ArenaAgainstModel.steps > 8_000
    assert ArenaAgainstModel.moves > 20  # 90; hypothesis also draws constants of the modules that are loaded
    assert ArenaAgainstModel.refusals > 300
    assert ArenaAgainstModel.reclaimed > 100
    assert ArenaAgainstModel.shared > 60


def test_each_kind_hands_out_its_lowest_free_number() -> None:
    arena = PageArena(geometry(2, 3), 60)
    sliding = arena.allocate(S, 0, range(4))
    globals_ = arena.allocate(G, 0, range(4))
    assert [page.number for page in sliding] == [page.number for page in globals_] == [0, 1, 2, 3]
    for page in (sliding[2], sliding[1], globals_[0]):
        arena.drop(page, *page.entries[0])
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
    arena.drop(sliding[0], 7, 0)
    arena.drop(sliding[2], 7, 2)
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
    arena.drop(first, 0, 0)
    arena.drop(second, 0, 1)
    arena.allocate(G, 3, range(2))
    assert third.number == 0
    assert entries(arena.take_updates(S)) == [(0, 2, 0)], "allocated and moved; what was released is not sent"
    assert entries(arena.take_updates(S)) == []
    arena.resend(third, 0, 2)
    arena.resend(third, 0, 2)
    assert entries(arena.take_updates(S)) == [(0, 2, 0)]


def test_an_owner_gives_its_page_back_once() -> None:
    arena = PageArena(geometry(2, 4), 12)
    page, _ = arena.allocate(S, 0, range(2))
    arena.keep(page)
    arena.drop(page, 0, 0)
    with pytest.raises(AssertionError, match="gives its page back once"):
        arena.drop(page, 0, 0)
    arena.let_go(page)
    with pytest.raises(AssertionError, match="gives its page back once"):
        arena.let_go(page)
    with pytest.raises(AssertionError, match="nobody owns"):
        arena.share(page, 0, 5)


def test_a_shared_page_that_moves_is_told_to_every_entry_and_a_cached_one_moves_too() -> None:
    arena = PageArena(geometry(2, 4), 12)
    sliding = arena.allocate(S, 7, range(6))
    arena.share(sliding[5], 8, 1)
    arena.keep(sliding[4])
    for index in (0, 2, 4):
        arena.drop(sliding[index], 7, index)
    arena.take_updates(S)
    arena.allocate(G, 1, range(1))
    assert arena.take_moves() == (PageMove(S, 5, 0), PageMove(S, 4, 2))
    assert entries(arena.take_updates(S)) == [(7, 5, 0), (8, 1, 0)]
    assert (arena.held_bytes, arena.cached_bytes, arena.free_bytes) == (10, 2, 0)
    arena.check_integrity()


def test_a_copy_travels_in_order_with_the_moves_and_its_source_may_go_at_once() -> None:
    """The page that is copied is the one that the next allocation gives away."""
    arena = PageArena(geometry(2, 4), 12)
    source, destination = arena.allocate(S, 0, range(2))
    arena.copy(source, destination)
    arena.drop(source, 0, 0)
    (again,) = arena.allocate(S, 1, range(1))
    arena.copy(destination, again)
    assert arena.take_moves() == (PageMove(S, 0, 1), PageMove(S, 1, 0))
    assert (arena.moves_made, arena.copies_made) == (0, 2)


def test_bytes_that_nobody_counts_are_noticed_with_the_next_step() -> None:
    arena = PageArena(geometry(2, 4), 12)
    arena.allocate(S, 0, range(1))
    arena.take_moves()
    arena.cached_bytes += 2
    with pytest.raises(AssertionError, match="bytes were lost"):
        arena.take_moves()


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
