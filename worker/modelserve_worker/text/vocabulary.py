"""The bytes of every token.

Byte-level BPE and byte-fallback tokenizers both map a token to a fixed byte string, whatever stands beside it. With
that table a stream of tokens is a stream of bytes, and UTF-8 can be decoded exactly, one token at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from modelserve.errors import InvalidInput

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> str:
    """Byte-level BPE writes each byte as one visible character: itself where printable, else from U+0100 upwards."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in visible else next(spare)) for byte in range(256))


BYTE_LEVEL_ALPHABET = _alphabet()
_BYTE_OF = {letter: byte for byte, letter in enumerate(BYTE_LEVEL_ALPHABET)}


@dataclass(frozen=True)
class Vocabulary:
    """`token_bytes[id]` is what the token stands for; ids without a token stand for nothing."""

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    ids: dict[str, int]

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of the token; none for an id beyond the tokenizer (models pad their vocabulary)."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def with_texts(self, texts: Mapping[int, str]) -> Vocabulary:
        """With tokens, by id, that stand for the same as the token that is found by their text."""
        if not texts:
            return self
        table = list(self.token_bytes)
        for token_id, text in texts.items():
            table[token_id] = table[self.ids[text]]
        return replace(self, token_bytes=tuple(table))

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Raises InvalidInput when tokenizer.json has a decoder whose output depends on neighbouring tokens."""
        to_bytes = _piece_decoder(json.loads(tokenizer.to_str()).get("decoder"))
        ids = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        table = [b""] * (max(ids.values()) + 1)
        for piece, token_id in ids.items():
            table[token_id] = piece.encode() if token_id in added else to_bytes(piece)
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        return cls(tuple(table), special, ids)


def _piece_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if not kinds <= {"Replace", "ByteFallback", "Fuse"} or "ByteFallback" not in kinds:
        raise InvalidInput(
            f"tokenizer.json: decoder {sorted(kinds)} is not supported; ByteLevel, and Replace with ByteFallback are",
            field="decoder",
        )
    replacements = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    if any(pattern is None for pattern, _ in replacements):
        raise InvalidInput("tokenizer.json: a Replace decoder must have a String pattern", field="decoder")
    return lambda piece: _byte_fallback(piece, replacements)


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[letter] for letter in piece)
    except KeyError:  # a token written as plain text
        return piece.encode()


def _byte_fallback(piece: str, replacements: list[tuple[str, str]]) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    for pattern, content in replacements:
        piece = piece.replace(pattern, content)
    return piece.encode()
