"""An index over the cached pages of one tier: where a request resumes, and which prefixes are worth the least.

Rows of global layers are cheap to keep and of no use alone: where a request resumes, the sliding layers need their
window, too. So what is kept is a *prefix*: the sliding pages of a window and of the positions of one global page before
its end, and through it all global pages before it. A request resumes at the last position that it has in common with a
live prefix, whatever page that is in, and computes one token at least.

A page without a live prefix behind it is given up at once; its hash stays, so that junctions are found.

What goes first (decision 0024): superseded prefixes, the oldest first; then prefixes of clients that have more than an
equal share of what is cached; among equals the prefix that costs least to compute again per byte, a cost that counts
from the last eviction on, so that what nobody uses ages (greedy dual, Cao and Irani, USITS 1997).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.prefix.cached_prefix import Block, CachedPrefix, Hit, P
from modelserve_worker.scheduling.prefix.eviction_order import NOTHING, ROWS, EvictionOrder
from modelserve_worker.scheduling.prefix.token_chain import TokenChain

LEAST_KNOWN = 4096  # blocks that are known by their hash alone
LEAST_GAP_PAGES = 4  # global pages between two places to resume at, of which the second is worth a step, or a copy

Contra = TypeVar("Contra", contravariant=True)


class Keeps(Protocol[Contra]):
    """Pages with a count of keepers; what nobody keeps is free."""

    def keep(self, page: Contra) -> None: ...

    def let_go(self, page: Contra) -> None: ...


class PrefixIndex(Generic[P]):
    """Of pages of `pool`. `prices` say what rows cost to compute again. One thread calls it."""

    def __init__(self, pool: Keeps[P], geometry: CacheGeometry, prices: PromptCost) -> None:
        self.pool = pool
        self._geometry = geometry
        self._prices = prices
        self._blocks: dict[bytes, Block[P]] = {}
        self._unused: dict[bytes, Block[P]] = {}  # known by their hash alone
        self._last_unused: OrderedDict[bytes, Block[P]] = OrderedDict()  # childless ones, the oldest first
        self._most_unused = LEAST_KNOWN
        self._prefixes: dict[CachedPrefix[P], None] = {}  # the oldest first
        self._order: EvictionOrder[P] = EvictionOrder(self._loss)
        self._clock = 0.0
        self._inserted = 0
        self.version = 0  # changes with the prefixes that are live
        self.evictions = 0

    @property
    def prefixes(self) -> Iterable[CachedPrefix[P]]:
        """Those that are live, the oldest first."""
        return self._prefixes.keys()

    @property
    def page_tokens(self) -> int:
        return self._geometry.global_page.page_tokens

    def find(self, chain: TokenChain, most: int) -> Hit[P] | None:
        """Where a request with these tokens resumes, at most at position `most`; None where it computes all."""
        size = self.page_tokens
        for block in reversed(self.path(chain)):
            if block.prefixes:
                start = block.depth * size
                found = block.prefixes.find(chain.tokens(start, most), chain.marks(start, most), most)
                if found is not None:
                    position, prefix = found
                    hit = Hit(position, prefix, self._global_pages(prefix, position))
                    if self._is_trusted(hit):
                        return hit
        return None

    def __contains__(self, digest: object) -> bool:
        """Whether the block is known."""
        return digest in self._blocks

    def path(self, chain: TokenChain) -> list[Block[P]]:
        """Known blocks of these tokens, from the root on."""
        path: list[Block[P]] = []
        for pages in range(len(chain) // self.page_tokens + 1):
            block = self._blocks.get(chain.digest(pages))
            if block is None:
                break
            path.append(block)
        return path

    def pages_of(self, digests: Iterable[bytes]) -> list[P]:
        """Pages of a path whose blocks behind the root these are, as far as they are there without a gap."""
        pages: list[P] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None or block.page is None:
                break
            pages.append(block.page)
        return pages

    def touch(self, prefix: CachedPrefix[P]) -> None:
        """Somebody uses it."""
        prefix.used_at = self._clock
        self.price(prefix)

    def block_of(self, digests: Iterable[bytes]) -> Block[P]:
        """The block at the end of a path from the root, known from now on."""
        block: Block[P] | None = None
        for digest in digests:
            found = self._blocks.get(digest)
            if found is None:
                found = self._blocks[digest] = self._unused[digest] = self._last_unused[digest] = Block(digest, block)
                if block is not None:
                    block.children += 1
                    self._last_unused.pop(block.digest, None)
            block = found
        assert block is not None, "a path begins with its root"
        return block

    def use(self, last: Block[P], global_pages: list[P]) -> None:
        """One more prefix or child of the block is there; `global_pages` are those before its end, as far as they are
        not in use yet."""
        for block in last.upwards():
            block.uses += 1
            if block.uses > 1:
                return
            del self._unused[block.digest]
            self._last_unused.pop(block.digest, None)
            if block.depth and global_pages:
                block.page = global_pages[block.depth - 1]
                self.pool.keep(block.page)

    def stop_using(self, last: Block[P]) -> None:
        """Undo one `use`."""
        for block in last.upwards():
            block.uses -= 1
            if block.uses:
                return
            self._unused[block.digest] = block
            if not block.children:
                self._last_unused[block.digest] = block
            if block.page is not None:
                self.pool.let_go(block.page)
                block.page = None

    def insert(self, prefix: CachedPrefix[P], global_pages: list[P]) -> None:
        """A prefix is live from now on; its own pages, and those of its path, are kept."""
        self._inserted += 1
        prefix.number = self._inserted
        self.use(prefix.block, global_pages)
        for page in prefix.own_pages:
            self.pool.keep(page)
        for block in prefix.block.upwards():
            if (block.depth + 1) * self.page_tokens <= prefix.lowest:
                break
            block.attach(prefix, self.page_tokens)
            prefix.attached.append(block)
        prefix.bytes = self._bytes_since(prefix, self._base(prefix))
        self._order.add(prefix)
        self._prefixes[prefix] = None
        self.version += 1
        self._forget_old_blocks()
        self.touch(prefix)

    def note(self, prefix: CachedPrefix[P]) -> None:
        """Whether it is superseded, or its rows are anywhere else, may have changed."""
        self._order.update(prefix)
        for block in prefix.attached:
            block.prefixes.update(prefix)

    def evict(self, prefix: CachedPrefix[P]) -> None:
        """It is no longer live; its pages are let go of."""
        prefix.live = False
        del self._prefixes[prefix]
        self._order.remove(prefix)
        self.version += 1
        for block in prefix.attached:
            block.detach(prefix)
        for page in prefix.own_pages:
            self.pool.let_go(page)
        prefix.sliding, prefix.partial, prefix.ring = {}, None, {}  # later ones may remember it as the one before them
        self.stop_using(prefix.block)

    def clear(self) -> None:
        """Forget all of it."""
        for prefix in list(self._prefixes):
            self.evict(prefix)

    def give_up(self, victim: CachedPrefix[P]) -> None:
        """Evict it for somebody who needs its memory."""
        self._clock = max(self._clock, victim.priority)
        self.evict(victim)
        self.evictions += 1

    def victims(self, least: int = NOTHING) -> Iterator[CachedPrefix[P]]:
        """Live prefixes in the order in which they go, those with which at least so much is lost."""
        return self._order.losing(least)

    def kept(self) -> Counter[P]:
        """How often prefixes and blocks keep each page. Raises AssertionError where they contradict each other."""
        kept: Counter[P] = Counter()
        self._order.check_integrity(self._prefixes)
        for prefix in self._prefixes:
            assert prefix.live
            assert all(prefix in block.prefixes for block in prefix.attached)
            kept.update(prefix.own_pages)
        for block in self._blocks.values():
            assert (block.uses > 0) != (block.digest in self._unused), "a block is in use, or only known"
            assert (block.digest in self._last_unused) == (block.uses + block.children == 0)
            kept.update([block.page] if block.page is not None else [])
        return kept

    def _loss(self, prefix: CachedPrefix[P]) -> int:
        """What goes with it: NOTHING where the same session has a later one, or the next request resumes a few pages
        before it without it."""
        return NOTHING if prefix.superseded or prefix.saves < LEAST_GAP_PAGES * self.page_tokens else ROWS

    def _forget_old_blocks(self) -> None:
        """Those without known children first: whoever comes finds no path with a gap."""
        while len(self._unused) > self._most_unused:
            digest, block = self._last_unused.popitem(last=False)
            del self._unused[digest], self._blocks[digest]
            parent = block.parent
            if parent is not None:
                parent.children -= 1
                if not parent.children and not parent.uses:
                    self._last_unused[parent.digest] = parent
                    self._last_unused.move_to_end(parent.digest, last=False)  # it has not been used for longer

    def price(self, prefix: CachedPrefix[P]) -> None:
        """What it saves, in first rows, per byte, from when it was last used."""
        base = self._base(prefix)
        prefix.saves = prefix.end - base
        saved = self._prices.cost(base, prefix.saves)
        prefix.priority = prefix.used_at + saved / max(1, prefix.bytes)
        self.note(prefix)

    def _is_trusted(self, hit: Hit[P]) -> bool:  # noqa: ARG002 - of what may be read
        return True

    def _base(self, prefix: CachedPrefix[P]) -> int:
        """Where a request would resume without it."""
        return prefix.base

    def _bytes_since(self, prefix: CachedPrefix[P], base: int) -> int:
        """What it costs beyond a prefix that ends there."""
        geometry = self._geometry
        pages = (prefix.end - base) // self.page_tokens + (prefix.partial is not None) + len(prefix.ring)
        return len(prefix.sliding) * geometry.sliding_page.page_bytes + pages * geometry.global_page.page_bytes

    def _global_pages(self, prefix: CachedPrefix[P], position: int) -> list[P]:
        """Of the rows [0, position)."""
        if not self._geometry.global_page.layers:
            return []
        pages: list[P] = []
        last = self._geometry.global_page.pages(position)
        if last > prefix.block.depth:
            assert prefix.partial is not None
            pages.append(prefix.partial)
        for block in prefix.block.upwards():
            if 0 < block.depth <= last:
                assert block.page is not None, "a live prefix has all pages before it"
                pages.append(block.page)
        return pages[::-1]

    def pages(self, prefix: CachedPrefix[P]) -> Iterator[P]:
        """Those that a live prefix needs: its own, and those of its path."""
        yield from prefix.own_pages
        for block in prefix.block.upwards():
            if block.page is not None:
                yield block.page
