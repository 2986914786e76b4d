"""What the demo asks the model: exercises that have one right answer each. A wrong answer ends the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import Any

import openai

from modelserve_tools.evaluation import replies
from modelserve_tools.evaluation.client import chat_body
from modelserve_tools.evaluation.exercise import Answer, Exercise, ToolCall
from modelserve_tools.evaluation.marking import fault
from modelserve_tools.evaluation.replies import Reply
from modelserve_tools.evaluation.skills import exercise
from modelserve_tools.evaluation.styles import styled

SEED = 0
RECALL_DISTANCE = 8_000
REQUEST_TIMEOUT_S = 600.0  # the longest prompt takes 10 s on two idle cores
_SHOWN_WORDS = 40  # of a question; a longer one is abridged


class WrongAnswer(Exception):
    """The model's answer is not the exercise's; the text has both."""


@dataclass(frozen=True)
class Scene:
    """One thing that the demo shows; `note` is said before the model is asked."""

    title: str
    exercise: Exercise
    note: str = ""


@dataclass(frozen=True)
class _Heard:
    """`call_ids` belong to the reply's tool calls, in order."""

    reply: Reply
    call_ids: tuple[str, ...]
    prompt_tokens: int


def scenes() -> tuple[Scene, ...]:
    """The demo's exercises, the same every time: the first of their skill that show what the title says."""
    return (
        Scene("Arithmetic", _first("arithmetic")),
        Scene("A capital", _first("facts", lambda found: "capital" in _question(found))),
        Scene("A tool, chosen from several", _first("tool_response", _answers_with_its_result)),
        Scene("Thinking before the answer", _first("thinking")),
        Scene(
            f"A fact given {RECALL_DISTANCE:,} tokens earlier",
            exercise("recall", seed=SEED, index=0, distance=RECALL_DISTANCE),
            note="(the CPU computes the whole prompt now: ten seconds or more on two cores)",
        ),
    )


def converse(client: openai.OpenAI, model: str, say: Callable[[str], None]) -> None:
    """Ask every scene's question and say it line by line, as it goes on. Raises WrongAnswer and openai.OpenAIError."""
    for scene in scenes():
        say(f"\n  {scene.title}")
        has_tool_result = any(message["role"] == "tool" for message in scene.exercise.messages)
        say(_line("you", _abridged(scene.exercise)))
        if scene.note:
            say(_line("", scene.note))
        final = _call_the_tool(client, model, scene.exercise, say) if has_tool_result else scene.exercise
        heard = _ask(client, model, final)
        if heard.reply.reasoning:
            say(_line("thought", heard.reply.reasoning.strip()))
        say(_line("model", heard.reply.content.strip()))
        say(_line("", f"(right; {heard.prompt_tokens:,} prompt tokens, {heard.reply.milliseconds / 1000:.1f} s)"))


def speak_in_styles(client: openai.OpenAI, model: str, adapters: Sequence[str], say: Callable[[str], None]) -> None:
    """Ask the base and adapters named by their styles the same question. Raises WrongAnswer and openai.OpenAIError."""
    asked = _first("facts", lambda found: "capital" in _question(found))
    say("\n  The same worker, with adapters")
    say(_line("you", _question(asked)))
    for name in (model, *adapters):
        heard = _ask(client, name, asked if name == model else styled(asked, name))
        say(_line("model" if name == model else name, heard.reply.content.strip()))
    say(_line("", f"(right; one base and {len(adapters)} adapters, by the request's `model`)"))


def _call_the_tool(client: openai.OpenAI, model: str, told: Exercise, say: Callable[[str], None]) -> Exercise:
    """Let the model make the calls that `told` has already; what is left to ask once their results are sent back."""
    at = next(place for place, message in enumerate(told.messages) if message.get("tool_calls"))
    functions = [call["function"] for call in told.messages[at]["tool_calls"]]
    calls = tuple(ToolCall(each["name"], json.loads(each["arguments"])) for each in functions)
    say(_line("tools", ", ".join(_signature(tool) for tool in told.tools)))
    heard = _ask(client, model, replace(told, messages=told.messages[:at], answer=Answer(tool_calls=calls)))
    say(_line("model", "calls " + ", ".join(f"{call.name} {call.arguments}" for call in heard.reply.tool_calls)))
    made = [
        {"id": call_id, "type": "function", "function": call.model_dump()}
        for call_id, call in zip(heard.call_ids, heard.reply.tool_calls, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": message["content"]}
        for call_id, message in zip(heard.call_ids, told.messages[at + 1 :], strict=True)
    ]
    for result in results:
        say(_line("tool", result["content"]))
    assistant = {"role": "assistant", "content": heard.reply.content or None, "tool_calls": made}
    return replace(told, messages=(*told.messages[:at], assistant, *results))


def _ask(client: openai.OpenAI, model: str, asked: Exercise) -> _Heard:
    body = chat_body(asked, model=model)
    beyond_openai = {name: body.pop(name) for name in ("chat_template_kwargs",) if name in body}
    started = perf_counter()
    completion = client.chat.completions.create(**body, extra_body=beyond_openai)
    milliseconds = (perf_counter() - started) * 1000
    reply = Reply.of(replies.ChatCompletion.model_validate(completion.model_dump()), milliseconds=milliseconds)
    wrong = fault(asked, reply)
    if wrong is None and reply.reasoning.strip() != asked.answer.reasoning:
        wrong = "the reasoning differs"
    if wrong is not None:
        raise WrongAnswer(
            f"the model's answer to {_abridged(asked)!r} is wrong: {wrong}\n"
            f"  expected: {_told(asked.answer)}\n"
            f"  came:     {_told(reply)}, finish_reason {reply.finish_reason}"
        )
    call_ids = tuple(call.id for call in completion.choices[0].message.tool_calls or ())
    return _Heard(reply, call_ids, completion.usage.prompt_tokens if completion.usage else 0)


def _first(skill: str, shows: Callable[[Exercise], bool] = lambda found: True) -> Exercise:
    return next(found for index in count() if shows(found := exercise(skill, seed=SEED, index=index)))


def _answers_with_its_result(found: Exercise) -> bool:
    return len(found.tools) > 1 and found.messages[-1]["content"] in found.answer.content


def _question(asked: Exercise) -> str:
    """The last thing that the user said."""
    text: str = next(message["content"] for message in reversed(asked.messages) if message["role"] == "user")
    return text


def _abridged(asked: Exercise) -> str:
    """The question; of a long one the beginning, the fact that it asks for, and the end."""
    text = _question(asked)
    if len(text.split()) <= _SHOWN_WORDS:
        return text
    *notes, asks = text.split(". ")
    fact = next(note for note in notes if note.endswith(asked.answer.content))
    return f"{'. [...] '.join(dict.fromkeys((notes[0], fact, notes[-1])))}. {asks}"


def _signature(tool: Any) -> str:
    function = tool["function"]
    return f"{function['name']}({', '.join(function['parameters']['properties'])})"


def _told(answer: Answer | Reply) -> str:
    calls: Sequence[Any] = answer.tool_calls
    parts = {
        "content": answer.content,
        "reasoning": answer.reasoning,
        "tool calls": ", ".join(f"{call.name} {call.arguments}" for call in calls),
    }
    return ", ".join(f"{name} {value!r}" for name, value in parts.items() if value or name == "content")


def _line(who: str, text: str) -> str:
    return f"    {who + ':' if who else '':9}{text}"
