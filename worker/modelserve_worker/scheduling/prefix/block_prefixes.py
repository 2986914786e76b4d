"""The prefixes that may serve a request which parts from what is known within one block: a tree over their tokens.

Thousands of requests that have a prefix in common, and fewer tokens of their own than a page has, leave their prefixes
in one block. The path of a request through the tree (a radix tree: Morrison, PATRICIA, JACM 1968) ends where it parts
from the last of them, so what a look-up costs grows with the tokens that prefixes have in common, not with their
number.

A prefix serves no position before its `lowest`, which few prefixes of one block have apart: there is a tree for each,
whose prefixes are the answer where the request has come so far.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from modelserve_worker.batch import Int32Array
from modelserve_worker.scheduling.prefix.token_chain import SpanMark

_Text = tuple[bytes, tuple[SpanMark, ...]]  # tokens behind a position, and the spans that have some of them
_Key = tuple[bool, int]  # of prefixes that reach as far: the least is the one to resume at


class Attached(Protocol):
    """What a block sees of a prefix (cached_prefix.py)."""

    first: int
    tokens: Int32Array
    marks: tuple[SpanMark, ...]
    lowest: int
    superseded: bool
    followers: int
    number: int

    def reach(self, tokens: Int32Array, start: int, marks: tuple[SpanMark, ...]) -> int: ...


T = TypeVar("T", bound=Attached)


def elements(tokens: Int32Array, start: int, marks: tuple[SpanMark, ...]) -> Int32Array:
    """What tells texts apart: `tokens` from position `start` on, but where a span begins, or goes on at `start`, a
    number below 0 made of its mark and the token. Equal numbers do not prove equal marks."""
    told = [mark for mark in marks if mark.end > start and max(start, mark.start) < start + len(tokens)]
    if told:
        tokens = tokens.copy()
        for mark in told:
            at = max(start, mark.start) - start
            tokens[at] = -1 - (hash((mark.words, int(tokens[at]))) & 0x7FFF_FFFE)
    return tokens


class _Node(Generic[T]):
    """Prefixes whose elements begin with those on the path here: `label` [n], behind those of `parent`."""

    __slots__ = ("children", "label", "parent", "prefixes")

    def __init__(self, label: Int32Array, parent: _Node[T] | None) -> None:
        self.label = label
        self.parent = parent
        self.children: dict[int, _Node[T]] = {}  # by the first element of their labels
        self.prefixes: list[tuple[_Key, T]] = []  # sorted, those of its children included

    def upwards(self) -> Iterator[_Node[T]]:
        node: _Node[T] | None = self
        while node is not None:
            yield node
            node = node.parent


class BlockPrefixes(Generic[T]):
    """Of the block whose first token has position `start`."""

    __slots__ = ("_ends", "_places", "_trees", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self._trees: dict[int, _Node[T]] = {}  # by `lowest`, from `start` on
        self._places: dict[T, tuple[_Key, _Node[T]]] = {}
        self._ends: dict[_Text, list[T]] = {}  # by what is behind `start`

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._places

    def add(self, prefix: T) -> None:
        least, tokens = prefix.lowest - self.start, prefix.tokens[self.start - prefix.first :]
        self._ends.setdefault(self._text(tokens, prefix.marks), []).append(prefix)
        node = self._trees.get(least)
        if node is None:
            node = self._trees[least] = _Node(np.zeros(0, dtype=np.int32), None)
        rest = elements(tokens, self.start, prefix.marks)
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                child = node.children[int(rest[0])] = _Node(rest.copy(), node)
                node = child
                break
            common = _common(child.label, rest)
            node = child if common == len(child.label) else _split(child, common)
            rest = rest[common:]
        self._put(prefix, node)

    def remove(self, prefix: T) -> None:
        text = self._text(prefix.tokens[self.start - prefix.first :], prefix.marks)
        self._ends[text].remove(prefix)
        if not self._ends[text]:
            del self._ends[text]
        node = self._take(prefix)
        while not node.prefixes and node.parent is not None:
            del node.parent.children[int(node.label[0])]
            node = node.parent
        if not node.prefixes:
            del self._trees[prefix.lowest - self.start]
        elif len(node.children) == 1 and node.parent is not None:
            (child,) = node.children.values()
            if len(child.prefixes) == len(node.prefixes):  # nothing ends between them
                child.label = np.concatenate((node.label, child.label))
                child.parent = node.parent
                node.parent.children[int(node.label[0])] = child

    def update(self, prefix: T) -> None:
        """Whether it is superseded, or who resumed there, may have changed."""
        if (place := self._places.get(prefix)) is not None and place[0] != _key(prefix):
            self._put(prefix, self._take(prefix))

    def find(self, tokens: Int32Array, marks: tuple[SpanMark, ...], most: int) -> tuple[int, T] | None:
        """The prefix that serves the furthest position, at most `most`, of a request with these tokens behind `start`,
        and that position. Among those that reach as far one that histories go on from, the oldest; None where there is
        none."""
        best: tuple[int, T] | None = None
        best_key: _Key = (True, 0)
        wanted = elements(tokens, self.start, marks)
        for least, tree in self._trees.items():
            common, node = _follow(tree, wanted)
            key, prefix = node.prefixes[0]
            if marks or prefix.marks:
                common = min(common, prefix.reach(tokens, self.start, marks) - self.start)
            position = min(self.start + common, most)
            further = best is None or position > best[0] or (position == best[0] and key < best_key)
            if position >= self.start + least and further:
                best, best_key = (position, prefix), key
        return best

    def ending(self, tokens: Int32Array, marks: tuple[SpanMark, ...]) -> Iterable[T]:
        """Prefixes that end where these tokens behind `start` do, and have the same ones; the oldest first."""
        return self._ends.get(self._text(tokens, marks), ())

    def _text(self, tokens: Int32Array, marks: tuple[SpanMark, ...]) -> _Text:
        return tokens.tobytes(), tuple(mark for mark in marks if mark.end > self.start)

    def _put(self, prefix: T, node: _Node[T]) -> None:
        key = _key(prefix)
        self._places[prefix] = key, node
        for each in node.upwards():
            insort(each.prefixes, (key, prefix))

    def _take(self, prefix: T) -> _Node[T]:
        key, node = self._places.pop(prefix)
        for each in node.upwards():
            del each.prefixes[bisect_left(each.prefixes, (key,))]
        return node


def _key(prefix: Attached) -> _Key:
    return prefix.superseded and not prefix.followers, prefix.number


def _common(one: Int32Array, other: Int32Array) -> int:
    """How many elements both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _split(node: _Node[T], at: int) -> _Node[T]:
    """A node in the middle of the label of another, which is its only child."""
    assert node.parent is not None
    upper = _Node(node.label[:at], node.parent)
    upper.prefixes = list(node.prefixes)
    node.parent.children[int(node.label[0])] = upper
    node.label, node.parent = node.label[at:], upper
    upper.children[int(node.label[0])] = node
    return upper


def _follow(node: _Node[T], wanted: Int32Array) -> tuple[int, _Node[T]]:
    """How far the prefixes that have most in common with these elements agree with them, and their node."""
    common = 0
    while common < len(wanted):
        child = node.children.get(int(wanted[common]))
        if child is None:
            break
        node, more = child, _common(child.label, wanted[common:])
        common += more
        if more < len(child.label):
            break
    return common, node
