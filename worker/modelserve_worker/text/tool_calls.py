"""Gemma 4's syntax for the call of a function: call:NAME{key:VALUE,...}.

VALUE is a string between quote tokens, a number as in JSON, true, false, null, a list [VALUE,...] or an object
{key:VALUE,...}. A key stands bare, or between quote tokens.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 32  # objects and lists inside each other, the arguments counted
MAX_NAME_LENGTH = 64
QUOTE = "\udc00"  # stands for the quote token; half of a surrogate pair, which decoded UTF-8 never holds

_HEAD = re.compile(rf"call:([A-Za-z0-9_.-]{{1,{MAX_NAME_LENGTH}}})(?=\{{)")
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(f"{QUOTE}([^{QUOTE}]*){QUOTE}")
_BARE_KEY = re.compile(rf'[^:,{{}}\[\]"{QUOTE}]+(?=:)')
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z]+")
# Templates write a missing value in the word of whatever language renders them.
_WORDS = {"true": True, "false": False, "null": None, "none": None, "None": None, "nil": None}


@dataclass(frozen=True)
class ToolCall:
    """A call that is complete and well formed; argument values are what JSON can hold."""

    name: str
    arguments: dict[str, Any]

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)


def parse_call(source: str) -> ToolCall:
    """The call that `source` spells, QUOTE standing for the quote token. Integers stay integers, of any size.

    Raises ValueError where it is no such call: unfinished, nested deeper than MAX_DEPTH, a key given twice, or a number
    that JSON cannot carry.
    """
    return _Parser(source).call()


class _Parser:
    """Recursive descent over one text; `_at` is the next character to read."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def call(self) -> ToolCall:
        self._skip_space()
        head = self._match(_HEAD)
        if head is None:
            raise self._unexpected("call:NAME{")
        arguments = self._object(depth=1)
        if self._at < len(self._source):
            raise self._unexpected("the end")
        return ToolCall(head[1], arguments)

    def _value(self, *, depth: int) -> Any:
        if self._follows("{"):
            return self._object(depth=depth)
        if self._follows("["):
            return self._list(depth=depth)
        if string := self._match(_STRING):
            return string[1]
        if number := self._match(_NUMBER):
            return _number(number)
        if (word := self._match(_WORD)) and word[0] in _WORDS:
            return _WORDS[word[0]]
        raise self._unexpected("a value")

    def _object(self, *, depth: int) -> dict[str, Any]:
        _require_depth(depth)
        self._take("{")
        members: dict[str, Any] = {}
        while not self._follows("}"):
            if members:
                self._take(",")
            key = self._key()
            if key in members:  # a function must not run with one of two values at the parser's choice
                raise ValueError(f"the key {key!r} stands twice")
            self._take(":")
            members[key] = self._value(depth=depth + 1)
            self._skip_space()
        self._take("}")
        return members

    def _list(self, *, depth: int) -> list[Any]:
        _require_depth(depth)
        self._take("[")
        entries: list[Any] = []
        while not self._follows("]"):
            if entries:
                self._take(",")
            entries.append(self._value(depth=depth + 1))
            self._skip_space()
        self._take("]")
        return entries

    def _key(self) -> str:
        if string := self._match(_STRING):
            self._skip_space()
            return string[1]
        if bare := self._match(_BARE_KEY):
            return bare[0].rstrip(" \t\r\n")
        raise self._unexpected("a key")

    def _follows(self, character: str) -> bool:
        return self._source.startswith(character, self._at)

    def _take(self, character: str) -> None:
        """Read `character` and the white space behind it."""
        if not self._follows(character):
            raise self._unexpected(repr(character))
        self._at += 1
        self._skip_space()

    def _skip_space(self) -> None:
        self._match(_SPACE)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._source, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _unexpected(self, wanted: str) -> ValueError:
        return ValueError(f"expected {wanted} at character {self._at}")


def _require_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _number(match: re.Match[str]) -> int | float:
    whole, fraction, exponent = match.groups()
    if fraction is None and exponent is None:
        return int(whole)  # ValueError beyond Python's bound of digits
    value = float(match[0])
    if not math.isfinite(value):
        raise ValueError("a number is too large for JSON")
    return value
