"""Reads the header of a GGUF file: its metadata, and where each tensor lies. No tensor is read.

Every count, length and offset is compared with the file's size before anything is made of it, so a file that lies costs
no memory. Long arrays, which hold the vocabulary, stay where they are: `ArraySpan` says where.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from modelserve.errors import InvalidInput
from modelserve.model.gguf.block_types import BLOCK_TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 had lengths of 32 bits, and nobody wrote Gemma 4 so
MAX_HEADER_BYTES = 100_000_000  # published ones take 15 to 20 MB
MAX_KEY_BYTES = 65535  # limits of the format
MAX_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_TEXT_BYTES = 16 << 20  # of one value; the longest, chat templates, have some 20 KB
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
KEPT_ELEMENTS = 4096  # of arrays that are read at once: those of layers; longer ones stay in the file
READ_BYTES = 1 << 20  # at once, of what is looked at in order
LEAST_ENTRY_BYTES = 13  # an empty key, its type, a value of one byte
LEAST_TENSOR_BYTES = 32  # an empty name, one dimension, type, offset

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

ReadBytes = Callable[[int, int], bytes]
"""Called with (start, count): those bytes of the file, fewer where it ends."""
Scalar = int | float | bool


@dataclass(frozen=True, slots=True)
class ArraySpan:
    """An array that was left in the file: `count` elements in bytes [start, end)."""

    element: int  # type of the format
    count: int
    start: int
    end: int


Value = Scalar | str | tuple[Scalar, ...] | tuple[str, ...] | ArraySpan


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: bytes [start, end) of the file. `shape` is as torch has it, the fastest dimension last."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensors: metadata by key, the tensors by name, and where the header ends."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    end: int
    size: int = field(compare=False)  # of the file


def read_gguf_header(read: ReadBytes, *, size: int, name: str) -> GgufHeader:
    """The header of a file of `size` bytes that messages call `name`.

    Raises InvalidInput, which says what is wrong, the value and the limit, for anything that is no header of a file of
    this size: counts and lengths beyond the file, unknown types, repeated names, tensors that overlap or end behind it.
    """
    cursor = _Cursor(read, size, name)
    if cursor.take(4, "its magic") != MAGIC:
        raise InvalidInput(f"{name} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = cursor.number("<I", "its version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "is big-endian" if swapped else f"has version {version}"
        raise InvalidInput(f"{name} {what}; little-endian files of version 2 and 3 are read: convert it again")
    tensors = cursor.count(LEAST_TENSOR_BYTES, "tensors")
    entries = cursor.count(LEAST_ENTRY_BYTES, "metadata entries")
    metadata: dict[str, Value] = {}
    for _ in range(entries):
        key = cursor.text(MAX_KEY_BYTES, "a metadata key")
        if key in metadata:
            raise InvalidInput(f"{name}: metadata key {key[:64]!r} stands there twice")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise InvalidInput(
            f"{name}: general.alignment is {str(alignment)[:64]}; it must be a power of two up to {MAX_ALIGNMENT}"
        )
    found = [_tensor(cursor, alignment) for _ in range(tensors)]
    data = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, _placed(found, data, size, name), cursor.position, size)


def read_strings(read: ReadBytes, span: ArraySpan) -> Iterator[bytes]:
    """The strings of an array that was left in the file, in order; the header was read, so they lie inside it."""
    cursor = _Cursor(read, span.end, "the file", start=span.start)
    for _ in range(span.count):
        yield cursor.take(cursor.number("<Q", "a string's length"), "a string")


def read_numbers(read: ReadBytes, span: ArraySpan) -> tuple[Scalar, ...]:
    """The numbers of an array that was left in the file. Raises InvalidInput where it is one of strings."""
    if span.element not in _SCALARS:
        raise InvalidInput(f"an array of {span.count} elements holds strings, not numbers")
    return _numbers(read(span.start, span.end - span.start), span.element)


def _numbers(raw: bytes, element: int) -> tuple[Scalar, ...]:
    return tuple(value for (value,) in struct.iter_unpack(_SCALARS[element], raw))


class _Cursor:
    """Reads a file from front to back, a window of it at a time, and never past its end."""

    def __init__(self, read: ReadBytes, size: int, name: str, *, start: int = 0) -> None:
        self.size, self.name, self.position = size, name, start
        self.limit = min(size, start + MAX_HEADER_BYTES)
        self._read, self._window, self._first = read, b"", start

    def take(self, count: int, what: str) -> bytes:
        self.check(count, what)
        begin = self.position - self._first
        if begin + count > len(self._window):
            wanted = min(max(count, READ_BYTES), self.limit - self.position)
            self._window, self._first, begin = self._read(self.position, wanted), self.position, 0
            if len(self._window) < count:
                raise InvalidInput(
                    f"{self.name} is cut short: byte {self.position + len(self._window)} of {self.size} cannot be read"
                )
        self.position += count
        return self._window[begin : begin + count]

    def check(self, count: int, what: str) -> None:
        """Raises InvalidInput where so many bytes are no longer there."""
        if count > self.limit - self.position:
            where = f"{self.name}: {what} at byte {self.position} would take {count} bytes"
            if self.limit < self.size:
                raise InvalidInput(f"{where}, but a header may take {MAX_HEADER_BYTES} at most: convert it again")
            raise InvalidInput(f"{where} of the {self.limit - self.position} that are left: download it again")

    def skip(self, count: int, what: str) -> None:
        self.check(count, what)
        self.position += count

    def number(self, code: str, what: str) -> int:
        value = struct.unpack(code, self.take(struct.calcsize(code), what))[0]
        assert isinstance(value, int)
        return value

    def count(self, least: int, what: str) -> int:
        """A count of things of which each takes `least` bytes or more."""
        count = self.number("<Q", f"the number of {what}")
        if count * least > self.limit - self.position:
            raise InvalidInput(
                f"{self.name} states {count} {what}, but only {(self.limit - self.position) // least} would have room "
                "there: download it again"
            )
        return count

    def text(self, limit: int, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            raise InvalidInput(f"{self.name}: {what} at byte {self.position} has {length} bytes; {limit} are allowed")
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{self.name}: {what} {raw[:32]!r} is not UTF-8") from error


def _value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number("<I", f"the type of {key[:64]!r}")
    if kind == _STRING:
        return cursor.text(MAX_TEXT_BYTES, f"the value of {key[:64]!r}")
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise InvalidInput(f"{cursor.name}: metadata key {key[:64]!r} has type {kind}, which the format does not know")
    return _numbers(cursor.take(struct.calcsize(_SCALARS[kind]), f"the value of {key[:64]!r}"), kind)[0]


def _array(cursor: _Cursor, key: str) -> Value:
    element = cursor.number("<I", f"the element type of {key[:64]!r}")
    if element != _STRING and element not in _SCALARS:
        what = "holds arrays" if element == _ARRAY else f"has elements of type {element}"
        raise InvalidInput(f"{cursor.name}: the array {key[:64]!r} {what}; strings and numbers are known")
    width = 8 if element == _STRING else struct.calcsize(_SCALARS[element])
    count = cursor.count(width, f"elements of {key[:64]!r}")
    start = cursor.position
    if element == _STRING:
        if count <= KEPT_ELEMENTS and not key.startswith("tokenizer."):
            return tuple(cursor.text(MAX_TEXT_BYTES, f"an element of {key[:64]!r}") for _ in range(count))
        for _ in range(count):
            cursor.skip(cursor.number("<Q", f"an element of {key[:64]!r}"), f"an element of {key[:64]!r}")
        return ArraySpan(element, count, start, cursor.position)
    if count <= KEPT_ELEMENTS and not key.startswith("tokenizer."):
        return _numbers(cursor.take(count * width, f"the array {key[:64]!r}"), element)
    cursor.skip(count * width, f"the array {key[:64]!r}")
    return ArraySpan(element, count, start, cursor.position)


def _tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """One entry; `start` still counts from the first tensor on."""
    name = cursor.text(MAX_NAME_BYTES, "a tensor's name")
    dimensions = cursor.number("<I", f"the dimensions of {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise InvalidInput(
            f"{cursor.name}: tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed"
        )
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, f"the shape of {name!r}"))[::-1]
    number = cursor.number("<I", f"the type of {name!r}")
    offset = cursor.number("<Q", f"the offset of {name!r}")
    kind = BLOCK_TYPES.get(number)
    if kind is None:
        raise InvalidInput(
            f"{cursor.name}: tensor {name!r} has type {number}, which is not known: use a Q4_0 or Q8_0 file"
        )
    if 0 in shape or shape[-1] % kind.elements:
        raise InvalidInput(
            f"{cursor.name}: tensor {name!r} has shape {list(shape)}; rows of {kind.name} are whole blocks of "
            f"{kind.elements}"
        )
    if offset % alignment:
        raise InvalidInput(f"{cursor.name}: tensor {name!r} lies at {offset}, no multiple of the alignment {alignment}")
    return GgufTensor(name, kind, shape, offset, offset + math.prod(shape) // kind.elements * kind.bytes)


def _placed(found: list[GgufTensor], data: int, size: int, name: str) -> dict[str, GgufTensor]:
    """The tensors by name, in file order, at bytes of the file. Raises InvalidInput where two overlap, or one ends
    behind the file."""
    placed: dict[str, GgufTensor] = {}
    before: GgufTensor | None = None
    for each in sorted(found, key=lambda tensor: tensor.start):
        tensor = GgufTensor(each.name, each.type, each.shape, data + each.start, data + each.end)
        if tensor.name in placed:
            raise InvalidInput(f"{name}: tensor {tensor.name!r} stands there twice")
        if before is not None and tensor.start < before.end:
            raise InvalidInput(
                f"{name}: tensors {before.name!r} (to byte {before.end}) and {tensor.name!r} (from {tensor.start}) "
                "overlap: download it again"
            )
        if tensor.end > size:
            raise InvalidInput(
                f"{name} is cut short: tensor {tensor.name!r} lies at bytes {tensor.start} to {tensor.end}, the file "
                f"has {size}: download it again"
            )
        placed[tensor.name], before = tensor, tensor
    return placed
