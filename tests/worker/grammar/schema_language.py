"""Random schemas over all that `grammar/schema.py` accepts, and answers to them by a random walk over the masks."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import uuid
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np

from modelserve_worker.grammar.answer import AnswerGrammar, Thought
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.grammar.schema import document_part
from modelserve_worker.text.markers import Markers

Schema = dict[str, Any] | bool
MOST_TOKENS = 400
NAMES = ["a", "b", "cd", "odd key", "é", "", 'q"', "x-1"]
# Each of these restricts what is valid; where it is left out of the grammar, some walk must end in a wrong document.
CONSTRAINTS = [
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "items", "prefixItems", "minItems", "maxItems",
    "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
]  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A document's schema; what it refers to stands in it."""
    schema = _schema(rng, depth)
    if isinstance(schema, dict) and rng.random() < 0.3:
        schema = {"$defs": {"d": _schema(rng, 1), "tree": _tree(rng)}, **schema}
        place = {"$ref": rng.choice(["#/$defs/d", "#/$defs/tree"])}
        beside = rng.choice([{}, _string(rng, 0), {"minimum": 1}])
        lists = {"type": "array", "items": place, "maxItems": 2}
        schema = {"$defs": schema["$defs"], **rng.choice([place, place | beside, lists])}
    return schema


def _schema(rng: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [_string, _number, _simple, _values]
    if depth:
        makers += [_object, _object, _array, _array, _union, _all]
    schema = rng.choice(makers)(rng, depth - 1)
    if isinstance(schema, dict) and rng.random() < 0.1:
        schema |= {"title": "T", "description": "says nothing", "default": None}
    return schema


def _tree(rng: random.Random) -> Schema:
    """Refers to itself, with a way out."""
    node = {
        "type": "object",
        "properties": {"v": _number(rng, 0), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    }
    return node | {"required": ["v"], "additionalProperties": False}


def _string(rng: random.Random, _: int) -> Schema:
    schema: dict[str, Any] = {"type": "string"}
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randint(0, 4)
        schema |= rng.choice(
            [{"minLength": low, "maxLength": low + rng.randint(0, 5)}, {"maxLength": low}, {"minLength": low}]
        )
    elif kind == 1:
        schema |= {
            "pattern": rng.choice(
                ["^[a-f]{2,4}$", "^x/[0-9]{2}$", "^(up|down)$", "[0-9]", "^é+$", r"^\w{1,3}-\d$", "b$"]
            )
        }
    elif kind == 2:
        schema |= {"format": rng.choice(list(FORMATS))}
    else:
        schema |= {"pattern": "^[a-z]*$", "minLength": 2, "maxLength": 5}
    return schema


def _number(rng: random.Random, _: int) -> Schema:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    low = rng.choice([-100, -3, 0, 7, 0.5, -2.25, 99.9])
    high = low + rng.choice([0, 1, 3.5, 20, 1000])
    if rng.random() < 0.8:
        schema |= rng.choice([{"minimum": low}, {"exclusiveMinimum": low}, {}])
        schema |= rng.choice([{"maximum": high + 1}, {"exclusiveMaximum": high + 2}, {}])
    if rng.random() < 0.3:
        schema |= {"multipleOf": rng.choice([1, 3, 0.5, 0.01, 10])}
    return schema


def _simple(rng: random.Random, _: int) -> Schema:
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["null", "integer"]},
            {"type": ["string", "boolean"], "maxLength": 3},
        ]
    )


def _values(rng: random.Random, _: int) -> Schema:
    values = rng.sample(["red", "green", 7, 1.5, None, True, "a b", '"', "", -3, "<unk>", {"a": [1, "b"]}, [], [2]], 3)
    return rng.choice([{"enum": values}, {"const": values[0]}, {"type": ["string", "null"], "enum": ["x", None, "y"]}])


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 3)
    schema: dict[str, Any] = {"type": "array", "maxItems": low + rng.randint(0, 2)}
    if rng.random() < 0.7:
        schema |= {"minItems": low}
    if rng.random() < 0.4:
        schema |= {"prefixItems": [_schema(rng, depth) for _ in range(rng.randint(1, 2))]}
    return schema | rng.choice(
        [{"items": _schema(rng, depth)}, {"items": _schema(rng, depth)}, {"items": {"type": "null"}}]
    )


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _schema(rng, depth) for name in names}}
    schema |= {"required": [name for name in names if rng.random() < 0.5]}
    kind = rng.randrange(6)
    if kind < 3:
        schema |= {"additionalProperties": False}
    elif kind == 3:
        schema |= {"additionalProperties": _schema(rng, 0)}
    elif kind == 4:
        patterns = rng.sample(["^x", "^[0-9]", "y", "^a$", "^[a-c]+$", "d[0-9]*$", "^(xx|z)$"], rng.randint(1, 2))
        schema |= {"patternProperties": {pattern: _schema(rng, 0) for pattern in patterns}}
        schema |= {"additionalProperties": rng.choice([False, _schema(rng, 0)])}
    if rng.random() < 0.1:
        schema["required"] = [*schema["required"], rng.choice(["other", "xx", "a"])]
    if rng.random() < 0.2:
        del schema["type"]
    if rng.random() < 0.25:
        schema |= rng.choice([{"minProperties": rng.randint(1, 3)}, {"maxProperties": rng.randint(1, 3)}])
    return schema


