"""Codes of three words that have to be completed many tokens later.

An item is "amber fox river.": a key of two words, and its value. A word and a punctuation mark are one token each, so
an item has four. The answer to "Complete: amber fox" is the whole code: a model that says the key again has it before
its eyes when it looks for the value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from modelserve_tools.evaluation.exercise import Answer, Exercise
from modelserve_tools.evaluation.prose import sentences
from modelserve_tools.evaluation.words import ADJECTIVES, NOUNS, VALUES

ITEM_TOKENS = 4
MOST_ITEMS = len(ADJECTIVES) * len(NOUNS)
LONGEST_LEAD = 500
"""Tokens of other items or prose, at most (give or take 2), before the item that is asked for."""

_OPENING = "Notes:"  # a fixed start, so that every key follows a space


def recall(rng: random.Random, distance: int, *, alike: bool = True) -> Exercise:
    """One item among many, `distance` tokens (give or take 2) of other items before the question.

    Of two or more others, one shares its adjective and one its noun; with `alike` more do. Raises ValueError for a
    distance below 0, and for one that needs more keys than there are: always from 51,198 tokens on, never up to 50,698.
    """
    before = rng.randint(0, min(_checked(distance), LONGEST_LEAD)) // ITEM_TOKENS
    after = round(distance / ITEM_TOKENS)
    asked, *others = keys_of(rng, before + 1 + after, alike=alike)
    rng.shuffle(others)
    value = rng.choice(VALUES)
    items = [item_text(key, rng.choice(VALUES)) for key in others]
    return _single_turn("recall", [*items[:before], item_text(asked, value), *items[before:]], asked, value, distance)


def needle(rng: random.Random, distance: int) -> Exercise:
    """One item in prose, `distance` tokens (give or take 2) of it before the question. Raises ValueError below 0."""
    before = [text for text, _ in sentences(rng, rng.randint(0, min(_checked(distance), LONGEST_LEAD)))]
    after = [text for text, _ in sentences(rng, distance)]
    asked, value = keys_of(rng, 1, alike=False)[0], rng.choice(VALUES)
    return _single_turn("needle", [*before, item_text(asked, value), *after], asked, value, distance)


LONG_SKILLS: Mapping[str, Callable[[random.Random, int], Exercise]] = MappingProxyType(
    {"recall": recall, "needle": needle}
)


def keys_of(rng: random.Random, count: int, *, alike: bool) -> list[str]:
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


def _checked(distance: int) -> int:
    if distance < 0:
        raise ValueError(f"distance={distance} tokens is negative; give 0 or more")
    return distance


def item_text(key: str, value: str) -> str:
    return f"{key} {value}."


def question(lines: list[str], asked: str) -> str:
    return " ".join([*([_OPENING, *lines] if lines else []), f"Complete: {asked}"])


def _single_turn(skill: str, lines: list[str], asked: str, value: str, distance: int) -> Exercise:
    message = {"role": "user", "content": question(lines, asked)}
    return Exercise(skill, (message,), Answer(f"{asked} {value}"), distance=distance)
