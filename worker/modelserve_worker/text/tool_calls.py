"""Turns Gemma 4's syntax for the call of a function, call:NAME{key:VALUE,...}, into JSON while it arrives.

VALUE is a string between quote tokens, a number as in JSON, true, false, null, a list [VALUE,...] or an object
{key:VALUE,...}. A key stands bare, or between quote tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 32  # objects and lists inside each other, the arguments counted
MAX_NAME_LENGTH = 64
QUOTE = "\udc00"  # stands for the quote token; half of a surrogate pair, which decoded UTF-8 never holds

_MAX_LEXEME = 4400  # characters of a name, key, number or word; Python reads integers of 4,300 digits
_SPACE = " \t\r\n"
_HEAD = re.compile(rf"call:([A-Za-z0-9_.:/-]{{1,{MAX_NAME_LENGTH}}})")
_KEY_END = re.compile(rf'[:,{{}}\[\]"{QUOTE}]')
_VALUE_END = re.compile(rf"[,\]}}{_SPACE}]")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# Templates write a missing value in the word of whatever language renders them.
_WORDS = {"true": True, "false": False, "null": None, "none": None, "None": None, "nil": None}


@dataclass(frozen=True)
class ToolCall:
    """A call that is complete and well formed; argument values are what JSON can hold."""

    name: str
    arguments: dict[str, Any]

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)


class CallReader:
    """Reads the source of one call piece by piece, QUOTE standing for the quote token.

    All that `push` and `close` return, put together, is the arguments' JSON. It begins with the first value, and the
    brace that ends it comes from `close` alone: what a call that never ends has said is no JSON, and nobody can act on
    it. Integers stay integers, of any size.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._source = ""  # not read yet
        self._held = ""  # JSON that stands in front of the next value, or behind the last one
        self._json: list[str] = []
        self._keys: list[set[str] | None] = []  # of the objects that are open, None for a list
        self._read: Callable[[], str | None] = self._read_head

    def push(self, source: str) -> str:
        """JSON that `source` made certain; often empty. Push nothing more after an error.

        Raises ValueError where it is no call: nested deeper than MAX_DEPTH, a key given twice, or a number that JSON
        cannot carry.
        """
        self._source += source
        pieces = []
        while self._skip_space() and (piece := self._read()) is not None:
            pieces.append(piece)
        self._json += pieces
        return "".join(pieces)

    def close(self) -> tuple[str, ToolCall]:
        """The rest of the JSON, and the call. Raises ValueError where it is unfinished."""
        if self._read != self._read_nothing or self.name is None:
            raise ValueError("the call is unfinished")
        return self._held, ToolCall(self.name, json.loads("".join([*self._json, self._held])))

    def _skip_space(self) -> bool:
        """Whether something follows. White space inside a string counts."""
        if self._read != self._read_string:
            self._source = self._source.lstrip(_SPACE)
        return self._source != ""

    # Each reads one element if all of it is there, and says what it makes certain; None: more is needed.

    def _read_head(self) -> str | None:
        at = self._end(self._source.find("{"))
        if at is None:
            return None
        head = _HEAD.fullmatch(self._source, 0, at)
        if head is None:
            raise ValueError("expected call:NAME{")
        self.name = head[1]
        self._take(at)
        self._open("{")
        return ""

    def _read_first_key(self) -> str | None:
        return self._close_container() if self._source[0] == "}" else self._read_key()

    def _read_key(self) -> str | None:
        if self._source[0] == QUOTE:
            at = self._end(self._source.find(QUOTE, 1))
            if at is None:
                return None
            key = self._source[1:at]
            self._take(at + 1)
        else:
            found = _KEY_END.search(self._source)
            at = self._end(found.start() if found else -1)
            if at is None:
                return None
            key = self._source[:at].rstrip(_SPACE)
            if not key or self._source[at] != ":":
                raise ValueError("expected a key")
            self._take(at)
        keys = self._keys[-1]
        assert keys is not None
        if key in keys:  # a function must not run with one of two values at the parser's choice
            raise ValueError(f"the key {key!r} stands twice")
        keys.add(key)
        self._held += f"{json.dumps(key, ensure_ascii=False)}: "
        self._read = self._read_colon
        return ""

    def _read_colon(self) -> str:
        if self._source[0] != ":":
            raise ValueError("expected ':'")
        self._take(1)
        self._read = self._read_value
        return ""

    def _read_first_entry(self) -> str | None:
        return self._close_container() if self._source[0] == "]" else self._read_value()

    def _read_value(self) -> str | None:
        first = self._source[0]
        if first in "{[":
            self._open(first)
            return self._release("")
        if first == QUOTE:
            self._take(1)
            self._read = self._read_string
            return self._release('"')
        found = _VALUE_END.search(self._source)
        at = self._end(found.start() if found else -1)
        if at is None:
            return None
        value = _word_or_number(self._source[:at])
        self._take(at)
        self._read = self._read_behind_value
        return self._release(json.dumps(value))

    def _read_string(self) -> str:
        text, quote, self._source = self._source.partition(QUOTE)
        said = json.dumps(text, ensure_ascii=False)[1:-1]
        if not quote:
            return said
        self._read = self._read_behind_value
        return said + '"'

    def _read_behind_value(self) -> str:
        keys = self._keys[-1]
        if self._source[0] == ",":
            self._take(1)
            self._held = ", "
            self._read = self._read_value if keys is None else self._read_key
            return ""
        if self._source[0] != ("]" if keys is None else "}"):
            raise ValueError("expected ',' or the end of a list or an object")
        return self._close_container()

    def _read_nothing(self) -> str:
        raise ValueError("expected the end")

    def _open(self, bracket: str) -> None:
        if len(self._keys) == MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        self._keys.append(set() if bracket == "{" else None)
        self._take(1)
        self._held += bracket
        self._read = self._read_first_key if bracket == "{" else self._read_first_entry

    def _close_container(self) -> str:
        self._keys.pop()
        bracket = self._source[0]
        self._take(1)
        if self._keys:
            self._read = self._read_behind_value
            return self._release(bracket)
        self._held += bracket
        self._read = self._read_nothing
        return ""

    def _release(self, json_text: str) -> str:
        held, self._held = self._held, ""
        return held + json_text

    def _take(self, count: int) -> None:
        self._source = self._source[count:]

    def _end(self, at: int) -> int | None:
        """Where an element ends; None: not yet. Bounds what is searched again with every token."""
        if (at if at >= 0 else len(self._source)) > _MAX_LEXEME:
            raise ValueError(f"a name, key or number has more than {_MAX_LEXEME} characters")
        return at if at >= 0 else None


def _word_or_number(text: str) -> int | float | bool | None:
    if text in _WORDS:
        return _WORDS[text]
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError("expected a value")
    whole, fraction, exponent = match.groups()
    if fraction is None and exponent is None:
        return int(whole)  # ValueError beyond Python's bound of digits
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for JSON")
    return value
