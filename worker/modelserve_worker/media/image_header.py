"""What an image's bytes say of it before a pixel is decoded: its format by magic, its size, how it is to be turned.

Only headers are walked, in time proportional to their number, which is bounded. A header may lie: the decoder compares
it with what it finds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from modelserve_worker.media.media_error import MediaUndecodable

SERVED = "JPEG, PNG, WebP and GIF"
_MOST_PIECES = 65_536  # segments, chunks or blocks of one file
_ORIENTATION = 0x0112
_INTEGERS = {1: ("B", 1), 3: ("H", 2), 4: ("I", 4)}  # TIFF's types
_OTHERS = {  # what people send else: offset of the magic, magic, name
    "HEIC or AVIF": (4, (b"ftyp",)),
    "TIFF": (0, (b"II*\0", b"MM\0*")),
    "BMP": (0, (b"BM",)),
    "SVG or XML": (0, (b"<svg", b"<?xml")),
    "PDF": (0, (b"%PDF",)),
    "JPEG XL": (0, (b"\xff\x0a", b"\0\0\0\x0cJXL ")),
}


class ImageHeader(NamedTuple):
    """`format` as Pillow names it; `width` and `height` as stored; `orientation` is EXIF's: 1 to 8, left out 1."""

    format: str
    width: int
    height: int
    orientation: int

    @property
    def turned(self) -> tuple[int, int]:
        """Height and width once it is turned upright."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)

    @property
    def pixels(self) -> int:
        return self.width * self.height


def read_image_header(data: bytes) -> ImageHeader:
    """Of a JPEG, PNG, WebP or GIF file, whatever its name or declared type. Raises MediaUndecodable."""
    for magic, name, read in _READERS:
        if data.startswith(magic) and (name != "WEBP" or data[8:12] == b"WEBP"):
            try:
                header = read(data)
            except (struct.error, IndexError) as error:
                raise MediaUndecodable(f"the {name} file ends inside its header; send the whole file") from error
            if not header.pixels:
                raise MediaUndecodable(f"the {name} file says it is {header.width} x {header.height} pixels large")
            return header
    other = next((name for name, (at, magics) in _OTHERS.items() if data[at:].startswith(magics)), None)
    found = f"it looks like {other}" if other else f"it begins with {data[:4].hex() or 'nothing'}"
    raise MediaUndecodable(f"{found}, which is no image that is read here; send {SERVED}")


def _jpeg(data: bytes) -> ImageHeader:
    """Segments to the first scan."""
    size, orientation, at = None, 1, 2
    for _ in _bounded("JPEG"):
        while data[at] != 0xFF:  # as decoders do, over what is no marker
            at = data.find(b"\xff", at)
            if at < 0:
                raise IndexError
        while data[at] == 0xFF:
            at += 1
        marker, at = data[at], at + 1
        if marker == 0xDA or marker == 0xD9:
            break
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:
            continue
        length = _unpack(">H", data, at)
        if length < 2:
            raise MediaUndecodable("the JPEG file has a segment without a length")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if size is not None:
                raise MediaUndecodable("the JPEG file says twice how large it is")
            size = struct.unpack_from(">HH", data, at + 3)
        elif marker == 0xE1 and data[at + 2 : at + 8] == b"Exif\0\0" and orientation == 1:
            orientation = exif_orientation(data[at + 8 : at + length])
        at += length
    if size is None:
        raise MediaUndecodable("the JPEG file does not say how large it is")
    return ImageHeader("JPEG", size[1], size[0], orientation)


def _png(data: bytes) -> ImageHeader:
    """Chunks to the last, since EXIF may stand behind the pixels."""
    if data[12:16] != b"IHDR":
        raise MediaUndecodable("the PNG file does not begin with its header")
    width, height = struct.unpack_from(">II", data, 16)
    orientation, at = 1, 8
    for _ in _bounded("PNG"):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"eXIf":
            orientation = exif_orientation(data[at + 8 : at + 8 + length])
            break
        if kind == b"IEND":
            break
        at += 12 + length
    return ImageHeader("PNG", width, height, orientation)


def _webp(data: bytes) -> ImageHeader:
    size, orientation, at = None, 1, 12
    for _ in _bounded("WEBP"):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        body = at + 8
        if kind == b"VP8X" and size is None:
            size = (1 + _unpack_24(data, body + 4), 1 + _unpack_24(data, body + 7))
        elif kind == b"VP8L" and size is None:
            bits = _unpack("<I", data, body + 1)
            size = (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        elif kind == b"VP8 " and size is None:
            wide, high = struct.unpack_from("<HH", data, body + 6)
            size = (wide & 0x3FFF, high & 0x3FFF)
        elif kind == b"EXIF":
            orientation = exif_orientation(data[body : body + length].removeprefix(b"Exif\0\0"))
        at = body + length + (length & 1)
    if size is None:
        raise MediaUndecodable("the WebP file does not say how large it is")
    return ImageHeader("WEBP", *size, orientation)


def _gif(data: bytes) -> ImageHeader:
    """The canvas with the whole of the first frame, which may be larger."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _colours(flags)
    for _ in _bounded("GIF"):
        kind = data[at]
        if kind == 0x2C:
            left, top, wide, high = struct.unpack_from("<HHHH", data, at + 1)
            return ImageHeader("GIF", max(width, left + wide), max(height, top + high), 1)
        if kind == 0x3B:
            break
        at += 1
        if kind == 0x21:
            at += 1
            while data[at]:
                at += 1 + data[at]
            at += 1
    raise MediaUndecodable("the GIF file holds no frame")


def _colours(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def exif_orientation(tiff: bytes) -> int:
    """1 to 8, of an EXIF block from its byte order on; 1 where it says nothing that has a meaning."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        at = _unpack(order + "I", tiff, 4)
        entries = _unpack(order + "H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", tiff, entry)
            if tag == _ORIENTATION:
                value = _unpack(order + _INTEGERS[kind][0], tiff, entry + 8) if kind in _INTEGERS and count == 1 else 1
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _unpack(form: str, data: bytes, at: int) -> int:
    (value,) = struct.unpack_from(form, data, at)
    return int(value)


def _unpack_24(data: bytes, at: int) -> int:
    return _unpack("<H", data, at) | data[at + 2] << 16


def _bounded(name: str) -> Iterator[int]:
    yield from range(_MOST_PIECES)
    raise MediaUndecodable(f"the {name} file has more than {_MOST_PIECES} pieces before its pixels end; save it anew")


_READERS: tuple[tuple[bytes, str, Callable[[bytes], ImageHeader]], ...] = (
    (b"\xff\xd8\xff", "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"RIFF", "WEBP", _webp),
    (b"GIF87a", "GIF", _gif),
    (b"GIF89a", "GIF", _gif),
)