def _union(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}
    tagged = [
        {"type": "object", "properties": {"t": {"const": t}, "v": _schema(rng, 0)}, "required": ["t"]} for t in "xy"
    ]
    return {
        "oneOf": rng.choice(
            [[each | {"additionalProperties": False} for each in tagged], [{"type": "null"}, {"type": "integer"}]]
        )
    }


def _all(rng: random.Random, depth: int) -> Schema:
    """Several that hold at once, as a list or as keywords beside each other."""
    make = rng.choice([_object, _number, _string, _array])
    one, other = make(rng, depth), make(rng, 0)
    assert isinstance(one, dict)
    return rng.choice([{"allOf": [one, other]}, one | {"anyOf": [other, _values(rng, 0)]}, one | {"allOf": [other]}])


FORMATS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "date-time": lambda text: datetime.datetime.fromisoformat(text.upper().replace(":60", ":59")),  # a leap second
    "time": lambda text: datetime.time.fromisoformat(text.upper().replace(":60", ":59")),
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
}  # fmt: skip
CHECKER = jsonschema.FormatChecker(formats=())
for _name, _check in FORMATS.items():
    CHECKER.checks(_name, raises=ValueError)(
        lambda value, check=_check: not isinstance(value, str) or bool(check(value) or True)
    )


class _Written(float):
    """A number, and how it was written."""

    def __init__(self, digits: str) -> None:
        self.digits = digits


def _multiple(_: Any, factor: float, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """As decimals: 74.27 is a multiple of 0.01."""
    number = isinstance(instance, int | float) and not isinstance(instance, bool)
    if number and Fraction(getattr(instance, "digits", str(instance))) % Fraction(str(factor)):
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {factor}")


_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _multiple})


def fault(text: str, schema: Schema) -> str | None:
    """What is wrong with a finished answer; None for a document that is valid and names no key twice."""
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_float=_Written)
        _VALIDATOR(schema, format_checker=CHECKER).validate(document)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r}: {str(error).splitlines()[0]}"
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def without(schema: Any, constraint: str) -> Any:
    """The schema and all in it, less one keyword."""
    if isinstance(schema, list):
        return [without(each, constraint) for each in schema]
    if not isinstance(schema, dict):
        return schema
    left = {}
    for keyword, value in schema.items():
        if keyword == constraint:
            continue
        named = keyword in ("properties", "patternProperties", "$defs")
        literal = keyword in ("enum", "const", "default", "required")
        if named:
            left[keyword] = {name: without(each, constraint) for name, each in value.items()}
        else:
            left[keyword] = value if literal else without(value, constraint)
    return left


def source_of(schema: Schema) -> str:
    """Raises InvalidInput."""
    return AnswerGrammar(part=document_part(schema, field="schema")).source(Markers.of({}), Thought.NONE)


class Walker:
    """Answers by walks over the masks of one vocabulary."""

    def __init__(self, compiler: GrammarCompiler, token_bytes: list[bytes], eos: int) -> None:
        self._compiler, self._bytes, self._eos = compiler, token_bytes, eos
        self._short = np.array([len(data) == 1 and data.isascii() for data in token_bytes])
        self._closing = np.array([data in (b'"', b"}", b"]", b'"}', b'"]') for data in token_bytes])

    def walk(self, source: str, rng: random.Random) -> str | None:
        """A finished answer; None where it is cut. Tokens that close something are taken more often, else few end."""
        compiled = self._compiler.compile(source).result()
        matcher = self._compiler.matcher(compiled, stop_token_ids=(), ignore_eos=False, min_tokens=0)
        said = b""
        for _ in range(MOST_TOKENS):
            (row,) = self._compiler.masks([(matcher, ())])
            assert matcher.error is None, matcher.error
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            some = allowed
            if rng.random() < 0.3 and self._closing[allowed].any():
                some = allowed[self._closing[allowed]]
            elif rng.random() < 0.6 and self._short[allowed].any():
                some = allowed[self._short[allowed]]
            token = int(rng.choice(some))
            if token == self._eos:
                return said.decode()
            said += self._bytes[token]
            matcher.consume(token)
            assert matcher.error is None, matcher.error
            if matcher.complete:
                return said.decode()
        return None
