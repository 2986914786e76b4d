"""Writes GGUF files of any content, byte by byte: what a reader must take, and what it must refuse."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from modelserve.model.gguf.block_types import BLOCK_TYPES

NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
Stored = tuple[str, tuple[int, ...], bytes]  # type, shape with the fastest dimension last, bytes
_STRING, _ARRAY, _BOOL, _FLOAT, _INT, _UINT = 8, 9, 7, 6, 5, 4
_CODES = {_BOOL: "<?", _FLOAT: "<f", _INT: "<i", _UINT: "<I"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(given: Any) -> bytes:
    """A metadata value behind its type."""
    if isinstance(given, str):
        return struct.pack("<I", _STRING) + string(given)
    if isinstance(given, list | tuple):
        kind = _kind(given[0]) if given else _INT
        kind = _INT if kind == _UINT else kind
        elements = (string(each) if kind == _STRING else struct.pack(_CODES[kind], each) for each in given)
        return struct.pack("<IIQ", _ARRAY, kind, len(given)) + b"".join(elements)
    return struct.pack("<I", _kind(given)) + struct.pack(_CODES[_kind(given)], given)


def _kind(given: Any) -> int:
    kinds: list[tuple[Any, int]] = [((str, bytes), _STRING), (bool, _BOOL), (int, _UINT), (float, _FLOAT)]
    return next(kind for types, kind in kinds if isinstance(given, types))


def header(metadata: Mapping[str, Any], infos: Sequence[bytes], *, tensors: int | None = None) -> bytes:
    entries = b"".join(string(key) + value(each) for key, each in metadata.items())
    count = len(infos) if tensors is None else tensors
    return b"GGUF" + struct.pack("<IQQ", 3, count, len(metadata)) + entries + b"".join(infos)


def info(name: str, kind: int, shape: Sequence[int], offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, alignment: int = 32) -> bytes:
    infos, data = [], bytearray()
    for name, (kind, shape, raw) in tensors.items():
        infos.append(info(name, NUMBERS[kind], shape, len(data)))
        data += raw + bytes(-len(raw) % alignment)
    head = header(metadata, infos)
    return head + bytes(-len(head) % alignment) + bytes(data)
