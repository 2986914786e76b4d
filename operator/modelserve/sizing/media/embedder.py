"""What seeing takes of a rank's memory: weights of what makes rows of images, what a step with such rows holds, and
rows that are kept for the next step. Bytes, unless they say otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.image_tower import TowerArchitecture
from modelserve.model.images import BUDGETS, ImageArchitecture
from modelserve.sizing.media.image_input import ImageInput
from modelserve.sizing.weights.text import LARGE_TENSOR_BYTES, SEGMENT_BYTES, element_bytes

KEPT_IMAGES = 8
"""Images whose rows are kept between chunks. Only prompts that are under way in the middle of one want any, and of
those a step has two as a rule: the oldest, and the shortest."""


def embedder_shapes(images: ImageArchitecture, hidden_size: int) -> tuple[tuple[int, ...], ...]:
    """Of every tensor of it, which each rank holds whole."""
    width, size = images.patch_values, images.embed_size
    if (tower := images.tower) is not None:
        return (*_tower_shapes(tower, images), (hidden_size, size))
    norms = ((width,), (width,), (size,), (size,), (size,), (size,))
    return ((size, width), (size,), (images.positions, 2, size), (hidden_size, size), *norms)


def _tower_shapes(tower: TowerArchitecture, images: ImageArchitecture) -> Iterator[tuple[int, ...]]:
    hidden, width, attention = tower.hidden_size, tower.intermediate_size, tower.attention_size
    yield hidden, images.patch_values // tower.patches
    yield 2, images.positions, hidden
    matrices = ((3, attention, hidden), (1, hidden, attention), (2, width, hidden), (1, hidden, width))
    for _ in range(tower.layers):
        for stacked, rows, columns in matrices:
            yield stacked * rows, columns
            if tower.clipped:
                yield stacked, 4
        yield 2, tower.head_dim
        yield from ((hidden,),) * 4
    yield from ((hidden,),) * (2 if tower.standardised else 0)


def embedder_bytes(images: ImageArchitecture, architecture: ModelArchitecture, *, segments: bool) -> int:
    """Of the weights; with `segments` as PyTorch's allocator holds them on a GPU, the large ones in whole segments. The
    others share those of the text model's (`segment_rounding_bytes`)."""
    sizes = [prod(shape) * element_bytes(architecture) for shape in embedder_shapes(images, architecture.hidden_size)]
    return whole_segments(sizes) if segments else sum(sizes)


def whole_segments(sizes: Sequence[int]) -> int:
    """Of tensors of so many bytes each, the large ones in whole segments."""
    return sum(sizes) + sum(-size % SEGMENT_BYTES for size in sizes if size >= LARGE_TENSOR_BYTES)


def packed_rows(max_soft_tokens: int, max_num_batched_tokens: int) -> int:
    """Most rows that are made together: of one image, or of several as far as a step takes them."""
    return max(max_soft_tokens, min(BUDGETS[-1], max_num_batched_tokens))


def kept_images(images: ImageArchitecture, *, max_num_seqs: int) -> int:
    """Images whose rows have room between chunks; none of models that compute whole images in one step, nor where a
    row can be made by itself for next to nothing."""
    return 0 if images.mutual or images.tower is None else min(KEPT_IMAGES, max_num_seqs)


def kept_rows_bytes(images: ImageInput, architecture: ModelArchitecture, *, max_num_seqs: int) -> int:
    """Of the room for rows between chunks."""
    row = architecture.hidden_size * element_bytes(architecture)
    return kept_images(images.architecture, max_num_seqs=max_num_seqs) * images.max_soft_tokens * row


def image_rows_bytes(images: ImageInput, architecture: ModelArchitecture, *, max_num_batched_tokens: int) -> int:
    """Of a step all of whose rows are of images: the rows where they are put together, those that were made together,
    and what making them holds at most."""
    e = element_bytes(architecture)
    made = packed_rows(images.max_soft_tokens, max_num_batched_tokens)
    rows = (max_num_batched_tokens + made) * architecture.hidden_size * e
    tower = images.architecture.tower
    each = _embedding_bytes(images.architecture, e) if tower is None else _tower_bytes(tower, images.architecture, e)
    return rows + made * each


def _embedding_bytes(images: ImageArchitecture, e: int) -> int:
    """Of one row: its pixels as bytes, in float32, in the compute type and normed, and some copies of the narrower
    results."""
    return images.patch_values * (1 + 4 + 2 * e) + images.embed_size * (4 * e + 3 * 4)


def _tower_bytes(tower: TowerArchitecture, images: ImageArchitecture, e: int) -> int:
    """Of one row, whose patches are `tower.patches`: cosines, sines and places throughout, and the largest of pixels on
    their way into the tower, attention, and a gated MLP: gate, up and their product beside what goes in and what it is
    added to."""
    hidden, pixels = tower.hidden_size, images.patch_values // tower.patches
    throughout = 2 * tower.head_dim * e + 2 * 8 + pixels
    entering = pixels * (1 + 4 + e) + 3 * hidden * e
    attention = (2 * hidden + 7 * tower.attention_size) * e
    mlp = (2 * hidden + 3 * tower.intermediate_size) * e
    return tower.patches * (throughout + max(entering, attention, mlp))
