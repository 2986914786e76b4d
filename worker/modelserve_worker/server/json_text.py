"""JSON as clients send it (what RFC 8259 allows, and nothing that Python reads beside it) and as they get it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import msgspec

# Python's parser keeps the interpreter to itself from the first byte to the last, so what it may have to build is
# bounded before it starts. Each bound alone is about 0.1 s of a slow core; a body of text is far below all of them.
MAX_CONTAINERS = 100_000  # objects and lists
MAX_MEMBERS = 100_000  # names in objects
MAX_VALUES = 500_000  # what commas part: token ids, mostly

_STRINGS_PER_LOOK = 1024
_ITEMS_PER_PIECE = 64  # of a list of small items: 0.1 MB where each says the log probabilities of 20 tokens
_MOST_PARTS = 1024  # of a list whose items may be large: as many as a request has choices

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps would build one per call
_encode_plain = msgspec.json.Encoder().encode
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # an unfinished one ends with the text


def to_json(document: Any) -> bytes:
    """Compact, in UTF-8. The document's text must be valid Unicode.

    msgspec writes an event in a tenth of the time. What it does not know (a subclass of a string or a number), Python's
    encoder writes.
    """
    try:
        return _encode_plain(document)
    except TypeError:
        return _encode(document).encode()


def to_json_in_pieces(document: Any) -> bytes:
    """As `to_json`, for large documents, in a thread: the encoder keeps the interpreter to itself from the first byte
    to the last, here between two pieces others get it. An iterator in the document is a list whose items are made as
    they are encoded.
    """
    return b"".join(_pieces(document))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        mark = b"{"
        for name, inner in value.items():
            yield mark + to_json(name) + b":"
            yield from _pieces(inner)
            mark = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator) or (isinstance(value, list) and len(value) > _MOST_PARTS):
        items, mark = iter(value), b"["
        while some := list(islice(items, _ITEMS_PER_PIECE)):
            yield mark + to_json(some)[1:-1]
            mark = b","
        yield b"[]" if mark == b"[" else b"]"
    elif isinstance(value, list):
        mark = b"["
        for item in value:
            yield mark
            yield from _pieces(item)
            mark = b","
        yield b"]" if value else b"[]"
    else:
        yield to_json(value)


def read_json(text: str | bytes) -> Any:
    """The document; bytes are UTF-8. Raises ValueError, for NaN, infinities and numbers beyond a float, too.

    msgspec reads what nearly every client sends, lists of token ids in a third of the time. Python's parser has the
    last word on what it refuses: it says in a reader's words what is wrong, and lets more pass (a byte order mark, half
    of a surrogate pair).
    """
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return _read_with_reasons(text)


def _read_with_reasons(text: str | bytes) -> Any:
    try:
        # Bytes that Python is left to decode may be UTF-16, too, in which structure could not be counted.
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@dataclass
class _Structure:
    """Characters that build something, counted."""

    containers: int = 0
    members: int = 0
    values: int = 0

    def count(self, data: bytes, begin: int = 0, end: int | None = None) -> None:
        self.containers += data.count(b"[", begin, end) + data.count(b"{", begin, end)
        self.members += data.count(b":", begin, end)
        self.values += data.count(b",", begin, end)

    def excess(self) -> str | None:
        for found, limit, what in (
            (self.containers, MAX_CONTAINERS, "objects and lists"),
            (self.members, MAX_MEMBERS, "names in objects"),
            (self.values, MAX_VALUES, "values"),
        ):
            if found > limit:
                return f"more than {limit} {what}"
        return None


def structure_excess(data: bytes) -> str | None:
    """What a JSON text has too much of, such as "more than 100000 objects and lists"; None where it may be read.

    A text shorter than the least bound has nothing to count. Else, nearly always, this is four searches for one
    character. Where these find too many, characters inside strings are told from the others, so text is never refused
    for its punctuation; Python code does that and lets others run.
    """
    if len(data) <= min(MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES):
        return None
    rough = _Structure()
    rough.count(data)
    if rough.excess() is None:
        return None
    exact = _Structure()
    at = 0
    for number, string in enumerate(_STRING.finditer(data)):
        exact.count(data, at, string.start())
        if number % _STRINGS_PER_LOOK == 0 and (excess := exact.excess()):
            return excess
        at = string.end()
    exact.count(data, at)
    return exact.excess()


def nested_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` objects and lists stand inside each other, `value` counted."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]} is too large")
    return value
