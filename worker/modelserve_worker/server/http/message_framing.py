"""Heads of HTTP/1 messages that can be read in one way only.

A proxy in front may see the end of a request elsewhere than this server where its head names two lengths, is folded,
or ends its lines otherwise than by CR LF: what one of them takes for a body is the next request of the other. RFC 9112
lets a server repair some of these shapes (2.2, 5.2, 6.3); here none of them is answered, on any route, and the
connection is closed behind the refusal. h11 refuses the rest: signed lengths, other codings, chunks without an end.
"""

from __future__ import annotations

from collections.abc import Sequence

import h11
from h11._receivebuffer import ReceiveBuffer  # where h11 finds the end of a head; there is no public name for it


class StrictReceiveBuffer(ReceiveBuffer):
    """h11's buffer of received bytes. Raises h11.RemoteProtocolError for a head, or trailers, of two meanings."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        held = bytes(self._data)
        lines = super().maybe_extract_lines()
        if lines is not None:
            _require_line_ends(held[: len(held) - len(self._data)])
            _require_one_length(lines)
        return lines


def _require_line_ends(head: bytes) -> None:
    if head.count(b"\n") != head.count(b"\r\n"):
        raise _fault("a line of the head ends with a line feed alone; end lines with CR LF")
    if head.count(b"\r") != head.count(b"\r\n"):
        raise _fault("a line of the head holds a carriage return that does not end it")


def _require_one_length(lines: Sequence[bytearray]) -> None:
    """`lines`: a request line and headers, or trailers, which say nothing of lengths."""
    lengths: list[bytes] = []
    codings: list[bytes] = []
    for line in map(bytes, lines):
        if line[:1] in (b" ", b"\t"):
            raise _fault("a header continues in a second line; send each header in one")
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            lengths.append(value.strip(b" \t"))
        elif name.lower() == b"transfer-encoding":
            codings.append(value.strip(b" \t").lower())
    if len(lengths) > 1 or any(not length.isdigit() for length in lengths):
        raise _fault(f"Content-Length is {_shown(lengths)}; send one number of bytes, once")
    if codings and lengths:
        raise _fault("Transfer-Encoding and Content-Length stand together; send one of them")
    if codings and codings != [b"chunked"]:
        raise _fault(f"Transfer-Encoding is {_shown(codings)}; send 'chunked', once, or a Content-Length")
    if codings and lines[0].endswith(b"HTTP/1.0"):
        raise _fault("HTTP/1.0 has no Transfer-Encoding; send a Content-Length")


def _shown(values: Sequence[bytes]) -> str:
    return " and ".join(repr(value[:40].decode("latin-1")) for value in values[:3])


def _fault(message: str) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(message, error_status_hint=400)
