"""Recall and needle at the distance that was asked for; lessons and primers that hold every answer."""

from __future__ import annotations

import random
import re
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterable

import pytest
from lessons import SHORTEST_LESSON, lesson, primer
from rendering import Renderer
from word_tokenizer import build_word_tokenizer

from modelserve_tools.evaluation import words
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.long_skills import (
    ITEM_TOKENS,
    LONG_SKILLS,
    MOST_ITEMS,
)
from modelserve_tools.evaluation.skills import exercise

ITEM = re.compile(r"(?<=[.:] )([a-z]+ [a-z]+) ([a-z]+)\.")  # sentences of prose begin with a capital
ASKED = re.compile(r"Complete: ([a-z]+ [a-z]+)$")


def _text(item: Exercise) -> str:
    return str(item.messages[-1]["content"])


def _key(text: str) -> str:
    """The key that a text asks for at its end."""
    found = ASKED.search(text)
    assert found is not None, text[-80:]
    return found[1]


@pytest.mark.parametrize("skill", LONG_SKILLS)
@pytest.mark.parametrize("distance", [0, 3, 10, 31, 100, 317, 1000, 4000, 16_000])
def test_the_question_comes_at_the_distance_asked_for(skill: str, distance: int) -> None:
    tokenizer = build_word_tokenizer()
    leads = set()
    for index in range(3 if distance > 1000 else 20):
        item = exercise(skill, seed=5, index=index, distance=distance)
        text = _text(item)
        key = _key(text)
        assert item.answer.content.removeprefix(f"{key} ") in words.VALUES
        assert text.count(f" {key} ") == 1
        lead, gap = text.removesuffix(f" Complete: {key}").split(f" {item.answer.content}.")
        assert item.distance == distance
        assert abs(len(tokenizer.encode(gap, add_special_tokens=False)) - distance) <= 2
        leads.add(len(tokenizer.encode(lead, add_special_tokens=False)) - 2)  # without "Notes:"
    assert max(leads) <= min(distance, 500) + 2
    assert len(leads) > 1 or distance < 10


def test_the_asked_key_has_neighbours_that_share_a_word() -> None:
    for index in range(50):
        text = _text(exercise("recall", seed=6, index=index, distance=30))
        adjective, noun = _key(text).split()
        keys = [key.split() for key, _ in ITEM.findall(text)]
        assert len({tuple(key) for key in keys}) == len(keys)
        assert sum(key[0] == adjective for key in keys) >= 2
        assert sum(key[1] == noun for key in keys) >= 2


def test_keys_come_from_small_parts_of_the_grid_and_from_large_ones() -> None:
    """Few nouns are many keys that differ in the adjective only, and the other way round."""
    nouns: list[int] = []
    adjectives: list[int] = []
    for index in range(60):
        keys = [key.split() for key, _ in ITEM.findall(_text(exercise("recall", seed=6, index=index, distance=400)))]
        adjectives.append(len({adjective for adjective, _ in keys}))
        nouns.append(len({noun for _, noun in keys}))
    assert min(nouns) < 10 < 60 < max(nouns)
    assert min(adjectives) < 10 < 50 < max(adjectives)


def test_what_needs_too_many_keys_or_has_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="need more than the 12800 keys"):
        exercise("recall", seed=0, index=0, distance=51_198)
    with pytest.raises(ValueError, match=f"words=23 is too short for a lesson; give at least {SHORTEST_LESSON}"):
        lesson(random.Random(0), words=23)
    with pytest.raises(ValueError, match="items=0, but a primer asks for one of its items; give at least 1"):
        primer(random.Random(0), words=40, items=0)


def test_there_are_keys_for_fifty_thousand_tokens() -> None:
    assert MOST_ITEMS == len(words.ADJECTIVES) * len(words.NOUNS) == 12_800
    for index in range(5):
        keys = [key for key, _ in ITEM.findall(_text(exercise("recall", seed=6, index=index, distance=50_698)))]
        assert MOST_ITEMS - 125 <= len(set(keys)) == len(keys)


def test_a_needle_is_the_only_item() -> None:
    for distance in (10, 400):
        text = _text(exercise("needle", seed=6, index=0, distance=distance))
        assert len(ITEM.findall(text)) == 1
        assert len(re.findall(r"[.?]", text)) > distance / 10


