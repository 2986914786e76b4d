"""The process that decodes images: one at a time, upright, without alpha, resized.

Its address space is bounded, and each image's processor time: what exceeds them ends this process or this image alone.
It ends when the other end of its connection does.
"""

from __future__ import annotations

import io
import resource
import signal
import sys
from multiprocessing.connection import Connection

from PIL import (
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from modelserve_worker.media.decode_order import FAILED, NO_MEMORY, OK, DecodeOrder

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FORMATS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, GifImagePlugin)  # known by being imported
_STRIP_PIXELS = 1 << 22  # that lie on white at a time: an image with alpha takes four copies of what is converted
_SAID = 200


def decoded(data: bytes, order: DecodeOrder) -> bytes:
    """RGB, one byte a colour, row by row. Raises ValueError, or what Pillow raises, for what is no such image."""
    image: Image.Image = Image.open(io.BytesIO(data), formats=[order.format])
    if image.size != (order.width, order.height):
        found = f"{image.size[0]} x {image.size[1]}"
        raise ValueError(f"it is {found} pixels and its header says {order.width} x {order.height}")
    image.load()
    if order.orientation != 1:
        image = image.transpose(_TURNS[order.orientation])
    image = on_white(image) if "A" in image.getbands() or "transparency" in image.info else _as_rgb(image)
    size = (order.resized_width, order.resized_height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image.tobytes()


def on_white(image: Image.Image, *, strip_pixels: int = _STRIP_PIXELS) -> Image.Image:
    """RGB, of an image with alpha; strip by strip, since all of it at once would be four copies."""
    result = Image.new("RGB", image.size)
    rows = max(1, strip_pixels // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(image.height, top + rows))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        result.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return result


def _as_rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def answer(data: bytes, order: DecodeOrder) -> bytes:
    """One of the three bytes, and behind it the pixels or what went wrong."""
    try:
        return OK + decoded(data, order)
    except MemoryError:
        return NO_MEMORY
    except UnidentifiedImageError:
        return FAILED + b"it is damaged"
    except Exception as error:  # whatever a broken file makes Pillow raise
        return FAILED + f"{error or type(error).__name__}"[:_SAID].encode(errors="replace")


def main(arguments: list[str]) -> int:
    """`arguments`: the connection's descriptor, bytes of address space, seconds of processor time of one image."""
    descriptor, memory_bytes, cpu_seconds = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the worker decides when to end
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Image.MAX_IMAGE_PIXELS = None  # sizes are bounded before they come here
    connection = Connection(descriptor)
    while True:
        try:
            order, data = DecodeOrder(*connection.recv()), connection.recv_bytes()
        except EOFError:
            return 0
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds, hard))
        connection.send_bytes(answer(data, order))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
