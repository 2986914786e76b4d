"""Which rows of earlier requests a request need not compute: an index over cached pages.

Rows of global layers are cheap to keep and of no use alone: where a request resumes, the sliding layers need their
window, too. So what is kept is a *tail*: the sliding pages of a window and of the positions of one global page before
its end, and through it all global pages before it. A request resumes at the last position that it has in common with a
live tail, whatever page that is in, and computes one token at least.

Tails are left at the end of a prompt and of an answer, where chunks of a long prompt end, where histories part, and at
a junction: where a second request leaves a way that is known. A page without a live tail behind it is given up at once;
its hash stays, so that junctions are found.

What goes first, when memory is short (decision 0024): superseded tails, the oldest first; then tails of clients that
have more than an equal share of what is cached; among equals the tail that costs least to compute again per byte, a
cost that counts from the last eviction on, so that what nobody uses ages (greedy dual, Cao and Irani, USITS 1997). Last
of all, pages that running requests keep behind their windows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from modelserve.planning.prompt_rows import PromptCost
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.arena import Page, PageArena
from modelserve_worker.scheduling.page_table import PageTable
from modelserve_worker.scheduling.tails import Block, Hit, Tail
from modelserve_worker.scheduling.token_chain import TokenChain

_KNOWN_PER_PAGE = 4  # blocks that are known by their hash alone, for each global page of the pool
_LEAST_KNOWN = 4096


class PrefixCache:
    """Keeps pages of `arena`. `prices` say what rows cost to compute again. One thread calls it."""

    def __init__(self, arena: PageArena, geometry: CacheGeometry, prices: PromptCost) -> None:
        self._arena = arena
        self._geometry = geometry
        self._prices = prices
        self._blocks: dict[bytes, Block] = {}
        self._unused: OrderedDict[bytes, Block] = OrderedDict()  # known by their hash alone, the oldest first
        self._most_unused = _LEAST_KNOWN
        if size := geometry.global_page.page_bytes:
            self._most_unused = max(_LEAST_KNOWN, _KNOWN_PER_PAGE * arena.pool_bytes // size)
        self._tails: dict[Tail, None] = {}  # the oldest first
        self._bytes: Counter[str] = Counter()  # of tails, by client
        self._tables: dict[PageTable, None] = {}
        self._clock = 0.0
        self.version = 0  # changes with the tails that are live
        self.evictions = 0
        arena.keeper = self

    @property
    def tails(self) -> Iterable[Tail]:
        """Those that are live, the oldest first."""
        return self._tails.keys()

    @property
    def page_tokens(self) -> int:
        return self._geometry.global_page.page_tokens

    def watch(self, table: PageTable) -> None:
        """Let go of what the table has behind its window, when everything else is gone."""
        self._tables[table] = None

    def unwatch(self, table: PageTable) -> None:
        del self._tables[table]

    def find(self, chain: TokenChain, most: int) -> Hit | None:
        """Where a request with these tokens resumes, at most at position `most`; None where it computes all."""
        size = self.page_tokens
        for block in reversed(self._way(chain)):
            best, position = None, size - 1  # less than a page is not worth its copies
            tokens = chain.tokens(block.depth * size, most)
            for tail in block.tails:
                reach = min(tail.reach(tokens, block.depth * size), most)
                if reach > position and reach >= tail.lowest:
                    best, position = tail, reach
            if best is not None:
                return Hit(position, best, self._global_pages(best, position))
        return None

    def known_tokens(self, chain: TokenChain) -> int:
        """How many of its first tokens, in whole pages, an earlier request had, whether or not rows of it are left."""
        return max(0, len(self._way(chain)) - 1) * self.page_tokens

    def follow(self, hit: Hit) -> None:
        """A request resumes there."""
        tail = hit.tail
        tail.followers += 1
        if tail.superseded:
            tail.superseded, tail.junction = False, True
        self._touch(tail)

    def leave(
        self,
        chain: TokenChain,
        end: int,
        table: PageTable,
        *,
        previous: Tail | None = None,
        joined: int = 0,
        client: str = "",
        junction: bool = False,
    ) -> Tail | None:
        """Keep what a request needs that resumes at `end` or a little before it, where `table` has these rows.

        `previous` is the tail before it on the way of the same session, which has the positions up to `joined` in
        common with it; unless more than one history goes on from that one (`junction`), it goes first from now on. None
        where `end` is too near to the beginning to be worth it.
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
            block = self._block_of(chain, full)
            partial = global_pages[full] if end % size and global_pages else None
            first = lowest // size * size
            tail = Tail(
                block, end, lowest, first, chain.tokens(first, end).copy(), partial, sliding, client, previous, joined,
                junction,
            )  # fmt: skip
            self._insert(tail, global_pages)
        elif tail is previous:
            previous = None
        tail.junction |= junction
        self._touch(tail)
        if previous is not None and previous.live and previous.end < end:
            previous.superseded = not previous.junction and previous.followers < 2
        return tail

    def clear(self) -> None:
        """What pages hold is unknown: forget all of it."""
        for tail in list(self._tails):
            self._evict(tail)
        for table in self._tables:
            table.forget()

    def reclaim(self, needed_bytes: int) -> None:
        """See Keeper."""
        while self._arena.free_bytes < needed_bytes and self._tails:
            victim = self._next_victim()
            self._clock = max(self._clock, victim.priority)
            self._evict(victim)
            self.evictions += 1
        for table in self._tables:
            if self._arena.free_bytes >= needed_bytes:
                return
            table.forget()

    def forget(self, page: Page) -> None:
        """See Keeper."""
        for tail in [tail for tail in self._tails if page in self._pages(tail)]:
            self._evict(tail)
            self.evictions += 1
        for table in self._tables:
            table.forget(page)

    def victims(self) -> list[Tail]:
        """Live tails in the order in which they go."""
        clients = sum(used > 0 for used in self._bytes.values())
        share = sum(self._bytes.values()) / max(1, clients)

        def order(tail: Tail) -> tuple[int, float]:
            if tail.superseded:
                return 0, 0.0
            return (1 if self._bytes[tail.client] > share else 2), tail.priority

        return sorted(self._tails, key=order)

    def _next_victim(self) -> Tail:
        """The first that frees bytes. Superseded ones go before others even where none of them does, since those around
        each have its pages as well: a short answer's tail has all that its prompt's has, and neither goes otherwise."""
        victims = self.victims()
        freeing = next((tail for tail in victims if self._frees(tail)), None)
        return victims[0] if freeing is None or victims[0].superseded > freeing.superseded else freeing

    def check_integrity(self) -> None:
        """Raise AssertionError unless every keeper of a page is a live tail, a block in use or a table's history."""
        kept: Counter[Page] = Counter()
        for tail in self._tails:
            assert tail.live
            assert all(tail in block.tails for block in tail.attached)
            kept.update(tail.sliding.values())
            kept.update([tail.partial] if tail.partial else [])
        for block in self._blocks.values():
            assert (block.uses > 0) != (block.digest in self._unused), "a block is in use, or only known"
            kept.update([block.page] if block.page else [])
        for table in self._tables:
            kept.update(table.history)
        for page, count in kept.items():
            assert page.keepers == count, f"page {page.number} has {count} keepers, {page.keepers} counted"
        assert self._arena.num_keepers == sum(kept.values()), "somebody else keeps pages"

    def _way(self, chain: TokenChain) -> list[Block]:
        """Known blocks of these tokens, from the root on."""
        way: list[Block] = []
        for pages in range(len(chain) // self.page_tokens + 1):
            block = self._blocks.get(chain.digest(pages))
            if block is None:
                break
            way.append(block)
        return way

    def _same(self, chain: TokenChain, end: int) -> Tail | None:
        """A live tail of these tokens that ends here."""
        size = self.page_tokens
        block = self._blocks.get(chain.digest(end // size))
        start = end // size * size
        tokens = chain.tokens(start, end)
        of_block = [] if block is None else block.tails
        return next((tail for tail in of_block if tail.end == end and tail.reach(tokens, start) == end), None)

    def _block_of(self, chain: TokenChain, pages: int) -> Block:
        """The block of the first so many pages, known from now on."""
        block: Block | None = None
        for depth in range(pages + 1):
            digest = chain.digest(depth)
            found = self._blocks.get(digest)
            if found is None:
                found = self._blocks[digest] = self._unused[digest] = Block(digest, block)
                if block is not None:
                    block.children += 1
            block = found
        assert block is not None
        return block

    def _insert(self, tail: Tail, global_pages: list[Page]) -> None:
        arena, geometry = self._arena, self._geometry
        self._use(tail.block, global_pages)
        for page in self._own_pages(tail):
            arena.keep(page)
        block: Block | None = tail.block
        while block is not None and (block.depth + 1) * self.page_tokens > tail.lowest:
            block.tails.append(tail)
            tail.attached.append(block)
            block = block.parent
        pages = (tail.end - tail.base) // self.page_tokens + (tail.partial is not None)
        tail.bytes = len(tail.sliding) * geometry.sliding_page.page_bytes + pages * geometry.global_page.page_bytes
        self._bytes[tail.client] += tail.bytes
        self._tails[tail] = None
        self.version += 1
        self._forget_old_blocks()

    def _evict(self, tail: Tail) -> None:
        tail.live = False
        del self._tails[tail]
        self._bytes[tail.client] -= tail.bytes
        self.version += 1
        for block in tail.attached:
            block.tails.remove(tail)
        for page in self._own_pages(tail):
            self._arena.let_go(page)
        tail.sliding, tail.partial = {}, None  # later ones may remember it as the one before them
        self._stop_using(tail.block)
        for later in self._tails:
            if later.previous is tail:
                self._price(later)

    def _use(self, last: Block, global_pages: list[Page]) -> None:
        """One more tail or child of the block is there."""
        block: Block | None = last
        while block is not None:
            block.uses += 1
            if block.uses > 1:
                return
            del self._unused[block.digest]
            if block.depth and global_pages:
                block.page = global_pages[block.depth - 1]
                self._arena.keep(block.page)
            block = block.parent

    def _stop_using(self, last: Block) -> None:
        block: Block | None = last
        while block is not None:
            block.uses -= 1
            if block.uses:
                return
            self._unused[block.digest] = block
            if block.page is not None:
                self._arena.let_go(block.page)
                block.page = None
            block = block.parent

    def _forget_old_blocks(self) -> None:
        """Those without known children first: whoever comes finds no way with a gap."""
        for _ in range(len(self._unused)):
            if len(self._unused) <= self._most_unused:
                return
            digest, block = self._unused.popitem(last=False)
            if block.children:
                self._unused[digest] = block
                continue
            del self._blocks[digest]
            if block.parent is not None:
                block.parent.children -= 1

    def _touch(self, tail: Tail) -> None:
        tail.used_at = self._clock
        self._price(tail)

    def _price(self, tail: Tail) -> None:
        """What it saves, in first rows, per byte, from when it was last used."""
        saved = self._prices.cost(tail.base, tail.end - tail.base)
        tail.priority = tail.used_at + saved / max(1, tail.bytes)

    def _global_pages(self, tail: Tail, position: int) -> list[Page]:
        """Of the rows [0, position)."""
        if not self._geometry.global_page.layers:
            return []
        pages: list[Page] = []
        block, last = tail.block, self._geometry.global_page.pages(position)
        if last > block.depth:
            assert tail.partial is not None
            pages.append(tail.partial)
        while block.parent is not None:
            if block.depth <= last:
                assert block.page is not None, "a live tail has all pages before it"
                pages.append(block.page)
            block = block.parent
        return pages[::-1]

    def _own_pages(self, tail: Tail) -> Iterator[Page]:
        yield from tail.sliding.values()
        if tail.partial is not None:
            yield tail.partial

    def _pages(self, tail: Tail) -> Iterator[Page]:
        yield from self._own_pages(tail)
        block: Block | None = tail.block
        while block is not None:
            if block.page is not None:
                yield block.page
            block = block.parent

    def _frees(self, tail: Tail) -> bool:
        """Whether bytes are free when it goes."""
        pages = [*self._own_pages(tail), *([tail.block.page] if tail.block.page and tail.block.uses == 1 else [])]
        return any(page.keepers == 1 and not page.entries for page in pages)
