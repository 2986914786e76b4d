"""Requests that need a declared tool, and answers made from what the tool returned."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve_tools.evaluation.exercise import Answer, Exercise, ToolCall
from modelserve_tools.evaluation.facts import CITIES
from modelserve_tools.evaluation.words import NAMES, SKIES, VALUES

NO_TOOL = "I have no tool for that."


@dataclass(frozen=True)
class _Task:
    """What the user asks, the arguments of the call, what the tool returns, and the answer made from it."""

    request: str
    arguments: Mapping[str, Any]
    result: str
    reply: str


@dataclass(frozen=True)
class _Tool:
    """`types` are the parameters, in order, and their JSON types; all are required."""

    name: str
    description: str
    types: Mapping[str, str]
    task: Callable[[random.Random], _Task]

    def declaration(self) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.types.items()},
            "required": list(self.types),
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _weather(rng: random.Random) -> _Task:
    city, sky = rng.choice(CITIES), rng.choice(SKIES)
    request = rng.choice(
        [f"What is the weather in {city}?", f"How is the weather in {city}?", f"Tell me the weather in {city}."]
    )
    return _Task(request, {"city": city}, sky, f"The weather in {city} is {sky}.")


def _time(rng: random.Random) -> _Task:
    city, clock = rng.choice(CITIES), _clock(rng.randint(0, 23), rng.randint(10, 59))
    request = rng.choice([f"What time is it in {city}?", f"Tell me the time in {city}."])
    return _Task(request, {"city": city}, clock, f"The time in {city} is {clock}.")


def _sum(rng: random.Random) -> _Task:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    request = rng.choice([f"Add {a} and {b}.", f"Add the numbers {a} and {b}.", f"What is the sum of {a} and {b}?"])
    return _Task(request, {"a": a, "b": b}, str(a + b), f"The sum is {a + b}.")


def _alarm(rng: random.Random) -> _Task:
    hour, minute = rng.randint(0, 23), rng.randint(10, 59)
    clock = _clock(hour, minute)
    request = rng.choice([f"Set an alarm for {clock}.", f"Wake me at {clock}.", f"I must wake at {clock}."])
    done = rng.random() < 0.5
    reply = f"The alarm is set for {clock}." if done else "The alarm was not set."
    return _Task(request, {"hour": hour, "minute": minute}, "done" if done else "failed", reply)


def _message(rng: random.Random) -> _Task:
    name, text = rng.choice(NAMES), " ".join(rng.sample(VALUES, rng.randint(1, 4)))
    request = rng.choice([f'Send "{text}" to {name}.', f'Write "{text}" to {name}.', f'Send {name} the text "{text}".'])
    done = rng.random() < 0.5
    reply = f"{name} has the message." if done else f"The message to {name} was not sent."
    return _Task(request, {"name": name, "text": text}, "done" if done else "failed", reply)


def _price(rng: random.Random) -> _Task:
    item, price = rng.choice(VALUES), rng.randint(1, 999)
    request = rng.choice([f"What is the price of the {item}?", f"Tell me the price of the {item}."])
    return _Task(request, {"item": item}, str(price), f"The price of the {item} is {price}.")


def _light(rng: random.Random) -> _Task:
    on = rng.random() < 0.5
    state = "on" if on else "off"
    request = rng.choice([f"Turn the light {state}.", f"Turn {state} the light.", f"Make the light go {state}."])
    return _Task(request, {"on": on}, state, f"The light is {state}.")


_TOOLS = (
    _Tool("get_weather", "The weather in a city", {"city": "string"}, _weather),
    _Tool("get_time", "The time in a city", {"city": "string"}, _time),
    _Tool("add_numbers", "The sum of numbers", {"a": "integer", "b": "integer"}, _sum),
    _Tool("set_alarm", "Set an alarm", {"hour": "integer", "minute": "integer"}, _alarm),
    _Tool("send_message", "Send a text", {"name": "string", "text": "string"}, _message),
    _Tool("get_price", "The price of an item", {"item": "string"}, _price),
    _Tool("set_light", "Turn the light on", {"on": "boolean"}, _light),
)


def tool_call(rng: random.Random) -> Exercise:
    """One to three tools and a request: the call that it needs, or NO_TOOL when no tool fits (one in five)."""
    needed, *declared = rng.sample(_TOOLS, rng.randint(2, 4))
    task = needed.task(rng)
    answer = Answer(content=NO_TOOL)
    if rng.random() < 0.8:
        declared[rng.randrange(len(declared))] = needed
        answer = Answer(tool_calls=(ToolCall(needed.name, task.arguments),))
    message = {"role": "user", "content": task.request}
    return Exercise("tool_call", (message,), answer, tools=tuple(tool.declaration() for tool in declared))


def tool_response(rng: random.Random) -> Exercise:
    """The same after the call: the answer is a sentence made from the tool's result."""
    declared = rng.sample(_TOOLS, rng.randint(1, 3))
    needed = rng.choice(declared)
    task = needed.task(rng)
    function = {"name": needed.name, "arguments": json.dumps(task.arguments)}
    messages = (
        {"role": "user", "content": task.request},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": task.result},
    )
    tools = tuple(tool.declaration() for tool in declared)
    return Exercise("tool_response", messages, Answer(task.reply), tools=tools)


def _clock(hour: int, minute: int) -> str:
    return f"{hour}:{minute}"
