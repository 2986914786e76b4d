"""JSON schemas to grammars of Gemma 4's syntax for the arguments of a call (text/tool_calls.py reads it).

The model writes keys in sorted order, without white space, and strings between quote tokens; so does the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llguidance import regex_to_lark

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.check import check_grammar

_BARE_KEY = re.compile(r"[A-Za-z0-9_.$-]+")
# Ids of other systems have 19 digits and more; a bound, as a model that is unsure writes digits until its last token.
_INTEGER = r"/-?(0|[1-9][0-9]{0,39})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"  # within what a float can hold
_FREE_KEY = r"/[A-Za-z0-9_.$-]{1,64}/"
_FREE_DEPTH = 8  # of values that no schema describes
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_FORMATS = {
    "date": r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"
# What says nothing about which values are valid, or was used by the time it is looked for.
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id"}
    | {"$defs", "definitions", "discriminator", "type"}
)


class ArgumentRules:
    """Rules of one grammar, by name. `quote` names the quote token; schemas are bounded (`bounded_schema`).

    `strict` False: keywords that cannot be kept to are passed over, for arguments that nobody promised to constrain.
    """

    def __init__(self, *, quote: str) -> None:
        self._quote = quote
        self.rules: dict[str, str] = {}

    def arguments(self, schema: Mapping[str, Any], *, field: str, strict: bool) -> str:
        """The name of the rule of a call's arguments, in braces. Raises InvalidInput that names the keyword."""
        rules = _SchemaRules(self, schema, field=field, strict=strict)
        try:
            return rules.arguments()
        except RecursionError as error:
            raise InvalidInput(
                f"{field}: too many schemas lead to each other by $ref; flatten it", field=field
            ) from error

    def new(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = body
        return name

    def string(self, pattern: str) -> str:
        return f"{self._quote} /{pattern}/ {self._quote}"

    def key(self, name: str) -> str:
        return literal(name) if _BARE_KEY.fullmatch(name) else f"{self._quote} {literal(name)} {self._quote}"

    def constant(self, value: Any) -> str:
        """Exactly this value."""
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, dict):
            members = (f'{self.key(key)} ":" {self.constant(value[key])}' for key in sorted(value))
            return f'"{{" {_separated(members)} "}}"'
        if isinstance(value, list):
            return f'"[" {_separated(map(self.constant, value))} "]"'
        return literal(json.dumps(value))

    def anything(self, depth: int = _FREE_DEPTH) -> str:
        """Any value, nested at most `depth` deep."""
        name = f"any{depth}"
        if name not in self.rules:
            simple = f'{self.string(_TEXT)} | {_NUMBER} | "true" | "false" | "null"'
            self.rules[name] = simple
            if depth:
                inner = self.anything(depth - 1)
                self.rules[name] += f' | "[" ({inner} ("," {inner})*)? "]" | {self.mapping(inner)}'
        return name

    def mapping(self, value: str) -> str:
        """Any keys, each with a `value`; those that cannot stand bare between quote tokens."""
        self.rules["key"] = f"{_FREE_KEY} | {self.string('(?s:.){1,64}')}"
        return f'"{{" (key ":" {value} ("," key ":" {value})*)? "}}"'


_TEXT = "(?s:.)*"


