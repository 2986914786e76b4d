"""A block's tails say what looking at each of them does, whatever came, went and changed before."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from modelserve_worker.scheduling.prefix.block_tails import BlockTails
from modelserve_worker.scheduling.prefix.tails import Block, Tail
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

    def tail(self) -> Tail[int]:
        tokens, marks = self.draw()
        end = START + len(tokens)
        lowest, first = self.random.randint(START - 2, end), START - PAGE
        before = np.full(PAGE, 1, dtype=np.int32)
        self.number += 1
        return Tail(
            self.block, end, lowest, first, np.concatenate((before, tokens)), None, {}, "", None, 0, junction=False,
            superseded=self.random.random() < 0.5, followers=self.random.choice([0, 0, 1]), marks=marks,
            number=self.number,
        )  # fmt: skip


def expected(
    tails: list[Tail[int]], tokens: np.ndarray, marks: tuple[SpanMark, ...], most: int
) -> tuple[int, Tail[int]] | None:
    def reach(tail: Tail[int]) -> int:
        return min(tail.reach(tokens, START, marks), most)

    able = [tail for tail in tails if reach(tail) >= tail.lowest]
    ranked = sorted(able, key=lambda tail: (-reach(tail), tail.superseded and not tail.followers, tail.number))
    return (reach(ranked[0]), ranked[0]) if ranked else None


def behind(marks: tuple[SpanMark, ...]) -> list[SpanMark]:
    return [mark for mark in marks if mark.end > START]


@pytest.mark.parametrize("seed", range(4))
def test_what_serves_a_request_is_what_looking_at_each_finds(seed: int) -> None:
    texts, tails, block = Texts(seed), list[Tail[int]](), BlockTails[Tail[int]](START)
    random, found = texts.random, 0
    for _ in range(500):
        choice = random.random()
        if choice < 0.5 or not tails:
            tails.append(texts.tail())
            block.add(tails[-1])
        elif choice < 0.8:
            block.remove(tails.pop(random.randrange(len(tails))))
        else:
            tail = random.choice(tails)
            tail.superseded, tail.followers = not tail.superseded, random.choice([0, 1])
            block.update(tail)
        assert len(block) == len(tails)
        tokens, marks = texts.draw()
        most = START + len(tokens) - random.choice([0, 0, 1])
        hit = block.find(tokens[: max(0, most - START)], marks, most)
        assert hit == expected(tails, tokens[: max(0, most - START)], marks, most)
        found += hit is not None
        if most == START + len(tokens):
            same = [tail for tail in tails if tail.end == most and tail.reach(tokens, START, marks) == most]
            assert [*block.ending(tokens, marks)] == [tail for tail in same if behind(tail.marks) == behind(marks)]
    assert found > 200


def test_nothing_is_left_when_all_have_gone() -> None:
    texts, block = Texts(9), BlockTails[Tail[int]](START)
    tails = [texts.tail() for _ in range(60)]
    for tail in tails:
        block.add(tail)
    for tail in tails:
        block.remove(tail)
    assert not block
    assert not block._trees
    assert not block._ends
