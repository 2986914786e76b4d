"""A body of multipart/form-data, in memory: what its parts are called, and what they hold. The parser is imported with
the first form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelserve_worker.server.errors.errors import ApiError

MOST_PARTS = 64
_FORM = b"multipart/form-data"


@dataclass
class _Part:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)


class _Reader:
    """What the parser finds, in order."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self._name = self._value = b""

    def begin(self) -> None:
        if len(self.parts) == MOST_PARTS:
            raise _invalid(f"it has more than {MOST_PARTS} parts")
        self.parts.append(_Part())

    def name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header(self) -> None:
        self.parts[-1].headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data += data[start:end]


def boundary_of(content_type: str) -> bytes:
    """Of the type of a form. Raises ApiError for another type."""
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type.encode("latin-1"))
    if kind != _FORM or not options.get(b"boundary"):
        raise ApiError(
            f"the content type {content_type[:80]!r} is not supported; send a form with a file, multipart/form-data",
            status=415, code="unsupported_media_type",
        )  # fmt: skip
    return options[b"boundary"]


def read_form(data: bytes, boundary: bytes) -> dict[str, list[bytes]]:
    """What the parts of each name hold, `[]` behind a name left out. Raises ApiError for what is no such form."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    reader = _Reader()
    callbacks: Any = {
        "on_part_begin": reader.begin, "on_header_field": reader.name, "on_header_value": reader.value,
        "on_header_end": reader.header, "on_part_data": reader.data,
    }  # fmt: skip
    try:
        parser = MultipartParser(boundary, callbacks)
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise _invalid(str(error)) from error
    fields: dict[str, list[bytes]] = {}
    for part in reader.parts:
        _, options = parse_options_header(part.headers.get(b"content-disposition"))
        if not (name := options.get(b"name", b"").decode(errors="replace")):
            raise _invalid("a part of it has no name")
        fields.setdefault(name.removesuffix("[]"), []).append(bytes(part.data))
    if not fields:
        raise _invalid("it has no parts, or ends before the first")
    return fields


def _invalid(why: str) -> ApiError:
    return ApiError(f"the body is not a valid form: {why}", code="invalid_form")