class _SchemaRules:
    """The rules of one schema document."""

    def __init__(self, rules: ArgumentRules, document: Mapping[str, Any], *, field: str, strict: bool) -> None:
        self._rules = rules
        self._document = document
        self._field = field
        self._strict = strict
        self._references: dict[str, str] = {}  # rule by $ref
        self._by_type: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._number,
            "number": self._number,
            "boolean": lambda _: '"true" | "false"',
            "null": lambda _: '"null"',
        }

    def arguments(self) -> str:
        schema = dict(self._document)
        passed: set[str] = set()
        while "$ref" in schema:
            target = schema["$ref"]
            schema = dict(self._resolve(target))
            if target in passed:
                raise self._wrong(f"$ref {target!r:.80} leads back to itself", "$ref")
            passed.add(target)
        if schema.get("type", "object") != "object":
            raise self._wrong(f"the parameters of a function are an object, not {schema['type']!r:.40}", "type")
        schema.setdefault("additionalProperties", False)  # who names no arguments wants none
        return self._rules.new(self._object(schema))

    def _value(self, schema: Any) -> str:
        """A rule's name, or a body that stands for one value."""
        if schema is True or schema == {}:
            return self._rules.anything()
        if not isinstance(schema, dict):
            raise self._wrong(f"{schema!r:.40} is no schema that a value could match", "schema")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema:
            return self._rules.new(self._rules.constant(schema["const"]))
        if "enum" in schema:
            if not isinstance(schema["enum"], list) or not schema["enum"]:
                raise self._wrong("enum must be a list of at least one value", "enum")
            return self._rules.new(" | ".join(map(self._rules.constant, schema["enum"])))
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                return self._union(schema, union)
        kinds = schema.get("type", _implied_type(schema))
        if kinds is None:
            self._allow(schema, ())
            return self._rules.anything()
        kinds = kinds if isinstance(kinds, list) else [kinds]
        unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in self._by_type]
        if unknown or not kinds:
            raise self._wrong(f"type {kinds!r:.80} names none of {', '.join(self._by_type)}", "type")
        # Each once: a type that is named twice, in objects inside each other, would double the rules at each level.
        options = [self._rules.new(self._by_type[kind](schema | {"type": kind})) for kind in dict.fromkeys(kinds)]
        return options[0] if len(options) == 1 else self._rules.new(" | ".join(options))

    def _union(self, schema: Mapping[str, Any], union: str) -> str:
        options = schema[union]
        if not isinstance(options, list) or not options:
            raise self._wrong(f"{union} must be a list of at least one schema", union)
        self._allow(schema, (union,))
        if union == "allOf" and len(options) > 1:
            raise self._wrong("allOf of several schemas cannot be followed in a call's arguments", union)
        return self._rules.new(" | ".join(map(self._value, options)))

    def _reference(self, target: Any) -> str:
        found = self._resolve(target)
        if target not in self._references:
            self._references[target] = name = self._rules.new("")  # known before its body, which may name it
            self._rules.rules[name] = self._value(found)
        return self._references[target]

    def _resolve(self, target: Any) -> Mapping[str, Any]:
        if not isinstance(target, str) or not target.startswith("#"):
            raise self._wrong(f"$ref {target!r:.80} leads out of the schema; only '#/$defs/NAME' is followed", "$ref")
        found: Any = self._document
        for step in target[1:].split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not isinstance(found, dict) or found.get("$ref") == target:
            raise self._wrong(f"$ref {target!r:.80} leads to no schema", "$ref")
        return found

    def _object(self, schema: Mapping[str, Any]) -> str:
        self._allow(schema, ("properties", "required", "additionalProperties"))
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise self._wrong("properties must be an object and required a list", "properties")
        if unnamed := [name for name in required if not isinstance(name, str)]:
            raise self._wrong(f"required is a list of names, not of {unnamed[0]!r:.40}", "required")
        others = schema.get("additionalProperties", True)
        if self._strict and (missing := sorted(set(required) - set(properties))):
            raise self._wrong(f"required names {missing[0]!r:.80}, which is not among the properties", "required")
        if not properties:
            return '"{" "}"' if others is False else self._rules.mapping(self._value(others))
        # Keys that no property names are left out: an object without them is as valid.
        members = [
            (name in required, f'{self._rules.key(name)} ":" {self._value(properties[name])}')
            for name in sorted(properties)
        ]
        rest = self._rules.new('""')  # the members behind another one
        first = None  # the members when none stands before them
        for needed, member in reversed(members):
            alternatives = f"{member} {rest}"
            first = self._rules.new(alternatives if needed else f"{alternatives} | {first or rest}")
            rest = self._rules.new(f'"," {member} {rest}' if needed else f'("," {member})? {rest}')
        return f'"{{" {first} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        self._allow(schema, ("items", "minItems", "maxItems"))
        item = self._value(schema.get("items", True))
        least, most = self._bounds(schema, "minItems", "maxItems")
        if most == 0:
            return '"[" "]"'
        more = "" if most == 1 else f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        self._allow(schema, ("minLength", "maxLength", "pattern", "format"))
        least, most = self._bounds(schema, "minLength", "maxLength")
        pattern, form = schema.get("pattern"), schema.get("format")
        if pattern is None and form is None:
            return self._rules.string(f"(?s:.){{{least},{'' if most is None else most}}}")
        if self._strict and (least or most is not None or (pattern is not None and form is not None)):
            raise self._wrong("only one of pattern, format, and the two lengths can be followed at a time", "pattern")
        if form is not None and not (isinstance(form, str) and form in _FORMATS):
            if self._strict:
                raise self._wrong(f"format {form!r:.40} cannot be followed; {', '.join(_FORMATS)} can", "format")
            return self._rules.string(_TEXT)
        if form is not None:
            return self._rules.string(_FORMATS[form])
        if not isinstance(pattern, str):
            raise self._wrong(f"pattern must be a regular expression, not {pattern!r:.40}", "pattern")
        anchored = _anchored(pattern)
        return self._rules.string(anchored if self._strict or _can_be_followed(anchored) else _TEXT)

    def _number(self, schema: Mapping[str, Any]) -> str:
        self._allow(schema, _RANGES)
        limits = {name: schema[name] for name in ("type", *_RANGES) if name in schema}
        if len(limits) > 1:
            return f"%json {json.dumps(limits)}"  # a number is written as in JSON
        return _INTEGER if schema["type"] == "integer" else _NUMBER

    def _bounds(self, schema: Mapping[str, Any], lower: str, upper: str) -> tuple[int, int | None]:
        least, most = schema.get(lower, 0), schema.get(upper)
        for name, value in ((lower, least), (upper, most)):
            if (value is not None or name == lower) and (type(value) is not int or value < 0):
                raise self._wrong(f"{name} must be a number from 0 on, not {value!r:.40}", name)
        if most is not None and most < least:
            raise self._wrong(f"{lower} {least} exceeds {upper} {most}", lower)
        return least, most

    def _allow(self, schema: Mapping[str, Any], keywords: Iterable[str]) -> None:
        known = _ANNOTATIONS.union(keywords)
        if self._strict and (unknown := sorted(set(schema) & _KEYWORDS - known)):
            raise self._wrong(f"the keyword {unknown[0]!r} cannot be followed; leave it out, or strict", unknown[0])

    def _wrong(self, text: str, keyword: str) -> InvalidInput:
        return InvalidInput(f"{self._field}: {text} ({keyword})", field=self._field)