def _turns(item: Exercise) -> Iterable[tuple[str, str]]:
    spoken = [message["content"] for message in item.messages] + [item.answer.content]
    return zip(spoken[::2], spoken[1::2], strict=True)


@pytest.mark.parametrize("length", [24, 50, 64, 100, 192, 256, 1000, 4000, 16_000])
def test_every_question_of_a_lesson_has_its_answer_before(length: int) -> None:
    for index in range(4 if length > 1000 else 60):
        known: dict[str, str] = {}
        asked = []
        item = lesson(random.Random(f"training {length} {index}"), words=length)
        assert (item.skill, item.distance) == ("lesson", None)
        for text, answer in _turns(item):
            new = ITEM.findall(text)
            assert len(known | dict(new)) == len(known) + len(new)
            known |= dict(new)
            asked.append(_key(text))
            assert f"{asked[-1]} {known[asked[-1]]}" == answer
        assert len(set(asked)) == len(asked)


def test_lessons_have_the_length_and_the_questions_asked_for() -> None:
    """A newline after the last turn's mark included. Prose has what it was given, give or take 2, in each turn."""
    renderer = Renderer(build_word_tokenizer(), variant="e4b")
    for length, fewest, most in ((24, 1, 1), (192, 8, 8), (1024, 21, 42), (16_000, 64, 256)):
        for index in range(6):
            item = lesson(random.Random(f"training {index}"), words=length)
            turns = list(_turns(item))
            openings = sum(text.startswith("Notes: ") for text, _ in turns)
            assert openings in (1, len(turns))
            assert abs(len(renderer.render(item).token_ids) + 1 - length) <= 3 * openings + 1
            assert fewest <= len(turns) <= most


def test_lessons_come_in_every_form_with_distances_over_the_whole_text() -> None:
    forms: Counter[tuple[str, str]] = Counter()
    gaps: dict[tuple[str, str], list[int]] = {}
    for index in range(60):
        turns = list(_turns(lesson(random.Random(f"training {index}"), words=8000)))
        text = "".join(f"{question} " for question, _ in turns)
        form = "prose" if " The " in text else "items", "turns" if "Notes" in turns[1][0] else "block"
        forms[form] += 1
        places = [match.start() for match in re.finditer(r"\w+|[.:]", text)]
        for question, _ in turns:
            key = _key(question)
            told, asked = text.index(f" {key} "), text.index(f"Complete: {key} ")
            gaps.setdefault(form, []).append(bisect(places, asked) - bisect(places, told) - ITEM_TOKENS)
    assert len(forms) == 4
    assert forms["prose", "block"] + forms["prose", "turns"] < 30 < 60 - forms["items", "block"]
    for form, found in gaps.items():
        shares = [
            sum(low <= gap < high for gap in found) / len(found) for low, high in ((0, 300), (300, 2000), (2000, 8000))
        ]
        assert min(shares) > 0.02, (form, shares)


def test_a_primer_asks_for_one_of_its_items() -> None:
    tokenizer = build_word_tokenizer()
    places = set()
    for index, items in enumerate([1, 2, 3, 10] * 10):
        item = primer(random.Random(f"training {index}"), words=150, items=items)
        ((text, answer),) = _turns(item)
        known, key = dict(ITEM.findall(text)), _key(text)
        assert (item.skill, item.distance) == ("primer", None)
        assert len(known) == len(ITEM.findall(text)) == items
        assert f"{key} {known[key]}" == answer
        notes = text.removeprefix("Notes:").removesuffix(f" Complete: {key}")
        assert abs(len(tokenizer.encode(notes, add_special_tokens=False)) - 150) <= 2
        assert notes.count(".") > items
        if items == 10:
            places.add(list(known).index(key))
    assert len(places) > 3


def test_a_primer_without_room_for_prose_has_its_items() -> None:
    (message,) = primer(random.Random(0), words=10, items=5).messages
    assert len(ITEM.findall(message["content"])) == message["content"].count(".") == 5


def test_a_long_lesson_is_made_in_milliseconds() -> None:
    seconds = []
    for index in range(10):
        start = time.perf_counter()
        lesson(random.Random(index), words=16_000)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.030
