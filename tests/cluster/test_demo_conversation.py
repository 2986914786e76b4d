"""The demo's conversation with a server that knows the answers, and with one that gets one of them wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from demo_conversation import WrongAnswer, converse, scenes
from modelserve_tools.evaluation.exercise import Answer, ToolCall

Change = Callable[[Answer], Answer]


def _answers() -> Iterator[tuple[str, Answer]]:
    """Skill and right answer of each request that the demo makes, in order; a tool's call is asked for first."""
    for scene in scenes():
        exercise = scene.exercise
        for call in [call for message in exercise.messages for call in message.get("tool_calls") or ()]:
            function = call["function"]
            made = ToolCall(function["name"], json.loads(function["arguments"]))
            yield "tool_call", Answer(tool_calls=(made,))
        yield exercise.skill, exercise.answer


def _completion(answer: Answer) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{number}f00",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(answer.tool_calls)
    ]
    message = {"role": "assistant", "content": answer.content or None, "reasoning_content": answer.reasoning or None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": message | ({"tool_calls": calls} if calls else {}),
                "finish_reason": "tool_calls" if calls else "stop",
            }
        ],
        "usage": {"prompt_tokens": 8123, "completion_tokens": 3, "total_tokens": 8126},
    }


def _converse(change: Change = lambda answer: answer, *, skill: str = "") -> tuple[list[str], list[dict[str, Any]]]:
    """What was said and what was asked, when the answer to `skill` is changed."""
    answers, asked, said = _answers(), [], list[str]()

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        now, answer = next(answers)
        return httpx.Response(200, json=_completion(change(answer) if now == skill else answer))

    http: Any = httpx.Client(transport=httpx.MockTransport(respond))  # openai's types know only the newest httpx
    with openai.OpenAI(base_url="http://fake/v1", api_key="none", http_client=http) as client:
        converse(client, "fake", said.append)
    assert next(answers, None) is None, "everything was asked"
    return said, asked


def test_right_answers_are_shown_with_their_questions() -> None:
    said, asked = _converse()
    text = "\n".join(said)
    for skill, answer in _answers():
        assert skill == "tool_call" or f"model:   {answer.content}\n" in text
    assert f"thought: {scenes()[3].exercise.answer.reasoning}\n" in text
    assert text.count("8,123 prompt tokens") == len(scenes())
    assert max(map(len, said)) < 300, "the long prompt is abridged"
    assert all(body["temperature"] == 0 for body in asked)
    assert [body.get("chat_template_kwargs") for body in asked].count({"enable_thinking": True}) == 1


def test_the_tool_result_goes_back_under_the_models_own_call() -> None:
    _, asked = _converse()
    (*before, assistant, result) = asked[3]["messages"]
    assert before == asked[2]["messages"]
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"] == "call_0f00"
    assert result["role"] == "tool"


def test_the_recalled_fact_is_shown_where_it_stands() -> None:
    said, asked = _converse()
    prompt, answer = asked[-1]["messages"][-1]["content"], scenes()[-1].exercise.answer.content
    shown = next(line for line in said if "[...]" in line)
    assert len(prompt.split()) > 6000
    assert f" {answer}. " in shown
    assert shown.endswith(f" Complete: {answer.rsplit(maxsplit=1)[0]}")
    assert all(part.strip() in prompt for part in shown.removeprefix("    you:").split("[...]"))


@pytest.mark.parametrize(
    ("skill", "change", "words"),
    [
        ("arithmetic", lambda answer: replace(answer, content="7 77"), ("the content differs", "'7 77'")),
        ("facts", lambda answer: replace(answer, content=""), ("the content differs", "expected: content 'Warsaw'")),
        ("tool_call", lambda answer: Answer(content="no"), ("the tool calls differ", "came:     content 'no'")),
        ("tool_response", lambda answer: replace(answer, content="It is."), ("the content differs", "'It is.'")),
        ("thinking", lambda answer: replace(answer, reasoning="Hm."), ("the reasoning differs", "'Hm.'")),
        ("thinking", lambda answer: replace(answer, reasoning=""), ("no reasoning",)),
        ("recall", lambda answer: replace(answer, content="nothing"), ("the content differs", "'nothing'")),
    ],
)
def test_a_wrong_answer_ends_the_conversation(skill: str, change: Change, words: tuple[str, ...]) -> None:
    with pytest.raises(WrongAnswer) as raised:
        _converse(change, skill=skill)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