# Of the keywords that restrict values; others say nothing, as JSON schema has it.
_KEYWORDS = frozenset(
    {"properties", "required", "additionalProperties", "items", "minItems", "maxItems", "minLength", "maxLength"}
    | {"pattern", "format", *_RANGES, "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "prefixItems", "contains"}
    | {"minContains", "maxContains", "uniqueItems", "patternProperties", "propertyNames", "minProperties"}
    | {"maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
    | {"unevaluatedItems", "additionalItems", "$dynamicRef", "$recursiveRef"}
)


def literal(text: str) -> str:
    """The text as a literal of the grammar's language."""
    return json.dumps(text, ensure_ascii=False)


def _separated(parts: Iterable[str]) -> str:
    return ' "," '.join(parts)


def _implied_type(schema: Mapping[str, Any]) -> str | None:
    """The type that a schema without one speaks of."""
    signs = (("object", "properties"), ("array", "items"), ("string", "pattern"), ("number", "minimum"))
    return next((kind for kind, keyword in signs if keyword in schema), None)


def _can_be_followed(pattern: str) -> bool:
    try:
        check_grammar(json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]}), field="pattern")
    except InvalidInput:
        return False
    return True


def _anchored(pattern: str) -> str:
    """JSON schema searches for a pattern anywhere; a grammar matches from end to end."""
    start = "" if pattern.startswith("^") else _TEXT
    ends = pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1
    inner = pattern[0 if start else 1 : -1 if ends else None]
    return regex_to_lark(f"{start}({inner}){'' if ends else _TEXT}", "dw")
