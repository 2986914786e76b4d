"""Conversations that a model learns to complete codes from (`long_skills` has the exercises that ask it for them)."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from modelserve_tools.evaluation.exercise import Answer, Exercise
from modelserve_tools.evaluation.long_skills import ITEM_TOKENS, MOST_ITEMS, item_text, keys_of, question
from modelserve_tools.evaluation.prose import sentences
from modelserve_tools.evaluation.words import VALUES

SHORTEST_LESSON = 24
"""Tokens in which one item and the question about it have room."""

_OPENING_TOKENS = 2
_BEFORE_TURN = 3  # <|turn>, user, newline
_QUESTION_TOKENS = 4
_AFTER_QUESTION = 10  # <turn|>, newline; <|turn>, model, newline, three words, <turn|>, newline
_TURN_TOKENS = _BEFORE_TURN + _QUESTION_TOKENS + _AFTER_QUESTION


def lesson(rng: random.Random, *, words: int, alike: bool = True) -> Exercise:
    """A conversation of about `words` tokens, turn marks included, in which each turn asks for one earlier item.

    A quarter hides a few items in prose; the rest are items only, and shorter than `words` where that takes more than
    MOST_ITEMS. Half bring everything in the first turn, half bring something new in every turn. Nothing is asked for
    twice. Distances are log-uniform from the newest item to the oldest. Raises ValueError when `words` is below
    SHORTEST_LESSON.
    """
    if words < SHORTEST_LESSON:
        raise ValueError(f"words={words} is too short for a lesson; give at least {SHORTEST_LESSON}")
    in_prose, in_one_block = rng.random() < 0.25, rng.random() < 0.5
    densest = words // SHORTEST_LESSON
    dense = densest if in_one_block and not in_prose else densest // 2  # else few items would be left to ask for
    questions = max(min(densest, 8), min(dense, rng.randint(64, 256)))
    openings = 1 if in_one_block else questions
    room = words - questions * _TURN_TOKENS - openings * _OPENING_TOKENS
    count = min(room // ITEM_TOKENS, 2 * questions if in_prose else MOST_ITEMS)
    filler = room - count * ITEM_TOKENS if in_prose else 0

    keys = keys_of(rng, count, alike=alike)
    rng.shuffle(keys)
    shares = [count] if in_one_block else _shares(rng, count, questions)
    shares += [0] * (questions - len(shares))
    ledger = _Ledger(rng)
    messages: list[dict[str, Any]] = []
    for share in shares:
        prose = list(sentences(rng, filler // openings)) if share else []
        new, keys = keys[:share], keys[share:]
        messages += ledger.turn(new, prose)
    return Exercise("lesson", tuple(messages[:-1]), Answer(messages[-1]["content"]))


def primer(rng: random.Random, *, words: int, items: int, alike: bool = True) -> Exercise:
    """An easier lesson: `items` items in prose, about `words` tokens in all, and a question about one of the items.

    There is no prose when the items alone take `words` tokens or more. The fewer the items, the sooner a model finds
    that the key decides which value is right. With a question about each it would learn to say what was not said yet
    instead. Raises ValueError when `items` is not in 1..MOST_ITEMS.
    """
    if items < 1:
        raise ValueError(f"items={items}, but a primer asks for one of its items; give at least 1")
    keys = keys_of(rng, items, alike=alike)
    rng.shuffle(keys)
    messages = _Ledger(rng).turn(keys, list(sentences(rng, words - items * ITEM_TOKENS)))
    return Exercise("primer", tuple(messages[:-1]), Answer(messages[-1]["content"]))


class _Ledger:
    """Where each item that was not asked for yet ends, in tokens from the start of the conversation."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._position = 1  # <bos>
        self._ends: list[int] = []
        self._items: list[tuple[str, str]] = []

    def turn(self, keys: Iterable[str], prose: list[tuple[str, int]]) -> list[dict[str, Any]]:
        """A user's message with new items, scattered in the prose, and a question; and the answer to it."""
        lines: list[tuple[str, int, tuple[str, str] | None]] = [(text, tokens, None) for text, tokens in prose]
        for key in keys:
            item = key, self._rng.choice(VALUES)
            line = item_text(*item), ITEM_TOKENS, item
            lines.insert(self._rng.randint(0, len(lines)) if prose else len(lines), line)
        self._position += _BEFORE_TURN + (_OPENING_TOKENS if lines else 0)
        for _, tokens, held in lines:
            self._position += tokens
            if held is not None:
                self._ends.append(self._position)
                self._items.append(held)
        asked, value = self._draw()
        self._position += _QUESTION_TOKENS + _AFTER_QUESTION
        return [
            {"role": "user", "content": question([text for text, _, _ in lines], asked)},
            {"role": "assistant", "content": f"{asked} {value}"},
        ]

    def _draw(self) -> tuple[str, str]:
        """Key and value of the item nearest to a log-uniform distance; it is not held any more."""
        newest, oldest = (max(ITEM_TOKENS, self._position - self._ends[index]) for index in (-1, 0))
        target = self._position - math.exp(self._rng.uniform(math.log(newest), math.log(oldest)))
        index = bisect_left(self._ends, target)
        if index == len(self._ends) or (index and target - self._ends[index - 1] < self._ends[index] - target):
            index -= 1
        self._ends.pop(index)
        return self._items.pop(index)


def _shares(rng: random.Random, count: int, parts: int) -> list[int]:
    """`count` in random parts of at least one."""
    cuts = sorted(rng.sample(range(1, count), parts - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, count], strict=True)]
