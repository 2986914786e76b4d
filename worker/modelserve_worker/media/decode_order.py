"""What goes to a process that decodes images and sounds, and the first byte of what comes back."""

from __future__ import annotations

from typing import NamedTuple

OK, FAILED, NO_MEMORY, TOO_LONG, TOO_SHORT = (bytes([code]) for code in range(5))


class DecodeOrder(NamedTuple):
    """What is known of an image, and the size in pixels that it is made. `format` is Pillow's name, `width` and
    `height` are as stored, `orientation` is EXIF's."""

    format: str
    width: int
    height: int
    orientation: int
    resized_height: int
    resized_width: int


class SoundOrder(NamedTuple):
    """What is known of a sound, and what it is made into. `format` is WAV, FLAC, OGG or MP3.

    It is read up to `seconds`, and one sample more tells that it is longer. With `piece_samples` it is cut into such
    sounds at most, else it is one. `frame_samples`: of a frame, which has them as they are; 0: frames of a spectrum.
    """

    format: str
    seconds: int
    piece_samples: int
    frame_samples: int
    least_samples: int


Order = DecodeOrder | SoundOrder
_OF_RECORDING = 3  # times as much processor time: half an hour takes a third of it


def cpu_limit(order: Order, cpu_seconds: int) -> int:
    """Seconds of a processor that it may take, where one image or one sound may take `cpu_seconds`."""
    return cpu_seconds * (_OF_RECORDING if isinstance(order, SoundOrder) and order.piece_samples else 1)
