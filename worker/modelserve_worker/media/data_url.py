"""The bytes that an image's address holds itself, as a data: URL."""

from __future__ import annotations

import base64
import binascii

from modelserve_worker.media.media_error import MediaTooLarge, MediaUndecodable, MediaUrlRefused

_SPACE = b" \t\r\n"  # MIME wraps lines
_SHOWN = 60


def is_data(url: str) -> bool:
    return url.partition(":")[0].lower() == "data"


def data_of(url: str, *, most_bytes: int) -> bytes:
    """What a data: URL with base64 holds; the type that it names is not looked at. Raises MediaUrlRefused for another
    address, MediaTooLarge before anything is decoded, MediaUndecodable for what is no base64."""
    rest = url.partition(":")[2]
    if not is_data(url):
        shown = url[:_SHOWN] + ("..." if len(url) > _SHOWN else "")
        raise MediaUrlRefused(
            f"{shown!r}: this server fetches nothing; send the image itself, as data:image/jpeg;base64,..."
        )
    head, comma, text = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaUndecodable("the data: URL is not base64; send data:image/jpeg;base64,...")
    return base64_data(text, most_bytes=most_bytes)


def base64_data(text: str, *, most_bytes: int) -> bytes:
    """Raises MediaTooLarge before anything is decoded, MediaUndecodable for what is no base64."""
    if len(text) * 3 // 4 > most_bytes + most_bytes // 8:  # line ends are no bytes of it
        raise _too_large(len(text) * 3 // 4, most_bytes)
    try:
        data = base64.b64decode(text.encode("ascii").translate(None, _SPACE), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaUndecodable(f"the image is no valid base64: {error}") from error
    if len(data) > most_bytes:
        raise _too_large(len(data), most_bytes)
    return data


def _too_large(size: int, limit: int) -> MediaTooLarge:
    return MediaTooLarge(f"the image has {size} bytes; the limit is {limit}: send it smaller, or as JPEG")
