"""What goes to a process that decodes images, and the first byte of what comes back."""

from __future__ import annotations

from typing import NamedTuple

OK, FAILED, NO_MEMORY = b"\0", b"\1", b"\2"


class DecodeOrder(NamedTuple):
    """What is known of an image, and the size in pixels that it is made. `format` is Pillow's name, `width` and
    `height` are as stored, `orientation` is EXIF's."""

    format: str
    width: int
    height: int
    orientation: int
    resized_height: int
    resized_width: int
