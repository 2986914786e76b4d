"""Every exercise has the right answer, the same one each time, at the distance that was asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from modelserve_tools.evaluation import words
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.facts import CAPITALS, UNITS
from modelserve_tools.evaluation.short_skills import SHORT_SKILLS
from modelserve_tools.evaluation.skills import exercise
from modelserve_tools.evaluation.tool_skills import NO_TOOL


def _sample(skill: str, count: int = 300) -> list[Exercise]:
    return [exercise(skill, seed=3, index=index) for index in range(count)]


def _asked(exercise: Exercise) -> str:
    return str(exercise.messages[-1]["content"])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_same_arguments_give_the_same_exercise_in_every_process() -> None:
    code = """
from modelserve_tools.evaluation.skills import exercise
print([exercise(s, seed=7, index=i) for s in ("chat", "tool_call", "json") for i in range(20)])
print([exercise(s, seed=7, index=1, distance=300) for s in ("recall", "needle")])
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize("skill", SHORT_SKILLS)
def test_exercises_of_a_skill_differ_and_bear_its_name(skill: str) -> None:
    sample = _sample(skill, 100)
    assert {item.skill for item in sample} == {skill}
    assert len({repr(item) for item in sample}) > 60
    assert sample[0] != exercise(skill, seed=4, index=0)
    assert all(item.thinking == bool(item.answer.reasoning) for item in sample)
    assert all(bool(item.answer.content) != bool(item.answer.tool_calls) for item in sample)


def test_unknown_skills_and_misplaced_distances_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no skill 'poetry'; there are chat, .*needle"):
        exercise("poetry", seed=0, index=0)
    with pytest.raises(ValueError, match="'recall' needs a distance"):
        exercise("recall", seed=0, index=0)
    with pytest.raises(ValueError, match="'chat' has no distance, but distance=5"):
        exercise("chat", seed=0, index=0, distance=5)
    with pytest.raises(ValueError, match="distance=-1 tokens is negative"):
        exercise("needle", seed=0, index=0, distance=-1)


def test_keys_values_and_prose_share_no_word() -> None:
    prose = (words.PEOPLE, words.PLACES, words.THINGS, words.MOVES, words.DEEDS, words.MANNERS, words.TIMES)
    lists = (words.ADJECTIVES, words.NOUNS, words.VALUES, *prose)
    assert all(len(set(one)) == len(one) for one in lists)
    assert [set(one) & set(other) for one, other in combinations(lists, 2) if set(one) & set(other)] == []
    assert set(words.SORTABLE_WORDS) < set(words.VALUES)


def test_a_lookback_is_found_by_its_place_from_the_end_only() -> None:
    """The answer begins 250 words before the signal's end, at no fixed place from its start, and is no constant."""
    starts, answers = set(), []
    for item in _sample("lookback"):
        signal = re.fullmatch(r"Notes: ((?:on |off )+(?:on|off))\. Which 8 words are 250 before this\?", _asked(item))
        assert signal, _asked(item)
        heard = signal[1].split()
        starts.add(len(heard) - 250)
        assert item.answer.content.split() == heard[len(heard) - 250 : len(heard) - 242]
        answers.append(item.answer.content)
    assert starts == set(range(41))
    assert len(set(answers)) > 150  # of 256
    assert max(Counter(" ".join(answers).split()).values()) < 0.55 * 8 * len(answers)


def test_arithmetic_is_right_and_stays_below_100() -> None:
    for item in _sample("arithmetic"):
        asked, result = _asked(item), int(item.answer.content)
        a, b = _numbers(asked)
        expected = a + b if "+" in asked or "Add" in asked else b - a if "from" in asked else a - b
        assert result == expected
        assert max(a, b, result) <= 99
        assert min(a, b, result) >= 0


def test_sorted_words_are_the_same_words_in_order() -> None:
    sizes = Counter()
    for item in _sample("sorting"):
        given, answer = _asked(item).split(": ")[1].split(), item.answer.content.split()
        assert answer == sorted(set(given))
        sizes[len(answer)] += 1
    assert set(sizes) == {2, 3, 4, 5, 6}


def test_copies_are_exact() -> None:
    sizes = [len(item.answer.content.split()) for item in _sample("copying")]
    assert (min(sizes), max(sizes)) == (3, 24)
    assert all(_asked(item).split(": ")[1] == item.answer.content for item in _sample("copying"))


def test_facts_have_one_answer_each() -> None:
    assert len(CAPITALS) == len(set(CAPITALS.values())) == 48
    assert len({(small, large) for small, large, _ in UNITS}) == len(UNITS) == 25
    numbers = {(small, large): str(number) for small, large, number in UNITS}
    for item in _sample("facts"):
        asked = _asked(item)
        if "capital" in asked:
            assert item.answer.content == CAPITALS[asked.split("capital of ")[1][:-1]]
        else:
            small, large = re.fullmatch(r"How many (\w+) (?:are in|make|has) (an? \w+)\?", asked).groups()
            assert item.answer.content == numbers[small, large]


def test_units_agree_with_each_other() -> None:
    """A unit reached over two paths has the same size."""
    size = {(small, large.split()[1]): number for small, large, number in UNITS}
    assert size["seconds", "hour"] == size["seconds", "minute"] * size["minutes", "hour"]
    assert size["hours", "week"] == size["hours", "day"] * size["days", "week"]
    assert size["years", "century"] == size["years", "decade"] * size["decades", "century"]


