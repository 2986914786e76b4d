"""What a prefix cache remembers: pages of tokens by their hashes, and cached prefixes, where requests may resume.

`P` is the pages of one tier: those of the pool on the device, or copies of them in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from modelserve_worker.batch import Int32Array
from modelserve_worker.scheduling.prefix.block_prefixes import BlockPrefixes
from modelserve_worker.scheduling.prefix.token_chain import SpanMark

P = TypeVar("P")
_NO_PREFIXES: BlockPrefixes[Any] = BlockPrefixes(0)  # nobody adds any


class Block(Generic[P]):
    """The tokens of one global page behind those of `parent`; the root of a chain has none.

    `page` is kept while the block is in use: while a prefix ends in it, or a block behind it is in use. Afterwards the
    block is only known, by its hash, until it is the oldest of too many.
    """

    __slots__ = ("children", "depth", "digest", "page", "parent", "prefixes", "unsaved", "uses")

    def __init__(self, digest: bytes, parent: Block[P] | None) -> None:
        self.digest = digest
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages up to here
        self.page: P | None = None
        self.uses = 0
        self.unsaved = 0  # of these uses, those by prefixes whose rows nobody else has (unsaved_prefixes.py)
        self.children = 0  # known ones
        self.prefixes: BlockPrefixes[CachedPrefix[P]] = _NO_PREFIXES  # that may serve who parts behind it

    def upwards(self) -> Iterator[Block[P]]:
        """This block and those before it, the root last."""
        block: Block[P] | None = self
        while block is not None:
            yield block
            block = block.parent

    def attach(self, prefix: CachedPrefix[P], page_tokens: int) -> None:
        """The prefix may serve such a request from now on."""
        if self.prefixes is _NO_PREFIXES:
            self.prefixes = BlockPrefixes(self.depth * page_tokens)
        self.prefixes.add(prefix)

    def detach(self, prefix: CachedPrefix[P]) -> None:
        """Undo it."""
        self.prefixes.remove(prefix)
        if not self.prefixes:
            self.prefixes = _NO_PREFIXES

    def digests(self) -> list[bytes]:
        """Of the path here, from the root on."""
        return [block.digest for block in self.upwards()][::-1]


@dataclass(slots=True, eq=False)
class CachedPrefix(Generic[P]):
    """Has rows of sliding layers before `end`, which make the global pages before it worth something: a request with
    the same tokens resumes at any position from `lowest` to `end`.
    """

    block: Block[P]  # of its last full page
    end: int
    lowest: int
    first: int  # position of `tokens[0]`, where a page begins
    tokens: Int32Array  # [end - first]
    partial: P | None  # the global page behind the full ones
    sliding: dict[int, P]  # by logical page, down to the window of `lowest`
    client: str  # whose bytes they are
    previous: CachedPrefix[P] | None  # the one before it on the path of the same request
    joined: int  # the last position that its tokens have in common with `previous`
    junction: bool  # more than one history goes on from here
    turn: bool = False  # its session's next turn goes on from here, and not behind the answer
    answer: bool = False  # left at the end of one
    bytes: int = 0  # what it costs, beyond `previous`
    priority: float = 0.0
    used_at: float = 0.0  # the cache's clock then
    saves: int = 0  # rows that a request would compute without it
    superseded: bool = False  # the same session has a later one
    live: bool = True
    number: int = 0  # those that are younger have greater ones
    told: bool = False  # to routers
    followers: int = 0  # requests that resumed here
    attached: list[Block[P]] = field(default_factory=list)
    later: dict[CachedPrefix[P], None] = field(default_factory=dict)  # those there whose `previous` it is, or was
    copies: dict[Any, CachedPrefix[Any]] = field(default_factory=dict)  # of one in the pool: the last one of each tier
    original: CachedPrefix[Any] | None = None  # of a copy: who has these rows in the pool, or had
    marks: tuple[SpanMark, ...] = ()  # of spans with rows among its `tokens`
    awaited: set[str] = field(default_factory=set)  # requests that it was brought back for and that have not begun
    ring: dict[int, P] = field(default_factory=dict)  # of a drafter's window layers, by entry of its ring
    ring_first: int = 0  # position of the first row that these have

    @property
    def has_copy(self) -> bool:
        """Whether a tier behind the pool has these rows."""
        return any(copy.live for copy in self.copies.values())

    @property
    def there(self) -> bool:
        """Whether the pool, or a tier behind it, has these rows."""
        return self.live or self.has_copy

    @property
    def before(self) -> CachedPrefix[P] | None:
        """The nearest one before it that is there."""
        previous = self.previous
        while previous is not None and not previous.there:
            previous = previous.previous
        if previous is not self.previous:
            self.previous = previous
            if previous is not None:
                previous.later[self] = None
        return previous

    @property
    def base(self) -> int:
        """Where a request would resume without it, and without those that go before it does."""
        before = self.before
        while before is not None and before.superseded:
            before = before.before
        return 0 if before is None else min(before.end, self.joined)

    @property
    def own_pages(self) -> Iterator[P]:
        """Those that no block has."""
        yield from self.sliding.values()
        yield from self.ring.values()
        if self.partial is not None:
            yield self.partial

    def reach(self, tokens: Int32Array, start: int, marks: tuple[SpanMark, ...]) -> int:
        """Last position up to which its rows are those of a request, whose `tokens` begin at `start` and have these
        `marks`; both agree before that."""
        own = self.tokens[start - self.first :]
        length = min(len(own), len(tokens))
        differ = np.flatnonzero(own[:length] != tokens[:length])
        reach = start + (int(differ[0]) if len(differ) else length)
        if marks == self.marks:
            return reach
        parting = [max(start, mark.start) for mark in {*marks} ^ {*self.marks} if mark.end > start]
        return min([reach, *parting])


@dataclass(frozen=True, slots=True)
class Hit(Generic[P]):
    """Where a request resumes, and with which pages."""

    position: int
    prefix: CachedPrefix[P]
    global_pages: list[P]  # of the rows [0, position)

    @property
    def sliding_pages(self) -> Mapping[int, P]:
        return self.prefix.sliding

    @property
    def ring_pages(self) -> Mapping[int, P]:
        return self.prefix.ring

    @property
    def ring_first(self) -> int:
        return self.prefix.ring_first

    @property
    def pages(self) -> Iterator[P]:
        """All of them."""
        yield from self.global_pages
        yield from self.prefix.sliding.values()
        yield from self.prefix.ring.values()
