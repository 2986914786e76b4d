"""Random JSON schemas and request fields that constrain an answer, with the check of what comes of them."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from modelserve_worker.server.answers.sequences import Reply

KEYS = ["a", "b", "city", "unit", "days", "note", "odd key", "é"]


@dataclass
class Case:
    """Fields of a chat request, and a check of the finished answer that raises when it is wrong."""

    name: str
    body: dict[str, Any]
    check: Callable[[Reply], None]
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "user", "content": "Say something."}])


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """What both the JSON grammar and the grammar of calls can follow; small, so that answers end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "array", "anyOf"] * 2
    kind = rng.choice(kinds)
    if kind == "string":
        low = rng.randint(0, 2)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return rng.choice([{"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}, {"enum": [1, 2]}])
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9), "multipleOf": 0.5}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, 1.5, None, True, "a b", '"', ""], 3)}
    if kind == "const":
        return {"const": rng.choice(["yes", 3, {"a": [1, "b"]}, []])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^x/[0-9]{2}$", "^(up|down)$"])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "array":
        low, items = rng.randint(0, 2), random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    return random_object(rng, depth)


def random_object(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    names = rng.sample(KEYS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def random_case(rng: random.Random, number: int) -> Case:
    makers = [_json_schema, _structured_json, _regex, _choice, _grammar, _required, _named, _strict_auto, _thinking]
    return makers[number % len(makers)](rng)


def _valid(schema: dict[str, Any]) -> Callable[[Reply], None]:
    return lambda reply: jsonschema.validate(json.loads(reply.content), schema)


def _json_schema(rng: random.Random) -> Case:
    schema = random_object(rng)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    return Case("json_schema", {"response_format": form}, _valid(schema))


def _structured_json(rng: random.Random) -> Case:
    schema = random_schema(rng)
    return Case("structured_outputs.json", {"structured_outputs": {"json": schema}}, _valid(schema))


def _regex(rng: random.Random) -> Case:
    pattern = rng.choice([r"[0-9]{3}-[a-z]{2,4}", r"(yes|no)(, (please|thanks))?", r"v\d\.\d{1,2}(-rc\d)?", "é{1,3}/x"])

    def check(reply: Reply) -> None:
        assert re.fullmatch(pattern, reply.content), (pattern, reply.content)

    return Case("regex", {"structured_outputs": {"regex": pattern}}, check)


def _choice(rng: random.Random) -> Case:
    texts = ["".join(rng.choices(string.ascii_letters + ' "\\\n/é', k=rng.randint(1, 9))) for _ in range(4)]

    def check(reply: Reply) -> None:
        assert reply.content in texts, (texts, reply.content)

    return Case("choice", {"structured_outputs": {"choice": texts}}, check)


def _grammar(rng: random.Random) -> Case:
    lark = 'start: "SELECT " name ("," name){0,3} " FROM " name\nname: /[a-z]{1,5}/'
    gbnf = 'root ::= "SELECT " name " FROM " name\nname ::= [a-z] [a-z]? [a-z]?'

    def check(reply: Reply) -> None:
        assert re.fullmatch(r"SELECT [a-z]{1,5}(,[a-z]{1,5})* FROM [a-z]{1,5}", reply.content), reply.content

    return Case("grammar", {"structured_outputs": {"grammar": rng.choice([lark, gbnf])}}, check)


def _tool(name: str, schema: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def _calls_valid(schemas: dict[str, dict[str, Any]], *, least: int, most: int) -> Callable[[Reply], None]:
    def check(reply: Reply) -> None:
        assert least <= len(reply.tool_calls) <= most, (reply.content, reply.tool_calls)
        for call in reply.tool_calls:
            jsonschema.validate(call.arguments, schemas[call.name])
        if least:
            assert reply.content == "", reply.content

    return check


def _required(rng: random.Random) -> Case:
    schemas = {"look_up": random_object(rng), "save.it-now": random_object(rng)}
    tools = [_tool(name, schema, strict=rng.random() < 0.5) for name, schema in schemas.items()]
    parallel = rng.random() < 0.5
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": parallel}
    return Case("required", body, _calls_valid(schemas, least=1, most=99 if parallel else 1))


def _named(rng: random.Random) -> Case:
    schemas = {"f": random_object(rng), "g": {"type": "object", "properties": {}}}
    tools = [_tool(name, schema, strict=False) for name, schema in schemas.items()]
    choice = {"type": "function", "function": {"name": rng.choice(["f", "g"])}}
    wanted = choice["function"]["name"]
    return Case(
        "named", {"tools": tools, "tool_choice": choice}, _calls_valid({wanted: schemas[wanted]}, least=1, most=1)
    )


def _strict_auto(rng: random.Random) -> Case:
    schemas = {"f": random_object(rng), "g": random_object(rng)}
    body = {"tools": [_tool("f", schemas["f"], strict=True), _tool("g", schemas["g"], strict=False)]}
    hour = [{"role": "user", "content": "What time is it? Use the tool."}]
    return Case("strict auto", body, _calls_valid(schemas, least=0, most=99), hour)


def _thinking(rng: random.Random) -> Case:
    schema = random_object(rng, 1)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return Case("behind a thought", {"response_format": form, "reasoning_effort": "high"}, _valid(schema))
