"""Which rows of earlier requests a request need not compute: the index over cached pages of the pool (tail_index.py).

Tails are left at the end of a prompt and of an answer, where chunks of a long prompt end, where histories part, and at
a junction: where a second request leaves a way that is known.

What goes first, when memory is short (decision 0024): superseded tails; then those that another tier has as well, which
cost a copy to have again; then the others, in the index's order; then pages that running requests keep behind their
windows; then what has been brought back from another tier and waits for its request. Pages that are still on their way
from there are others' to give up, who register with the arena behind this cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from modelserve.model.architecture import LayerKind
from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.pages.arena import Page, PageArena
from modelserve_worker.scheduling.pages.page_checks import PageChecks
from modelserve_worker.scheduling.pages.page_table import PageTable
from modelserve_worker.scheduling.prefix.eviction_order import COPY, NOTHING, ROWS
from modelserve_worker.scheduling.prefix.tail_index import LEAST_KNOWN, TailIndex
from modelserve_worker.scheduling.prefix.tails import Block, Hit, Tail
from modelserve_worker.scheduling.prefix.token_chain import TokenChain
from modelserve_worker.scheduling.prefix.unsaved_tails import UnsavedTails

_KNOWN_PER_PAGE = 4  # blocks that are known by their hash alone, for each global page of the pool


class PrefixCache(TailIndex[Page]):
    """The cache keeps pages of `arena`, and is the first there to be asked for them."""

    def __init__(self, arena: PageArena, geometry: CacheGeometry, prices: PromptCost) -> None:
        super().__init__(arena, geometry, prices)
        self._arena = arena
        if size := geometry.global_page.page_bytes:
            self._most_unused = max(LEAST_KNOWN, _KNOWN_PER_PAGE * arena.pool_bytes // size)
        self._tables: dict[PageTable, None] = {}
        self.unsaved = UnsavedTails(arena, {kind: geometry.page(kind).page_bytes for kind in LayerKind})
        self.checks = PageChecks()
        self._gone: list[Tail[Page]] = []  # of those that were told
        arena.register(self)

    def watch(self, table: PageTable) -> None:
        """Let go of what the table has behind its window, when everything else is gone."""
        self._tables[table] = None

    def unwatch(self, table: PageTable) -> None:
        del self._tables[table]

    def known_tokens(self, chain: TokenChain) -> int:
        """How many of its first tokens, in whole pages, an earlier request had, whether or not rows of it are left."""
        return max(0, len(self.way(chain)) - 1) * self.page_tokens

    def follow(self, hit: Hit[Page]) -> None:
        """A request resumes there."""
        tail = hit.tail
        tail.followers += 1
        if tail.followers == 1 and (left := self._left_by_history(tail)):
            for each in left:
                self._supersede(each, True)
        elif tail.superseded:
            tail.junction = True
        self._supersede(tail, False)
        self.touch(tail)

    def note(self, tail: Tail[Page]) -> None:
        super().note(tail)
        self.unsaved.update(tail, loses_rows=self.loses_rows(tail))

    def loses_rows(self, tail: Tail[Page]) -> bool:
        """Whether rows that somebody may miss go with it: no other tier has them."""
        return self._loss(tail) == ROWS

    def evict(self, tail: Tail[Page]) -> None:
        self.unsaved.remove(tail)
        super().evict(tail)
        if tail.told:
            self._gone.append(tail)
        self.gone(tail)

    @property
    def inserted(self) -> int:
        """How many tails were ever live: the number of the last of them."""
        return self._inserted

    def take_gone(self) -> list[Tail[Page]]:
        """Those of the told tails that are no longer live since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def gone(self, tail: Tail[Page]) -> None:
        """The pool, or a tier behind it, has it no more."""
        if tail.live:
            self.note(tail)
        elif not tail.has_copy:
            self._lost(tail)

    def _lost(self, tail: Tail[Page]) -> None:
        before = tail.before
        for later in [each for each in tail.later if each.previous is tail]:
            later.previous = before
            if before is not None:
                before.later[later] = None
        if before is not None:
            before.later.pop(tail, None)
            if before.superseded and not tail.superseded and not any(self._goes_on(before)):
                self._supersede(before, False)  # it is the session's last one now
        if not tail.superseded:
            self._price_later(tail)

    def leave(
        self,
        chain: TokenChain,
        end: int,
        table: PageTable,
        *,
        previous: Tail[Page] | None = None,
        joined: int = 0,
        client: str = "",
        junction: bool = False,
        turn: bool = False,
        answer: bool = False,
    ) -> Tail[Page] | None:
        """Keep what a request needs that resumes at `end` or a little before it, where `table` has these rows.

        `previous` is the tail before it on the way of the same session, which has the positions up to `joined` in
        common with it; unless more than one history goes on from that one (`junction`), or its own next `turn` and not
        this `answer`, it goes first from now on. None where `end` is too near to the beginning to be worth it.
        """
        size = self.page_tokens
        if end < size:
            return None
        full = end // size
        tail = self._same(chain, end)
        if tail is None:
            global_pages, sliding = table.kept_pages(end)
            if not sliding and self._geometry.sliding_page.layers:
                return None  # a window of one row lies in one page, which a step in flight writes over
            first_row = min(sliding) * self._geometry.sliding_page.page_tokens if sliding else 0
            lowest = max(size, first_row + self._geometry.window - 1 if first_row else 0)
            if lowest > end:
                return None
            block = self.block_of(chain.digest(depth) for depth in range(full + 1))
            partial = global_pages[full] if end % size and global_pages else None
            first = lowest // size * size
            tail = Tail(
                block, end, lowest, first, chain.tokens(first, end).copy(), partial, sliding, client, previous, joined,
                junction, answer=answer, marks=chain.marks(first, end),
            )  # fmt: skip
            if previous is not None:
                previous.later[tail] = None
            self.insert(tail, global_pages)
        elif tail is previous:
            previous = None
        tail.junction |= junction
        tail.turn |= turn
        self.touch(tail)
        if previous is not None and previous.there and previous.end < end and (previous.followers or not previous.turn):
            self._supersede(previous, not previous.junction and previous.followers < 2)
        return tail

    def stand_in(self, tail: Tail[Page], copy: Tail[Any]) -> None:
        """`tail` has the rows of `copy`, and takes the place of the tail that was copied."""
        gone = copy.original
        assert gone is not None, "it was copied from there"
        there, gone.copies = {index: each for index, each in gone.copies.items() if each.live}, {}
        tail.copies |= there
        for each in there.values():
            each.original = tail
        tail.followers = max(tail.followers, gone.followers)
        tail.junction, tail.turn = tail.junction or gone.junction, tail.turn or gone.turn
        if tail.previous is None:
            tail.previous, tail.joined, tail.answer = gone.previous, gone.joined, gone.answer
        if (before := tail.before) is not None:
            before.later.pop(gone, None)
            before.later[tail] = None
        for later in [each for each in gone.later if each.previous is gone]:
            later.previous = tail
            tail.later[later] = None
        self._supersede(tail, tail.superseded and gone.superseded)
        self.price(tail)

    def distrust(self, pages: set[Page]) -> set[bytes]:
        """What these pages hold is no use to anybody: give up all tails with one of them, and their copies. Digests of
        the blocks that had some of them."""
        unsound: dict[Block[Page], bool] = {}

        def is_unsound(block: Block[Page] | None) -> bool:
            way = []
            while block is not None and block not in unsound:
                way.append(block)
                block = block.parent
            before = block is not None and unsound[block]
            for each in reversed(way):
                before = unsound[each] = before or each.page in pages
            return before

        for tail in list(self._tails):
            if is_unsound(tail.block) or not pages.isdisjoint(tail.own_pages):
                self.give_away(tail)
        return {block.digest for block, found in unsound.items() if found}

    def give_away(self, tail: Tail[Page]) -> None:
        """Give up a live tail and its copies."""
        self.evict(tail)
        for index, copy in tail.copies.items():
            if copy.live:
                index.evict(copy)

    def clear(self) -> None:
        """What pages hold is unknown: forget all of it."""
        self.checks.clear()
        super().clear()
        for table in self._tables:
            table.forget()

    def reclaim(self, needed_bytes: int) -> None:
        """See Keeper."""
        self._give_up_tails(needed_bytes, awaited=False)
        for table in self._tables:
            if self._arena.free_bytes >= needed_bytes:
                return
            if table.history:
                table.forget()
        self._give_up_tails(needed_bytes, awaited=True)

    def forget(self, page: Page) -> None:
        """See Keeper."""
        for table in self._tables:
            if page in table.history:
                table.forget(page)
        for tail in list(self._tails):
            if not page.keepers:  # a request that writes waits for this: nobody else is asked
                return
            if page in self.pages(tail):
                self.evict(tail)
                self.evictions += 1

    def check_integrity(self, *, arriving: Iterable[Page] = ()) -> None:
        """Raise AssertionError unless every keeper of a page is a live tail, a block in use, a table's history, or one
        of those that are on their way (`arriving`), and what no other tier has is known."""
        kept = self.kept()
        for table in self._tables:
            kept.update(table.history)
        kept.update(arriving)
        for page, count in kept.items():
            assert page.keepers == count, f"page {page.number} has {count} keepers, {page.keepers} counted"
        assert self._arena.num_keepers == sum(kept.values()), "somebody else keeps pages"
        self.unsaved.check_integrity({tail for tail in self._tails if self.loses_rows(tail)})

    def _is_trusted(self, hit: Hit[Page]) -> bool:
        suspects = self.checks.suspects
        return not suspects or suspects.isdisjoint((*hit.global_pages, *hit.sliding_pages.values()))

    def _loss(self, tail: Tail[Page]) -> int:
        loss = super()._loss(tail)
        return COPY if loss and tail.has_copy else loss

    def _supersede(self, tail: Tail[Page], superseded: bool) -> None:
        """It goes first from now on, in all tiers, or no longer. A copy says what the tail says."""
        changed, tail.superseded = tail.superseded != superseded, superseded
        self.note(tail)
        for index, copy in tail.copies.items():
            copy.superseded = superseded
            index.note(copy)
        if changed:
            self._price_later(tail)

    def _left_by_history(self, tail: Tail[Page]) -> list[Tail[Page]]:
        """Tails behind one at which a request resumes for the first time, that its session does not go on from: where
        its front end said so all of them, else an answer that nobody has gone on from."""
        behind = [each for each in tail.later if each.previous is tail]
        if not tail.turn:
            return [each for each in behind if each.answer and not each.followers] if tail.superseded else []
        for each in behind:
            behind += [later for later in each.later if later.previous is each]
        return behind

    def _price_later(self, tail: Tail[Page]) -> None:
        """What those behind it save has changed."""
        behind = list(tail.later)
        for later in behind:
            if later.live:
                self.price(later)
            for index, copy in later.copies.items():
                if copy.live:
                    index.price(copy)
            if later.superseded:  # it is not counted on
                behind += [each for each in later.later if each.before is later]

    def _goes_on(self, tail: Tail[Page]) -> Iterator[bool]:
        """Of each tail behind it, whether its session needs it."""
        return (each.before is tail and not each.superseded for each in tail.later)

    def _give_up_tails(self, needed_bytes: int, *, awaited: bool) -> None:
        """`awaited`: those, too, that a request is waiting for."""
        while self._arena.free_bytes < needed_bytes:
            victim = self._next_victim(awaited=awaited)
            if victim is None:
                return
            self.give_up(victim)

    def _next_victim(self, *, awaited: bool) -> Tail[Page] | None:
        """The first that frees bytes. Those that are superseded, or in another tier too, go before others even where
        none of them does, since those around each have its pages as well: a short answer's tail has all that its
        prompt's has, and neither goes otherwise. Nobody misses one that is superseded, so its pages are not looked at:
        there may be thousands."""
        first: Tail[Page] | None = None
        for tail in self.victims():
            if tail.awaited and not awaited:
                continue
            first = first or tail
            if self._loss(first) < self._loss(tail):
                break
            if self._loss(tail) == NOTHING or self._frees(tail):
                return tail
        return first

    def _same(self, chain: TokenChain, end: int) -> Tail[Page] | None:
        """A live tail of these tokens that ends here."""
        start = end // self.page_tokens * self.page_tokens
        block = self._blocks.get(chain.digest(end // self.page_tokens))
        same = () if block is None else block.tails.ending(chain.tokens(start, end), chain.marks(start, end))
        return next(iter(same), None)

    def _frees(self, tail: Tail[Page]) -> bool:
        """Whether bytes are free when it goes."""
        pages = [*tail.own_pages, *([tail.block.page] if tail.block.page and tail.block.uses == 1 else [])]
        return any(page.keepers == 1 and not page.entries for page in pages)
