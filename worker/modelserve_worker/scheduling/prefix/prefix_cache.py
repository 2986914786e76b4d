"""Which rows of earlier requests a request need not compute: the index over cached pages of the pool (prefix_index.py).

Prefixes are left at the end of a prompt and of an answer, where chunks of a long prompt end, where histories part, and
at a junction: where a second request leaves a path that is known.

What goes first, when memory is short (decision 0024): superseded prefixes; then those that another tier has as well,
which cost a copy to have again; then the others, in the index's order; then pages that running requests keep behind
their windows; then what has been brought back from another tier and waits for its request. Pages that are still on
their way from there are others' to give up, who register with the arena behind this cache.
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
from modelserve_worker.scheduling.prefix.cached_prefix import Block, CachedPrefix, Hit
from modelserve_worker.scheduling.prefix.eviction_order import COPY, NOTHING, ROWS
from modelserve_worker.scheduling.prefix.prefix_index import LEAST_KNOWN, PrefixIndex
from modelserve_worker.scheduling.prefix.token_chain import TokenChain
from modelserve_worker.scheduling.prefix.unsaved_prefixes import UnsavedPrefixes

_KNOWN_PER_PAGE = 4  # blocks that are known by their hash alone, for each global page of the pool


class PrefixCache(PrefixIndex[Page]):
    """The cache keeps pages of `arena`, and is the first there to be asked for them."""

    def __init__(self, arena: PageArena, geometry: CacheGeometry, prices: PromptCost) -> None:
        super().__init__(arena, geometry, prices)
        self._arena = arena
        if size := geometry.global_page.page_bytes:
            self._most_unused = max(LEAST_KNOWN, _KNOWN_PER_PAGE * arena.pool_bytes // size)
        self._tables: dict[PageTable, None] = {}
        self.unsaved = UnsavedPrefixes(arena, {kind: geometry.page(kind).page_bytes for kind in LayerKind})
        self.checks = PageChecks()
        self._gone: list[CachedPrefix[Page]] = []  # of those that were told
        arena.register(self)

    def watch(self, table: PageTable) -> None:
        """Let go of what the table has behind its window, when everything else is gone."""
        self._tables[table] = None

    def unwatch(self, table: PageTable) -> None:
        del self._tables[table]

    def known_tokens(self, chain: TokenChain) -> int:
        """How many of its first tokens, in whole pages, an earlier request had, whether or not rows of it are left."""
        return max(0, len(self.path(chain)) - 1) * self.page_tokens

    def follow(self, hit: Hit[Page]) -> None:
        """A request resumes there."""
        prefix = hit.prefix
        prefix.followers += 1
        if prefix.followers == 1 and (left := self._left_by_history(prefix)):
            for each in left:
                self._supersede(each, True)
        elif prefix.superseded:
            prefix.junction = True
        self._supersede(prefix, False)
        self.touch(prefix)

    def note(self, prefix: CachedPrefix[Page]) -> None:
        super().note(prefix)
        self.unsaved.update(prefix, loses_rows=self.loses_rows(prefix))

    def loses_rows(self, prefix: CachedPrefix[Page]) -> bool:
        """Whether rows that somebody may miss go with it: no other tier has them."""
        return self._loss(prefix) == ROWS

    def evict(self, prefix: CachedPrefix[Page]) -> None:
        self.unsaved.remove(prefix)
        super().evict(prefix)
        if prefix.told:
            self._gone.append(prefix)
        self.gone(prefix)

    @property
    def inserted(self) -> int:
        """How many prefixes were ever live: the number of the last of them."""
        return self._inserted

    def take_gone(self) -> list[CachedPrefix[Page]]:
        """Those of the told prefixes that are no longer live since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def gone(self, prefix: CachedPrefix[Page]) -> None:
        """The pool, or a tier behind it, has it no more."""
        if prefix.live:
            self.note(prefix)
        elif not prefix.has_copy:
            self._lost(prefix)

    def _lost(self, prefix: CachedPrefix[Page]) -> None:
        before = prefix.before
        for later in [each for each in prefix.later if each.previous is prefix]:
            later.previous = before
            if before is not None:
                before.later[later] = None
        if before is not None:
            before.later.pop(prefix, None)
            if before.superseded and not prefix.superseded and not any(self._goes_on(before)):
                self._supersede(before, False)  # it is the session's last one now
        if not prefix.superseded:
            self._price_later(prefix)

    def leave(
        self,
        chain: TokenChain,
        end: int,
        table: PageTable,
        *,
        previous: CachedPrefix[Page] | None = None,
        joined: int = 0,
        client: str = "",
        junction: bool = False,
        turn: bool = False,
        answer: bool = False,
    ) -> CachedPrefix[Page] | None:
        """Keep what a request needs that resumes at `end` or a little before it, where `table` has these rows.

        `previous` is the prefix before it on the path of the same session, which has the positions up to `joined` in
        common with it; unless more than one history goes on from that one (`junction`), or its own next `turn` and not
        this `answer`, it goes first from now on. None where `end` is too near to the beginning to be worth it.
        """
        size = self.page_tokens
        if end < size:
            return None
        full = end // size
        prefix = self._same(chain, end)
        if prefix is None:
            global_pages, sliding, ring = table.kept_pages(end)
            if not sliding and self._geometry.sliding_page.layers:
                return None  # a window of one row lies in one page, which a step in flight writes over
            first_row = min(sliding) * self._geometry.sliding_page.page_tokens if sliding else 0
            lowest = max(size, first_row + self._geometry.window - 1 if first_row else 0)
            if ring.first and self._geometry.draft is not None:
                lowest = max(lowest, ring.first + self._geometry.draft.window)
            if lowest > end:
                return None
            block = self.block_of(chain.digest(depth) for depth in range(full + 1))
            partial = global_pages[full] if end % size and global_pages else None
            first = lowest // size * size
            prefix = CachedPrefix(
                block, end, lowest, first, chain.tokens(first, end).copy(), partial, sliding, client, previous, joined,
                junction, answer=answer, marks=chain.marks(first, end), ring=ring.pages, ring_first=ring.first,
            )  # fmt: skip
            if previous is not None:
                previous.later[prefix] = None
            self.insert(prefix, global_pages)
        elif prefix is previous:
            previous = None
        prefix.junction |= junction
        prefix.turn |= turn
        self.touch(prefix)
        if previous is not None and previous.there and previous.end < end and (previous.followers or not previous.turn):
            self._supersede(previous, not previous.junction and previous.followers < 2)
        return prefix

    def stand_in(self, prefix: CachedPrefix[Page], copy: CachedPrefix[Any]) -> None:
        """`prefix` has the rows of `copy`, and takes the place of the prefix that was copied."""
        gone = copy.original
        assert gone is not None, "it was copied from there"
        there, gone.copies = {index: each for index, each in gone.copies.items() if each.live}, {}
        prefix.copies |= there
        for each in there.values():
            each.original = prefix
        prefix.followers = max(prefix.followers, gone.followers)
        prefix.junction, prefix.turn = prefix.junction or gone.junction, prefix.turn or gone.turn
        if prefix.previous is None:
            prefix.previous, prefix.joined, prefix.answer = gone.previous, gone.joined, gone.answer
        if (before := prefix.before) is not None:
            before.later.pop(gone, None)
            before.later[prefix] = None
        for later in [each for each in gone.later if each.previous is gone]:
            later.previous = prefix
            prefix.later[later] = None
        self._supersede(prefix, prefix.superseded and gone.superseded)
        self.price(prefix)

    def distrust(self, pages: set[Page]) -> set[bytes]:
        """What these pages hold is no use to anybody: give up all prefixes with one of them, and their copies. Digests
        of the blocks that had some of them."""
        unsound: dict[Block[Page], bool] = {}

        def is_unsound(block: Block[Page] | None) -> bool:
            path = []
            while block is not None and block not in unsound:
                path.append(block)
                block = block.parent
            before = block is not None and unsound[block]
            for each in reversed(path):
                before = unsound[each] = before or each.page in pages
            return before

        for prefix in list(self._prefixes):
            if is_unsound(prefix.block) or not pages.isdisjoint(prefix.own_pages):
                self.give_away(prefix)
        return {block.digest for block, found in unsound.items() if found}

    def give_away(self, prefix: CachedPrefix[Page]) -> None:
        """Give up a live prefix and its copies."""
        self.evict(prefix)
        for index, copy in prefix.copies.items():
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
        self._give_up_prefixes(needed_bytes, awaited=False)
        for table in self._tables:
            if self._arena.free_bytes >= needed_bytes:
                return
            if table.history:
                table.forget()
        self._give_up_prefixes(needed_bytes, awaited=True)

    def forget(self, page: Page) -> None:
        """See Keeper."""
        for table in self._tables:
            if page in table.history:
                table.forget(page)
        for prefix in list(self._prefixes):
            if not page.keepers:  # a request that writes waits for this: nobody else is asked
                return
            if page in self.pages(prefix):
                self.evict(prefix)
                self.evictions += 1

    def check_integrity(self, *, arriving: Iterable[Page] = ()) -> None:
        """Raise AssertionError unless every keeper of a page is a live prefix, a block in use, a table's history, or
        one of those that are on their way (`arriving`), and what no other tier has is known."""
        kept = self.kept()
        for table in self._tables:
            kept.update(table.history)
        kept.update(arriving)
        for page, count in kept.items():
            assert page.keepers == count, f"page {page.number} has {count} keepers, {page.keepers} counted"
        assert self._arena.num_keepers == sum(kept.values()), "somebody else keeps pages"
        self.unsaved.check_integrity({prefix for prefix in self._prefixes if self.loses_rows(prefix)})

    def _is_trusted(self, hit: Hit[Page]) -> bool:
        suspects = self.checks.suspects
        return not suspects or suspects.isdisjoint(hit.pages)

    def _loss(self, prefix: CachedPrefix[Page]) -> int:
        loss = super()._loss(prefix)
        return COPY if loss and prefix.has_copy else loss

    def _supersede(self, prefix: CachedPrefix[Page], superseded: bool) -> None:
        """It goes first from now on, in all tiers, or no longer. A copy says what the prefix says."""
        changed, prefix.superseded = prefix.superseded != superseded, superseded
        self.note(prefix)
        for index, copy in prefix.copies.items():
            copy.superseded = superseded
            index.note(copy)
        if changed:
            self._price_later(prefix)

    def _left_by_history(self, prefix: CachedPrefix[Page]) -> list[CachedPrefix[Page]]:
        """Prefixes behind one at which a request resumes for the first time, that its session does not go on from:
        where its front end said so all of them, else an answer that nobody has gone on from."""
        behind = [each for each in prefix.later if each.previous is prefix]
        if not prefix.turn:
            return [each for each in behind if each.answer and not each.followers] if prefix.superseded else []
        for each in behind:
            behind += [later for later in each.later if later.previous is each]
        return behind

    def _price_later(self, prefix: CachedPrefix[Page]) -> None:
        """What those behind it save has changed."""
        behind = list(prefix.later)
        for later in behind:
            if later.live:
                self.price(later)
            for index, copy in later.copies.items():
                if copy.live:
                    index.price(copy)
            if later.superseded:  # it is not counted on
                behind += [each for each in later.later if each.before is later]

    def _goes_on(self, prefix: CachedPrefix[Page]) -> Iterator[bool]:
        """Of each prefix behind it, whether its session needs it."""
        return (each.before is prefix and not each.superseded for each in prefix.later)

    def _give_up_prefixes(self, needed_bytes: int, *, awaited: bool) -> None:
        """`awaited`: those, too, that a request is waiting for."""
        while self._arena.free_bytes < needed_bytes:
            victim = self._next_victim(awaited=awaited)
            if victim is None:
                return
            self.give_up(victim)

    def _next_victim(self, *, awaited: bool) -> CachedPrefix[Page] | None:
        """The first that frees bytes. Those that are superseded, or in another tier too, go before others even where
        none of them does, since those around each have its pages as well: a short answer's prefix has all that its
        prompt's has, and neither goes otherwise. Nobody misses one that is superseded, so its pages are not looked at:
        there may be thousands."""
        first: CachedPrefix[Page] | None = None
        for prefix in self.victims():
            if prefix.awaited and not awaited:
                continue
            first = first or prefix
            if self._loss(first) < self._loss(prefix):
                break
            if self._loss(prefix) == NOTHING or self._frees(prefix):
                return prefix
        return first

    def _same(self, chain: TokenChain, end: int) -> CachedPrefix[Page] | None:
        """A live prefix of these tokens that ends here."""
        start = end // self.page_tokens * self.page_tokens
        block = self._blocks.get(chain.digest(end // self.page_tokens))
        same = () if block is None else block.prefixes.ending(chain.tokens(start, end), chain.marks(start, end))
        return next(iter(same), None)

    def _frees(self, prefix: CachedPrefix[Page]) -> bool:
        """Whether bytes are free when it goes."""
        pages = [*prefix.own_pages, *([prefix.block.page] if prefix.block.page and prefix.block.uses == 1 else [])]
        return any(page.keepers == 1 and not page.entries for page in pages)
