"""One GET over an open connection, by h11, which reads what a hostile host may send strictly and within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import h11

from modelserve_worker.media.fetching.place import Place
from modelserve_worker.media.media_error import MediaFetchFailed, MediaTooLarge

_PIECE = 64 * 1024
_HEAD_BYTES = 32 * 1024  # of an answer, interim ones included
_MOST_PIECES = 65_536  # of a body: 256 bytes each, of the largest image
_IN_A_ROW = 64  # pieces that are taken before others of the event loop have their turn
_MOVED = (301, 302, 303, 307, 308)


class Answer(NamedTuple):
    """The bytes, or where they are said to be."""

    data: bytes
    location: str | None = None


async def get(
    place: Place,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    most_bytes: int,
    hold: Callable[[int], None],
) -> Answer:
    """What the place answers; `hold` is told of bytes before they are kept, and may raise. Raises MediaTooLarge beyond
    `most_bytes`, MediaFetchFailed for any answer but an image or a redirect, and OSError."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
    asked = h11.Request(
        method="GET",
        target=place.target,
        headers=[
            ("Host", place.host),
            ("User-Agent", "modelserve"),
            ("Accept", "image/jpeg, image/png, image/webp, image/gif, audio/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ],
    )
    writer.write((connection.send(asked) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    data, before, pieces = bytearray(), 0, 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            piece = await reader.read(_PIECE)
            if connection.their_state is h11.SEND_RESPONSE:
                before += len(piece)
                if before > _HEAD_BYTES + _PIECE:
                    raise MediaFetchFailed(f"{place.shown!r}: the answer has no end of its head")
            connection.receive_data(piece)
        elif isinstance(event, h11.Response):
            if (location := _location(event, place)) is not None:
                return Answer(b"", location)
            _require_image(event, place, most_bytes)
        elif isinstance(event, h11.Data):
            if len(data) + len(event.data) > most_bytes:
                raise _too_large(place, f"has more than {most_bytes} bytes")
            hold(len(event.data))
            data += event.data
            pieces += 1
            if pieces > _MOST_PIECES:
                raise MediaFetchFailed(f"{place.shown!r} comes in more than {_MOST_PIECES} pieces")
            if pieces % _IN_A_ROW == 0:
                await asyncio.sleep(0)
        elif isinstance(event, h11.EndOfMessage):
            return Answer(bytes(data))


def _location(answer: h11.Response, place: Place) -> str | None:
    if answer.status_code not in _MOVED:
        return None
    found = _header(answer, b"location")
    if found is None:
        raise MediaFetchFailed(f"{place.shown!r} answers {answer.status_code} and does not say where it has moved")
    return found


def _require_image(answer: h11.Response, place: Place, most_bytes: int) -> None:
    if answer.status_code != 200:
        raise MediaFetchFailed(f"{place.shown!r} answers {answer.status_code}")
    if (encoding := _header(answer, b"content-encoding")) not in (None, "identity"):
        raise MediaFetchFailed(f"{place.shown!r} answers in the encoding {encoding!r}, which was not asked for")
    length = _header(answer, b"content-length")
    if length is not None and int(length) > most_bytes:  # h11 has seen that it is a number
        raise _too_large(place, f"has {length} bytes")


def _header(answer: h11.Response, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in answer.headers if key == name), None)


def _too_large(place: Place, what: str) -> MediaTooLarge:
    return MediaTooLarge(f"{place.shown!r} {what}, which is more than there is room for; make it smaller")
