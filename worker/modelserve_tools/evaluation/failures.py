"""Wrong answers as JSON lines: what was asked last, what was expected, what came."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from modelserve_tools.evaluation.measurement import Failure

PROMPT_CHARACTERS = 200


def failure_line(failure: Failure, *, seed: int) -> str:
    """One line with its line end. `prompt_end` has the last 200 characters of the messages' text."""
    answer, reply = failure.exercise.answer, failure.reply
    prompt = "\n".join(str(message.get("content") or "") for message in failure.exercise.messages)
    expected: dict[str, Any] = {
        "content": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in answer.tool_calls],
    }
    got = {
        "content": reply.content,
        "reasoning": reply.reasoning,
        "tool_calls": [call.model_dump() for call in reply.tool_calls],
        "finish_reason": reply.finish_reason,
    }
    line = asdict(failure.cell) | {
        "seed": seed,
        "index": failure.index,
        "reason": failure.reason,
        "prompt_end": prompt[-PROMPT_CHARACTERS:],
        "expected": expected,
        "got": got,
    }
    line.pop("n")
    return json.dumps(line) + "\n"
