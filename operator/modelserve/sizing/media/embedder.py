"""What seeing takes of a rank's memory: the embedder's weights, and what a step with rows of images holds. Bytes."""

from __future__ import annotations

from math import prod

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.images import BUDGETS, ImageArchitecture
from modelserve.sizing.weights.text import element_bytes
from modelserve.units import MIB

SEGMENT_BYTES = 2 * MIB


def embedder_shapes(images: ImageArchitecture, hidden_size: int) -> tuple[tuple[int, ...], ...]:
    """Of every tensor of the embedder, which each rank holds whole."""
    width, size = images.patch_values, images.embed_size
    norms = ((width,), (width,), (size,), (size,), (size,), (size,))
    return ((size, width), (size,), (images.positions, 2, size), (hidden_size, size), *norms)


def embedder_bytes(images: ImageArchitecture, architecture: ModelArchitecture, *, segments: bool) -> int:
    """Of the weights; with `segments` as PyTorch's allocator holds them on a GPU, the larger ones in whole segments."""
    total = 0
    for shape in embedder_shapes(images, architecture.hidden_size):
        size = prod(shape) * element_bytes(architecture)
        total += -(-size // SEGMENT_BYTES) * SEGMENT_BYTES if segments and size > SEGMENT_BYTES // 2 else size
    return total


def image_rows_bytes(images: ImageArchitecture, architecture: ModelArchitecture, *, max_num_batched_tokens: int) -> int:
    """Of a step all of whose rows are of images: the rows as they come and where they go, and the largest image
    while it is embedded: as bytes, in float32, in the compute type, normed, and some copies of the narrower results."""
    e = element_bytes(architecture)
    rows = 2 * max_num_batched_tokens * architecture.hidden_size * e
    packed = min(BUDGETS[-1], max_num_batched_tokens)
    wide = images.patch_values * (1 + 4 + 2 * e)
    narrow = images.embed_size * (4 * e + 3 * 4)
    return rows + packed * (wide + narrow)
