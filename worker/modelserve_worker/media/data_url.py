"""The bytes that an image's or a sound's address holds itself, as a data: URL."""

from __future__ import annotations

import base64
import binascii

from modelserve_worker.media.media_error import MediaTooLarge, MediaUndecodable, MediaUrlRefused

_SPACE = b" \t\r\n"  # MIME wraps lines
_SHOWN = 60


def is_data(url: str) -> bool:
    return url.partition(":")[0].lower() == "data"


_EXAMPLES = {"image": "data:image/jpeg;base64,...", "sound": "data:audio/mpeg;base64,..."}


def data_of(url: str, *, most_bytes: int, what: str = "image") -> bytes:
    """What a data: URL with base64 holds; the type that it names is not looked at. Raises MediaUrlRefused for another
    address, MediaTooLarge before anything is decoded, MediaUndecodable for what is no base64."""
    rest = url.partition(":")[2]
    if not is_data(url):
        shown = url[:_SHOWN] + ("..." if len(url) > _SHOWN else "")
        raise MediaUrlRefused(f"{shown!r}: this server fetches nothing; send the {what} itself, as {_EXAMPLES[what]}")
    head, comma, text = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaUndecodable(f"the data: URL is not base64; send {_EXAMPLES[what]}")
    return base64_data(text, most_bytes=most_bytes, what=what)


def base64_data(text: str, *, most_bytes: int, what: str = "image") -> bytes:
    """Raises MediaTooLarge before anything is decoded, MediaUndecodable for what is no base64."""
    if len(text) * 3 // 4 > most_bytes + most_bytes // 8:  # line ends are no bytes of it
        raise _too_large(len(text) * 3 // 4, most_bytes, what)
    try:
        data = base64.b64decode(text.encode("ascii").translate(None, _SPACE), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaUndecodable(f"the {what} is no valid base64: {error}") from error
    if len(data) > most_bytes:
        raise _too_large(len(data), most_bytes, what)
    return data


def _too_large(size: int, limit: int, what: str) -> MediaTooLarge:
    smaller = "smaller, or as JPEG" if what == "image" else "shorter, or as FLAC or OGG"
    return MediaTooLarge(f"the {what} has {size} bytes; the limit is {limit}: send it {smaller}")
