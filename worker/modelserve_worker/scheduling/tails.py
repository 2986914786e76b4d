"""What a prefix cache remembers: pages of tokens by their hashes, and the tails at which a request may resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from modelserve_worker.batch import Int32Array
from modelserve_worker.scheduling.arena import Page


class Block:
    """The tokens of one global page behind those of `parent`; the root of a chain has none.

    `page` is kept while the block is in use: while a tail ends in it, or a block behind it is in use. Afterwards the
    block is only known, by its hash, until it is the oldest of too many.
    """

    __slots__ = ("children", "depth", "digest", "page", "parent", "tails", "uses")

    def __init__(self, digest: bytes, parent: Block | None) -> None:
        self.digest = digest
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages up to here
        self.page: Page | None = None
        self.uses = 0
        self.children = 0  # known ones
        self.tails: list[Tail] = []  # that may serve a request which has this block and not the next


@dataclass(slots=True, eq=False)
class Tail:
    """Rows of sliding layers before `end`, which make the global pages before it worth something: a request with the
    same tokens resumes at any position from `lowest` to `end`.
    """

    block: Block  # of its last full page
    end: int
    lowest: int
    first: int  # position of `tokens[0]`, where a page begins
    tokens: Int32Array  # [end - first]
    partial: Page | None  # the global page behind the full ones
    sliding: dict[int, Page]  # by logical page, down to the window of `lowest`
    client: str  # whose bytes they are
    previous: Tail | None  # the one before it on the way of the same request
    joined: int  # the last position that its tokens have in common with `previous`
    junction: bool  # more than one history goes on from here
    bytes: int = 0  # what it costs, beyond `previous`
    priority: float = 0.0
    used_at: float = 0.0  # the cache's clock then
    superseded: bool = False  # the same session has a later one
    live: bool = True
    followers: int = 0  # requests that resumed here
    attached: list[Block] = field(default_factory=list)

    @property
    def base(self) -> int:
        """Where a request would resume without it."""
        previous = self.previous
        while previous is not None and not previous.live:
            previous = previous.previous
        self.previous = previous
        return 0 if previous is None else min(previous.end, self.joined)

    def reach(self, tokens: Int32Array, start: int) -> int:
        """Last position up to which its tokens are those of a request, whose `tokens` begin at `start`; both agree
        before that."""
        own = self.tokens[start - self.first :]
        length = min(len(own), len(tokens))
        differ = np.flatnonzero(own[:length] != tokens[:length])
        return start + (int(differ[0]) if len(differ) else length)


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a request resumes, and with which pages."""

    position: int
    tail: Tail
    global_pages: list[Page]  # of the rows [0, position)

    @property
    def sliding_pages(self) -> Mapping[int, Page]:
        return self.tail.sliding
