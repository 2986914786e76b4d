"""Schemas and grammars that are large, deep, endless or wrong: refused by name, or compiled within their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.answer import AnswerGrammar, Thought, choice_part, grammar_part, regex_part
from modelserve_worker.grammar.check import check_grammar
from modelserve_worker.grammar.schema import bounded_schema, json_grammar
from modelserve_worker.grammar.unique_keys import unrepeatable_names
from modelserve_worker.text.markers import Markers


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _check(part: dict[str, Any]) -> None:
    check_grammar(AnswerGrammar(part=part).source(Markers.of({}), Thought.NONE), field="response_format")


def _check_schema(schema: Any) -> None:
    _check(json_grammar(bounded_schema(schema, field="response_format")))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (_nested(64), "nested more than 64 deep"),
        ({"enum": ["x" * 65_536]}, "characters of JSON; the limit is 65536"),
        ({"properties": {f"p{i}": {} for i in range(2_100)}}, "objects; the limit is 2048"),
        ({"not": {}}, 'the keywords "not" cannot be followed'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, '"if", "then"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"$ref": "http://169.254.169.254/latest"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "#"}, "response_format: no finite text matches it: '#' needs '#', and so on without end"),
        (
            {"properties": {"next": {"$ref": "#"}}, "required": ["next"], "type": "object"},
            "no finite text matches it: '#' needs '#', .* Leave what leads back out of required",
        ),
        (
            {
                "$defs": {
                    "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                    "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
                },
                "type": "object",
                "properties": {"x": {"type": "integer"}, "a": {"anyOf": [{"$ref": "#/$defs/a"}]}},
                "required": ["x", "a"],
            },
            r"'#/\$defs/a' needs '#/\$defs/b', which needs '#/\$defs/a', and so on",
        ),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "no finite text"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "no finite text"),
        (
            {
                "$defs": {"~/a": {"type": "array", "items": {"$ref": "#/$defs/~0~1a"}, "minItems": 1}},
                "$ref": "#/$defs/~0~1a",
            },
            "no finite text",
        ),
        ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, "cannot be followed"),
        ({"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(4)]} for i in range(12)]}, "too large"),
        ([], "must be a JSON schema"),
        ({"properties": {"\ud800": {}}}, "response_format holds half of a surrogate pair"),
        (False, "is false, which no document matches"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_name(schema, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        _check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        _nested(30),
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**9},
        {"$defs": {f"d{i}": {"properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "ab"}} for i in range(30)}
         | {"d30": {}}, "$ref": "#/$defs/d0"},
        {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)} | {"d20": {}},
         "$ref": "#/$defs/d0"},
        {"type": "string", "pattern": "^(a|b|ab)*c{1,1000}(x{1,1000}){1,1000}$"},
        {"oneOf": [{"type": "object", "properties": {"t": {"const": str(i)}}, "required": ["t"]} for i in range(200)]},
        True,
        # Each has a way out of its circle.
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "object", "properties": {"all": {"type": "array", "items": {"$ref": "#"}}}, "required": ["all"]},
        {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"$ref": "#"}, "minItems": 1},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}, "c": {"type": "integer"},
                   "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"},
    ],
)  # fmt: skip
def test_a_schema_that_looks_expensive_is_compiled_in_its_bounds(schema) -> None:
    _check_schema(schema)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda: regex_part("(a"), "unclosed group"),
        (lambda: regex_part(r"(a)\1"), "backreferences are not supported"),
        (lambda: regex_part("(?!a)b"), "look-around"),
        (lambda: grammar_part("start: missing", field="g"), "unknown name"),
        (lambda: grammar_part('root ::= "a" missing', field="g"), "not found"),
        (lambda: grammar_part('start: "a"{3,1}', field="g"), "response_format: "),
        (lambda: choice_part(["x" * 60_000 + str(i) for i in range(5)]), "the limit is 262144"),
    ],
)
def test_a_grammar_that_is_none_is_refused(part, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        _check(part())


@pytest.mark.parametrize("way_out", [False, True])
def test_the_longest_circle_is_found_and_told_in_a_few_words(way_out: bool) -> None:
    count = 900
    schemas: dict[str, Any] = {f"s{i}": {"$ref": f"#/$defs/s{(i + 1) % count}"} for i in range(count)}
    if way_out:
        schemas["s7"] = {"anyOf": [schemas["s7"], {"type": "integer"}]}
    document = {"$defs": schemas, "type": "array", "items": {"$ref": "#/$defs/s9"}, "minItems": 1}
    if way_out:
        assert bounded_schema(document, field="response_format") == document
    else:
        with pytest.raises(InvalidInput, match=r"'#/\$defs/s9' needs '#/\$defs/s10', .* by way of 897 more") as refusal:
            bounded_schema(document, field="response_format")
        assert len(str(refusal.value)) < 500


def test_keywords_that_ask_for_nothing_are_left_out_wherever_schemas_stand() -> None:
    """And nowhere else: a property, or a value, may have the same name."""
    idle = {"uniqueItems": False, "minProperties": 0}
    named = {"type": "object", "properties": {"uniqueItems": {"const": {"uniqueItems": False}}}}
    document = {
        "$defs": {"a": idle | {"type": "array", "items": idle | {"type": "integer"}}},
        "properties": {"a": idle | {"$ref": "#/$defs/a"}, "b": named},
        "anyOf": [idle, {"prefixItems": [idle], "uniqueItems": True}],
        "additionalProperties": idle,
    } | idle  # fmt: skip
    assert bounded_schema(document, field="f") == {
        "$defs": {"a": {"type": "array", "items": {"type": "integer"}}},
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": named},
        "anyOf": [{}, {"prefixItems": [{}], "uniqueItems": True}],
        "additionalProperties": {},
    }


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        ("^x", False), ("y", False), ("^[a-z]+$", False), ("^x{2,}$", False), ("^[$]x", False), (r"^\$x", False),
        ("^x|^y", False), ("[" * 60_000, False),
        ("^a$", True), ("^(xx|z)$", True), ("^[a-c]{1,2}$", True), (r"^a\*$", True), ("^(a$|b+)", True),
        ("^a|b+$", True), ("(" * 60_000 + "$", True),
    ],
)  # fmt: skip
def test_patterns_of_names_are_followed_where_a_name_can_always_be_longer(pattern, refused) -> None:
    schema = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    if refused:
        with pytest.raises(InvalidInput, match="too few names may match it"):
            unrepeatable_names(schema, field="schema")
    else:
        unrepeatable_names(schema, field="schema")
