"""A block's prefixes say what looking at each of them does, whatever came, went and changed before."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from modelserve_worker.scheduling.prefix.block_prefixes import BlockPrefixes
from modelserve_worker.scheduling.prefix.cached_prefix import Block, CachedPrefix
from modelserve_worker.scheduling.prefix.token_chain import SpanMark

START, PAGE = 8, 4


class Texts:
    """Of two tokens, some of them with images."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.number = 0
        self.block: Block[int] = Block(b"", None)

    def draw(self) -> tuple[np.ndarray, tuple[SpanMark, ...]]:
        """Tokens behind START, and the marks of those, one of which may have begun before it."""
        tokens = np.array([self.random.randint(1, 2) for _ in range(self.random.randint(0, 7))], dtype=np.int32)
        marks = []
        for start in self.random.sample(range(START - 2, START + 6), k=self.random.choice([0, 0, 0, 1, 2])):
            if start < START + len(tokens):
                marks.append(
                    SpanMark(start, start + self.random.randint(1, 3), self.random.choice([b"a", b"b"]), False)
                )
        return tokens, tuple(sorted(marks))

    def prefix(self) -> CachedPrefix[int]:
        tokens, marks = self.draw()
        end = START + len(tokens)
        lowest, first = self.random.randint(START - 2, end), START - PAGE
        before = np.full(PAGE, 1, dtype=np.int32)
        self.number += 1
        return CachedPrefix(
            self.block, end, lowest, first, np.concatenate((before, tokens)), None, {}, "", None, 0, junction=False,
            superseded=self.random.random() < 0.5, followers=self.random.choice([0, 0, 1]), marks=marks,
            number=self.number,
        )  # fmt: skip


def expected(
    prefixes: list[CachedPrefix[int]], tokens: np.ndarray, marks: tuple[SpanMark, ...], most: int
) -> tuple[int, CachedPrefix[int]] | None:
    def reach(prefix: CachedPrefix[int]) -> int:
        return min(prefix.reach(tokens, START, marks), most)

    able = [prefix for prefix in prefixes if reach(prefix) >= prefix.lowest]
    ranked = sorted(able, key=lambda each: (-reach(each), each.superseded and not each.followers, each.number))
    return (reach(ranked[0]), ranked[0]) if ranked else None


def behind(marks: tuple[SpanMark, ...]) -> list[SpanMark]:
    return [mark for mark in marks if mark.end > START]


@pytest.mark.parametrize("seed", range(4))
def test_what_serves_a_request_is_what_looking_at_each_finds(seed: int) -> None:
    texts, prefixes, block = Texts(seed), list[CachedPrefix[int]](), BlockPrefixes[CachedPrefix[int]](START)
    random, found = texts.random, 0
    for _ in range(500):
        choice = random.random()
        if choice < 0.5 or not prefixes:
            prefixes.append(texts.prefix())
            block.add(prefixes[-1])
        elif choice < 0.8:
            block.remove(prefixes.pop(random.randrange(len(prefixes))))
        else:
            prefix = random.choice(prefixes)
            prefix.superseded, prefix.followers = not prefix.superseded, random.choice([0, 1])
            block.update(prefix)
        assert len(block) == len(prefixes)
        tokens, marks = texts.draw()
        most = START + len(tokens) - random.choice([0, 0, 1])
        hit = block.find(tokens[: max(0, most - START)], marks, most)
        assert hit == expected(prefixes, tokens[: max(0, most - START)], marks, most)
        found += hit is not None
        if most == START + len(tokens):
            same = [each for each in prefixes if each.end == most and each.reach(tokens, START, marks) == most]
            assert [*block.ending(tokens, marks)] == [each for each in same if behind(each.marks) == behind(marks)]
    assert found > 200


def test_nothing_is_left_when_all_have_gone() -> None:
    texts, block = Texts(9), BlockPrefixes[CachedPrefix[int]](START)
    prefixes = [texts.prefix() for _ in range(60)]
    for prefix in prefixes:
        block.add(prefix)
    for prefix in prefixes:
        block.remove(prefix)
    assert not block
    assert not block._trees
    assert not block._ends