def test_json_answers_hold_the_fields_in_the_order_given() -> None:
    for item in _sample("json"):
        listed = re.sub(r"^.*? JSON (?:for|from) ", "", _asked(item))[:-1]
        fields = [field.split(" ") for field in listed.split(", ")]
        parsed = json.loads(item.answer.content)
        assert [[name, str(value)] for name, value in parsed.items()] == fields
        assert all(isinstance(value, int) == (name in ("age", "count")) for name, value in parsed.items())
        assert 1 <= len(parsed) <= 4


def test_what_the_user_told_is_what_the_model_says_later() -> None:
    facts = {
        r"(?:My name is|my name is|I am) ([A-Z]\w+)\.": ("my name", "Who am I"),
        r"(?:I live|My home is) in (\w+)\.": ("I live?", "I live.", "my home"),
        r"(?:favorite word is|like the word) (\w+)\.": ("my favorite word", "word do I like"),
    }
    asked_back = 0
    for item in _sample("chat", 600):
        spoken = [*item.messages, {"role": "assistant", "content": item.answer.content}]
        users = [m["content"] for m in spoken if m["role"] == "user"]
        replies = [m["content"] for m in spoken if m["role"] == "assistant"]
        told = " ".join(users)
        for said, reply in zip(users, replies, strict=True):
            for pattern, questions in facts.items():
                if any(question in said for question in questions) and not re.search(pattern, said):
                    assert re.search(pattern, told)[1] in reply
                    asked_back += 1
        manner = spoken[0]["content"] if spoken[0]["role"] == "system" else ""
        assert all((len(reply.split()) == 1) == ("one word" in manner) for reply in replies)
        assert all(("my friend" in reply) == ("my friend" in manner) for reply in replies)
    assert asked_back > 200


def _fits(arguments: dict[str, Any], declaration: dict[str, Any]) -> bool:
    schema = declaration["function"]["parameters"]
    kinds = {"string": str, "integer": int, "boolean": bool}
    return schema["required"] == list(arguments) == list(schema["properties"]) and all(
        type(value) is kinds[schema["properties"][name]["type"]] for name, value in arguments.items()
    )


def test_tool_calls_name_a_declared_tool_and_repeat_the_request() -> None:
    called: Counter[str] = Counter()
    for item in _sample("tool_call"):
        declared = {tool["function"]["name"]: tool for tool in item.tools}
        assert 1 <= len(declared) == len(item.tools) <= 3
        if not item.answer.tool_calls:
            assert item.answer.content == NO_TOOL
            called["none"] += 1
            continue
        (call,) = item.answer.tool_calls
        assert _fits(dict(call.arguments), declared[call.name])
        said = _asked(item)
        assert all(str(value) in said or isinstance(value, bool) for value in call.arguments.values())
        if call.name == "set_light":
            assert call.arguments == {"on": bool(re.search(r"\bon\b", said))}
        called[call.name] += 1
    assert len(called) == 8
    assert 30 < called["none"] < 90


def test_without_a_fitting_tool_there_is_none_declared() -> None:
    """Each request form belongs to one tool: the refused ones ask for a tool that is not in the list."""
    forms = {
        "weather": "get_weather", "time": "get_time", "Add|sum": "add_numbers", "alarm|wake|Wake": "set_alarm",
        'Send|Write "': "send_message", "price": "get_price", "light": "set_light",
    }  # fmt: skip
    for item in _sample("tool_call"):
        declared = {tool["function"]["name"] for tool in item.tools}
        asked = re.sub('".*"', '"', _asked(item))  # not the words of a message
        asked = re.sub(r"of the \w+", "of the", asked)  # nor the thing that is bought
        (needed,) = {tool for form, tool in forms.items() if re.search(rf"\b(?:{form})", asked)}
        assert (needed in declared) == bool(item.answer.tool_calls)


def test_tool_responses_become_sentences_with_the_value() -> None:
    outcomes: Counter[str] = Counter()
    for item in _sample("tool_response"):
        user, assistant, tool = item.messages
        (call,) = assistant["tool_calls"]
        assert call["id"] == tool["tool_call_id"]
        declared = {entry["function"]["name"]: entry for entry in item.tools}
        arguments = json.loads(call["function"]["arguments"])
        assert _fits(arguments, declared[call["function"]["name"]])
        outcomes[tool["content"] if tool["content"] in ("done", "failed") else "value"] += 1
        if tool["content"] in ("done", "failed"):
            assert (" not " in item.answer.content) == (tool["content"] == "failed")
        else:
            assert tool["content"] in re.findall(r"[\w:]+", item.answer.content)
        if call["function"]["name"] == "add_numbers":
            assert int(tool["content"]) == sum(_numbers(user["content"]))
    assert set(outcomes) == {"done", "failed", "value"}


def test_thoughts_lead_to_the_answer() -> None:
    forms: Counter[str] = Counter()
    for item in _sample("thinking"):
        steps = [step for step in item.answer.reasoning.rstrip(".").split(". ") if step]
        if "=" in steps[0]:
            forms["sum"] += 1
            assert len(steps) == 2
            assert [sum(_numbers(step.split("=")[0])) for step in steps] == [_numbers(step)[-1] for step in steps]
            assert int(item.answer.content) == sum(_numbers(_asked(item))) <= 99
            continue
        forms["order"] += 1
        place, words = re.fullmatch(r"Which is word (\d) in order: (.+)", _asked(item)).groups()
        assert item.answer.reasoning.split() == sorted(words.split())
        assert item.answer.content == sorted(words.split())[int(place) - 1]
    assert min(forms.values()) > 100
