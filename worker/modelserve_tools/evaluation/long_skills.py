"""Codes of three words that have to be completed many tokens later.

An item is "amber fox river.": a key of two words, and its value. A word and a punctuation mark are one token each, so
an item has four. The answer to "Complete: amber fox" is the whole code: a model that says the key again has it before
its eyes when it looks for the value.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from modelserve_tools.evaluation.exercise import Answer, Exercise
from modelserve_tools.evaluation.prose import sentences
from modelserve_tools.evaluation.words import ADJECTIVES, NOUNS, VALUES

ITEM_TOKENS = 4
MOST_ITEMS = len(ADJECTIVES) * len(NOUNS)
LONGEST_LEAD = 500
"""Tokens of other items or prose, at most (give or take 2), before the item that is asked for."""

SHORTEST_LESSON = 24
"""Tokens in which one item and the question about it have room."""

_OPENING = "Notes:"  # a fixed start, so that every key follows a space
_OPENING_TOKENS = 2
_BEFORE_TURN = 3  # <|turn>, user, newline
_QUESTION_TOKENS = 4
_AFTER_QUESTION = 10  # <turn|>, newline; <|turn>, model, newline, three words, <turn|>, newline
_TURN_TOKENS = _BEFORE_TURN + _QUESTION_TOKENS + _AFTER_QUESTION


def recall(rng: random.Random, distance: int, *, alike: bool = True) -> Exercise:
    """One item among many, `distance` tokens (give or take 2) of other items before the question.

    Of two or more others, one shares its adjective and one its noun; with `alike` more do. Raises ValueError for a
    distance below 0, and for one that needs more keys than there are: always from 51,198 tokens on, never up to 50,698.
    """
    before = rng.randint(0, min(_checked(distance), LONGEST_LEAD)) // ITEM_TOKENS
    after = round(distance / ITEM_TOKENS)
    asked, *others = _keys(rng, before + 1 + after, alike=alike)
    rng.shuffle(others)
    value = rng.choice(VALUES)
    items = [_item(key, rng.choice(VALUES)) for key in others]
    return _single_turn("recall", [*items[:before], _item(asked, value), *items[before:]], asked, value, distance)


def needle(rng: random.Random, distance: int) -> Exercise:
    """One item in prose, `distance` tokens (give or take 2) of it before the question. Raises ValueError below 0."""
    before = [text for text, _ in sentences(rng, rng.randint(0, min(_checked(distance), LONGEST_LEAD)))]
    after = [text for text, _ in sentences(rng, distance)]
    asked, value = _keys(rng, 1, alike=False)[0], rng.choice(VALUES)
    return _single_turn("needle", [*before, _item(asked, value), *after], asked, value, distance)


LONG_SKILLS: Mapping[str, Callable[[random.Random, int], Exercise]] = MappingProxyType(
    {"recall": recall, "needle": needle}
)


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

    keys = _keys(rng, count, alike=alike)
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
    keys = _keys(rng, items, alike=alike)
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
            line = _item(*item), ITEM_TOKENS, item
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
            {"role": "user", "content": _question([text for text, _, _ in lines], asked)},
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


def _keys(rng: random.Random, count: int, *, alike: bool) -> list[str]:
    """Different keys; the second shares the first's adjective, the third its noun.

    With `alike` all come from a part of the grid of all keys, often a small one: the fewer nouns and adjectives, the
    more keys differ in one word only, and a model has to look at both. Raises ValueError when `count` exceeds
    MOST_ITEMS.
    """
    if count > MOST_ITEMS:
        raise ValueError(f"{count} items need more than the {MOST_ITEMS} keys; ask for fewer tokens")
    nouns, adjectives = len(NOUNS), len(ADJECTIVES)
    if alike:  # at least two of each, and room for `count`; from there on to the whole grid, log-uniform
        nouns = _log_uniform(rng, max(2, math.ceil(count / adjectives)), nouns)
        adjectives = _log_uniform(rng, max(2, math.ceil(count / nouns)), adjectives)
    rows, columns = rng.sample(ADJECTIVES, adjectives), rng.sample(NOUNS, nouns)
    corner = (0, 1, nouns)
    others = rng.sample(range(adjectives * nouns), min(adjectives * nouns, count))
    cells = list(dict.fromkeys((*corner, *others)))[:count]
    return [f"{rows[cell // nouns]} {columns[cell % nouns]}" for cell in cells]


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    """A number from `least` to `most`, small ones more often: each doubling is as likely as the next."""
    return min(most, int(least * (most / least + 1e-9) ** rng.random()))


def _shares(rng: random.Random, count: int, parts: int) -> list[int]:
    """`count` in random parts of at least one."""
    cuts = sorted(rng.sample(range(1, count), parts - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, count], strict=True)]


def _checked(distance: int) -> int:
    if distance < 0:
        raise ValueError(f"distance={distance} tokens is negative; give 0 or more")
    return distance


def _item(key: str, value: str) -> str:
    return f"{key} {value}."


def _question(lines: list[str], asked: str) -> str:
    return " ".join([*([_OPENING, *lines] if lines else []), f"Complete: {asked}"])


def _single_turn(skill: str, lines: list[str], asked: str, value: str, distance: int) -> Exercise:
    message = {"role": "user", "content": _question(lines, asked)}
    return Exercise(skill, (message,), Answer(f"{asked} {value}"), distance=distance)
