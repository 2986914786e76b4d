"""Images as the model takes them: squares of pixels, row by row, each to become a soft token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelserve_worker.embedded_spans import ImagePatches


def patches_of(rgb: bytes, *, height: int, width: int, side: int) -> ImagePatches:
    """Of an image of [height, width, 3] colours, both sides multiples of `side`: uint8 [N, 3 side^2], each patch
    [side, side, 3] in the order of the image."""
    pixels: NDArray[np.uint8] = np.frombuffer(rgb, dtype=np.uint8)
    rows, columns = height // side, width // side
    squares = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return ImagePatches(np.ascontiguousarray(squares).reshape(rows * columns, 3 * side**2), columns)
