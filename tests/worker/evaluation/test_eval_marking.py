"""What counts as the right answer."""

from __future__ import annotations

import pytest

from modelserve_tools.evaluation.exercise import Answer, Exercise, ToolCall
from modelserve_tools.evaluation.marking import fault
from modelserve_tools.evaluation.replies import CalledFunction, Reply


def _reply(
    content: str = "", *, reasoning: str = "", calls: tuple[tuple[str, str], ...] = (), end: str = "stop"
) -> Reply:
    called = tuple(CalledFunction(name=name, arguments=arguments) for name, arguments in calls)
    return Reply(content, reasoning, called, end, milliseconds=1.0)


def _exercise(answer: Answer, *, thinking: bool = False) -> Exercise:
    return Exercise("x", ({"role": "user", "content": "?"},), answer, thinking=thinking)


@pytest.mark.parametrize(
    ("content", "same"),
    [("plum", True), (" plum\n", True), ("plums", False), ("Plum", False), ("plum .", False), ("", False)],
)
def test_text_is_equal_but_for_white_space_around_it(content: str, same: bool) -> None:
    assert fault(_exercise(Answer("plum")), _reply(content)) == (None if same else "the content differs")


def test_an_answer_that_does_not_end_is_wrong() -> None:
    reply = _reply("plum", end="length")
    assert fault(_exercise(Answer("plum")), reply) == "the answer did not end within max_tokens"


@pytest.mark.parametrize(
    ("content", "same"),
    [
        ('{"a": 1, "b": "x"}', True),
        ('{"b":"x",\n"a":1}', True),
        ('Here: {"a": 1, "b": "x"}', False),
        ('```json\n{"a": 1, "b": "x"}\n```', False),
        ('{"a": 1, "b": "x"', False),
        ('{"a": true, "b": "x"}', False),
        ('{"a": 1.0, "b": "x"}', False),
        ('{"a": 2, "a": 1, "b": "x"}', False),
        ('{"a": NaN, "b": "x"}', False),
        ('{"a": ' + "[" * 100_000, False),
    ],
)
def test_json_is_equal_by_value_with_no_text_around_it(content: str, same: bool) -> None:
    exercise = _exercise(Answer('{"a": 1, "b": "x"}'))
    assert fault(exercise, _reply(content)) == (None if same else "the content differs")


def test_numbers_are_text_unless_an_object_or_array_is_expected() -> None:
    assert fault(_exercise(Answer("7")), _reply("07")) == "the content differs"
    assert fault(_exercise(Answer("[7]")), _reply("[ 7 ]")) is None


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (_reply(calls=(("add", '{"b": 2, "a": 1}'),), end="tool_calls"), None),
        (_reply(calls=(("add", '{"b": 2, "a": 1}'),)), "finish_reason is 'stop', not 'tool_calls'"),
        (_reply(calls=(("add", '{"a": 1}'),), end="tool_calls"), "the tool calls differ"),
        (_reply(calls=(("add", '{"a": "1", "b": 2}'),), end="tool_calls"), "the tool calls differ"),
        (_reply(calls=(("sum", '{"a": 1, "b": 2}'),), end="tool_calls"), "the tool calls differ"),
        (_reply(calls=(("add", '{"a": 1, "b": 2'),), end="tool_calls"), "the tool calls differ"),
        (_reply(calls=(("add", '{"a": 1, "b": 2}'),) * 2, end="tool_calls"), "the tool calls differ"),
        (_reply("3"), "the tool calls differ"),
        (_reply("Well:", calls=(("add", '{"a": 1, "b": 2}'),), end="tool_calls"), "the content differs"),
    ],
)
def test_tool_calls_are_equal_by_name_and_arguments(reply: Reply, expected: str | None) -> None:
    answer = Answer(tool_calls=(ToolCall("add", {"a": 1, "b": 2}),))
    assert fault(_exercise(answer), reply) == expected


def test_a_call_that_nobody_asked_for_is_wrong() -> None:
    reply = _reply("plum", calls=(("add", "{}"),), end="tool_calls")
    assert fault(_exercise(Answer("plum")), reply) == "the tool calls differ"


def test_thinking_needs_a_thought_outside_the_content() -> None:
    exercise = _exercise(Answer("9", reasoning="4 + 5 = 9."), thinking=True)
    assert fault(exercise, _reply("9", reasoning="four and five")) is None
    assert fault(exercise, _reply("9", reasoning=" ")) == "the reply has no reasoning"
    assert fault(exercise, _reply("4 + 5 = 9. 9", reasoning="4 + 5 = 9.")) == "the content differs"
