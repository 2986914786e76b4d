"""Whether a reply is the one right answer."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.replies import Reply


def fault(exercise: Exercise, reply: Reply) -> str | None:
    """What is wrong with the reply, None when it is right.

    Text is compared after stripping white space at its ends. An answer that is a JSON object or array is compared by
    value, with no text around it. Tool calls are compared by name and by the value of their arguments, in order.
    """
    expected = exercise.answer
    if reply.finish_reason == "length":
        return "the answer did not end within max_tokens"
    called = [(call.name, _canonical(call.arguments)) for call in reply.tool_calls]
    if called != [(call.name, json.dumps(dict(call.arguments), sort_keys=True)) for call in expected.tool_calls]:
        return "the tool calls differ"
    if called and reply.finish_reason != "tool_calls":
        return f"finish_reason is {reply.finish_reason!r}, not 'tool_calls'"
    if not _same_content(expected.content.strip(), reply.content.strip()):
        return "the content differs"
    if exercise.thinking and not reply.reasoning.strip():
        return "the reply has no reasoning"
    return None


def _same_content(expected: str, got: str) -> bool:
    if expected == got:
        return True
    return expected[:1] in ("{", "[") and (value := _canonical(expected)) is not None and value == _canonical(got)


def _canonical(text: str) -> str | None:
    """One spelling for every JSON text of the same value, None when it is not JSON. 1, 1.0 and true stay different."""
    try:
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value, sort_keys=True)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
