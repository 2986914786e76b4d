"""Requests whose grammar, schema or regular expression is made to cost: by name, and at random."""

from __future__ import annotations

import random
from typing import Any


def grammar(source: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": source}}


def regex(expression: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": expression}}


def schema(document: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": document}}}


def tool(parameters: Any, *, strict: bool) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", **parameters}, "strict": strict}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def _one_string(**keywords: Any) -> dict[str, Any]:
    return {"properties": {"a": {"type": "string", **keywords}}, "required": ["a"]}


_NUMBERED = [f"r{i}" for i in range(2000)]
_EACH_ITS_OWN = "\n".join(f'{name}: "{name}"' for name in _NUMBERED)
_UNIONS = [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(4)]} for i in range(12)]
_LISTS = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 6}
_LETTERS = [{"type": "string", "pattern": f"^.*{letter}.*$"} for letter in "abcdefgh"]

# Fields of a request by name. What of these is refused, and what is followed within its fuel, is for the tests to see.
HOSTILE: dict[str, dict[str, Any]] = {
    "repetitions of nothing": grammar('start: (("a"?)~0..10000)~0..10000'),
    "repetitions of repetitions": grammar('start: ("a"~1..10000)~1..10000'),
    "all ways to join two": grammar('start: s\ns: "a" | s s'),
    "all ways to join two or three": grammar('start: s\ns: "a" | s s | s s s'),
    "all ways to join and nothing": grammar('start: s\ns: "" | "a" | s s s'),
    "all ways to join letters": grammar("start: s\ns: /[a-z]/ | s s | s s s"),
    "two left": grammar('start: s\ns: "a" | s "a" s | s s "a"'),
    "400 optional letters": grammar("start: " + "a? " * 400 + '\na: "a"'),
    "five that begin alike": grammar("start: x*\nx: a | b | c | d | e\n" + "\n".join(f'{c}: x* "a"' for c in "abcde")),
    "300 lexemes": grammar("start: x*\nx: " + " | ".join(f"/[a-z]{{1,{i}}}{i}/" for i in range(1, 300))),
    "lexemes that all go on": grammar("start: (" + " | ".join(f"/[a-z]*{c}[a-z]*/" for c in "abcdefghijkl") + ")*"),
    "an intersection": grammar("start: A\nA: /(?s:.*a.{40})/ & /(?s:.*b.{41})/ & /(?s:.*c.{43})/"),
    "without end": grammar('start: "a" start'),
    "2,000 rules": grammar(f"start: {' | '.join(_NUMBERED)}\n{_EACH_ITS_OWN}"),
    "parentheses": grammar("start: " + "(" * 5_000 + '"a"' + ")" * 5_000),
    "a state for each subset": regex("(a|b)*a(a|b){20}c"),
    "powers": regex("(x{1,1000}){1,1000}"),
    "dots": regex("(.{0,50}a.{0,50}b){0,50}"),
    "letters of all scripts": regex(r"(\w{0,300}\s{0,300}){300}"),
    "600 properties": schema(_properties(600)),
    "2,000 properties": schema(_properties(2000)),
    "80 objects of which one": schema({"anyOf": [_properties(20) | {"required": [f"p{i % 20}"]} for i in range(80)]}),
    "products of unions": schema({"allOf": _UNIONS}),
    "any of six lists, deep": schema({"$defs": {"a": _LISTS}, "$ref": "#/$defs/a"}),
    "patterns in a list": schema({"type": "array", "items": {"anyOf": _LETTERS}}),
    "a long string": schema({"type": "string", "maxLength": 20_000}),
    "numbers": schema({"type": "array", "items": {"type": "number", "minimum": -1234.5678, "multipleOf": 0.001}}),
    "a pattern in a tool": tool(_one_string(pattern="(a|b)*a(a|b){20}c"), strict=True),
    "powers in a tool": tool(_one_string(pattern="^(x{1,1000}){1,1000}$"), strict=False),
    "2,000 properties in a tool": tool(_properties(1900), strict=False),
    "a long string in a tool": tool(_one_string(maxLength=9999), strict=True),
}


def random_hostile(rng: random.Random) -> dict[str, Any]:
    """One of the six places where a client may put such a thing."""
    kind = rng.randrange(6)
    if kind <= 1:
        return grammar(_random_rules(rng))
    if kind == 2:
        return regex(random_expression(rng))
    document = random_schema(rng, depth=rng.randint(1, 4))
    return schema(document) if kind == 3 else tool({"properties": {"a": document}}, strict=kind == 4)


def _random_rules(rng: random.Random) -> str:
    names = [f"r{i}" for i in range(rng.randint(1, 6))]
    return "\n".join(f"{name}: {_random_part(rng, names, 3)}" for name in ["start", *names])


def _random_part(rng: random.Random, names: list[str], depth: int) -> str:
    kind = rng.randrange(6 if depth else 3)
    if kind == 0:
        return rng.choice(['"a"', '"ab"', '""', '"b"'])
    if kind == 1:
        return rng.choice(names)
    if kind == 2:
        return f"/{random_expression(rng)}/"
    inner = [_random_part(rng, names, depth - 1) for _ in range(rng.randint(1, 4))]
    if kind == 3:
        return f"({' '.join(inner)})" + rng.choice(["*", "+", "?", "{0,9}", "~1..500", "{2,99999}"])
    return f"({(' ' if kind == 4 else ' | ').join(inner)})"


def random_expression(rng: random.Random, depth: int = 3) -> str:
    if not depth:
        return rng.choice(["a", "b", ".", "[a-z]", r"\w", "[^a]", r"\d"])
    inner = [random_expression(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    joined = rng.choice(["", "|"]).join(inner)
    return f"({joined})" + rng.choice(["", "*", "+", "?", "{0,50}", "{20}", "{1,1000}"])


def random_schema(rng: random.Random, *, depth: int) -> dict[str, Any]:
    kind = rng.randrange(7 if depth else 3)
    if kind == 0:
        return {"type": "string", "pattern": random_expression(rng)}
    if kind == 1:
        return {"type": "string", "minLength": rng.choice([0, 5, 10**6]), "maxLength": rng.choice([10**3, 10**7])}
    if kind == 2:
        return {"enum": ["ab" * rng.randint(0, 200) + str(i) for i in range(rng.choice([2, 300]))]}
    inner = [random_schema(rng, depth=depth - 1) for _ in range(rng.randint(1, 3))]
    if kind == 3:
        return {"type": "array", "items": inner[0], "minItems": rng.choice([0, 10**6])}
    if kind == 4:
        return {rng.choice(["anyOf", "allOf", "oneOf"]): inner * rng.randint(1, 3)}
    names = [f"p{i}" for i in range(rng.choice([3, 30, 300]))]
    return {"type": "object", "properties": {name: inner[i % len(inner)] for i, name in enumerate(names)}}
