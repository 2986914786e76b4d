"""Keeps a name from coming twice in one object of a JSON document, which a grammar cannot count where names are free.

The document is read byte by byte as its tokens are sampled; of the tokens that the grammar lets follow, those go that
would complete a name of the open object again. A name can always be made longer instead, which is what
`unrepeatable_names` asks of the names that a schema allows.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelserve.errors import InvalidInput

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_OPEN_END = re.compile(r"(?<!\\)(?:[*+]|\{\d+,\})\$\Z")


class TokenTable:
    """Bytes of a vocabulary's tokens, by their order and by the quotes in them. Control tokens have none."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        ordered = sorted(range(len(token_bytes)), key=token_bytes.__getitem__)
        self._ids = np.array(ordered, dtype=np.int64)
        self._ordered = [token_bytes[token] for token in ordered]
        # Those that may end a name in a way that `beginning` does not find.
        self.several = np.array(
            [i for i, data in enumerate(token_bytes) if data.count(b'"') + (b"\\" in data) > 1], dtype=np.int64
        )

    def beginning(self, prefix: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that begin with `prefix`, which ends below 0xff."""
        after = prefix[:-1] + bytes([prefix[-1] + 1])
        return self._ids[bisect_left(self._ordered, prefix) : bisect_left(self._ordered, after)]


class _NamesAhead:
    """Names that an object has, and those that a token not yet sampled would add."""

    def __init__(self, names: set[str] | _NamesAhead) -> None:
        self._names = names
        self._added: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names or name in self._added

    def add(self, name: str) -> None:
        self._added.add(name)


class UniqueKeys:
    """Reads one document; `bar` keeps its objects from naming anything twice."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._reset()

    def _reset(self) -> None:
        self._names: list[set[str] | _NamesAhead | None] = []  # of the objects that are open, None for a list
        self._name_next = False
        self._text: bytearray | None = None  # of the string that is open
        self._is_name = self._escaped = False

    def copy(self) -> UniqueKeys:
        """The same place in the document."""
        copied = UniqueKeys(self._table)
        copied._names = [set(names) if isinstance(names, set) else None for names in self._names]
        copied._name_next, copied._is_name, copied._escaped = self._name_next, self._is_name, self._escaped
        copied._text = None if self._text is None else bytearray(self._text)
        return copied

    def push(self, token_id: int) -> None:
        """A sampled token. A control token ends what stood before the document."""
        data = self._table.token_bytes[token_id] if token_id < len(self._table.token_bytes) else b""
        if not data:
            self._reset()
        for byte in data:
            self._read(byte)

    def bar(self, row: NDArray[np.int32]) -> None:
        """Take the tokens out of a mask, int32 [ceil(vocab / 32)], that would name something twice."""
        names = self._names[-1] if self._names else None
        if not any(self._names):
            return
        barred = [token for token in self._allowed(row, self._table.several) if self._repeats(token)]
        begun = _decoded(self._text) if self._is_name and self._text is not None else None
        if isinstance(names, set) and begun is not None:
            for name in names:
                if name.startswith(begun):
                    rest = json.dumps(name[len(begun) :], ensure_ascii=False)[1:].encode()
                    barred += self._table.beginning(rest).tolist()
        if barred:
            ids = np.array(barred)
            np.bitwise_and.at(row, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32))

    @staticmethod
    def _allowed(row: NDArray[np.int32], ids: NDArray[np.int64]) -> list[int]:
        allowed: list[int] = ids[(row[ids // 32] >> (ids % 32).astype(np.int32)) & 1 == 1].tolist()
        return allowed

    def _repeats(self, token_id: int) -> bool:
        ahead = UniqueKeys(self._table)
        ahead._names = [None if names is None else _NamesAhead(names) for names in self._names]
        ahead._name_next, ahead._is_name, ahead._escaped = self._name_next, self._is_name, self._escaped
        ahead._text = None if self._text is None else bytearray(self._text)
        return any(ahead._read(byte) for byte in self._table.token_bytes[token_id])

    def _read(self, byte: int) -> bool:
        """Whether this byte completes a name that the object has."""
        if self._text is not None:
            if byte != _QUOTE or self._escaped:
                self._escaped = byte == _BACKSLASH and not self._escaped
                self._text.append(byte)
                return False
            name, names = _decoded(self._text), self._names[-1] if self._names else None
            self._text = None
            if not self._is_name or names is None or name is None:
                return False
            known = name in names
            names.add(name)
            return known
        if byte == _QUOTE:
            self._text, self._is_name = bytearray(), self._name_next
        elif byte in b"{[":
            self._names.append(set() if byte == ord("{") else None)
        elif byte in b"}]" and self._names:
            self._names.pop()
        if byte in b"{,:[}]":
            self._name_next = byte in b"{," and bool(self._names) and self._names[-1] is not None
        return False


def _decoded(text: bytes | bytearray) -> str | None:
    """What a string, or the beginning of one, says; None inside a character or an escape."""
    try:
        decoded: str = json.loads(f'"{text.decode()}"', strict=False)
    except ValueError:
        return None
    return decoded


def unrepeatable_names(schema: Any, *, field: str) -> None:
    """Raises InvalidInput for `patternProperties` whose names may be so few that an object has to repeat one."""
    for each in _schemas(schema):
        patterns = each.get("patternProperties")
        for pattern in patterns if isinstance(patterns, dict) else ():
            if _closed(pattern):
                raise InvalidInput(
                    f"{field}: patternProperties {pattern!r:.80} cannot be followed: too few names may match "
                    "it to have each only once. Name them in properties, or let the pattern end openly, as '^x' or "
                    "'^x[a-z]*$' does",
                    field=field,
                )


def _closed(pattern: str) -> bool:
    """Whether a name may match that no longer name begins with; where in doubt, it may."""
    ends, alternatives, depth, in_class, escaped = 0, False, 0, False, False
    for character in pattern:
        if escaped or character == "\\":
            escaped = not escaped
        elif in_class:
            in_class = character != "]"
        else:
            in_class = character == "["
            depth += (character == "(") - (character == ")")
            ends += character == "$"
            alternatives |= character == "|" and depth == 0
    return ends > 0 and (ends > 1 or alternatives or _OPEN_END.search(pattern) is None)


def free_names(schema: Any) -> bool:
    """Whether some object of a document may have names that its schema does not list."""
    return schema is True or any(map(_is_free, _schemas(schema)))


def _is_free(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    if "type" not in schema and any(keyword in schema for keyword in ("enum", "const", "$ref", "anyOf", "oneOf")):
        return False
    return "patternProperties" in schema or schema.get("additionalProperties", True) is not False


def _schemas(document: Any) -> Iterator[dict[str, Any]]:
    """A schema and all in it, `true` as the empty one."""
    pending = [document]
    while pending:
        each = {} if pending[-1] is True else pending[-1]
        pending.pop()
        if not isinstance(each, dict):
            continue
        yield each
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(each.get(keyword), dict):
                pending += each[keyword].values()
        for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(each.get(keyword), list):
                pending += each[keyword]
        pending += [each.get("additionalProperties"), each.get("items", True if _may_be_list(each) else None)]


def _may_be_list(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds == "array" or (isinstance(kinds, list) and "array" in kinds)
