"""What seeing takes of a rank's memory: the embedder's weights, and what a step with rows of images holds. Bytes."""

from __future__ import annotations

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.images import BUDGETS, ImageArchitecture


def embedder_shapes(images: ImageArchitecture, hidden_size: int) -> tuple[tuple[int, ...], ...]:
    """Of every tensor of the embedder, which each rank holds whole."""
    width, size = images.patch_values, images.embed_size
    norms = ((width,), (width,), (size,), (size,), (size,), (size,))
    return ((size, width), (size,), (images.positions, 2, size), (hidden_size, size), *norms)


def embedder_bytes(images: ImageArchitecture, architecture: ModelArchitecture, *, element_bytes: int) -> int:
    """Of the weights."""
    total = 0
    for shape in embedder_shapes(images, architecture.hidden_size):
        count = 1
        for side in shape:
            count *= side
        total += count * element_bytes
    return total


def image_rows_bytes(
    images: ImageArchitecture, architecture: ModelArchitecture, *, max_num_batched_tokens: int, element_bytes: int
) -> int:
    """Of a step all of whose rows are of images: the rows as they come and where they go, and the largest image
    while it is embedded: as bytes, in float32, in the compute type, normed, and some copies of the narrower results."""
    rows = 2 * max_num_batched_tokens * architecture.hidden_size * element_bytes
    packed = min(BUDGETS[-1], max_num_batched_tokens)
    wide = images.patch_values * (1 + 4 + 2 * element_bytes)
    narrow = images.embed_size * (4 * element_bytes + 3 * 4)
    return rows + packed * (wide + narrow)
