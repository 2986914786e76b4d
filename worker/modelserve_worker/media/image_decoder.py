"""An image as its decoder makes it: upright, without alpha, resized."""

from __future__ import annotations

import io

from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from modelserve_worker.media.decode_order import DecodeOrder

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
Image.MAX_IMAGE_PIXELS = None  # sizes are bounded before they come here


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
