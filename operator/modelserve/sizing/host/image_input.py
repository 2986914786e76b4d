"""What images cost a worker beside tokens and weights: host memory and processors. Bytes unless they say otherwise.

All of it is bounded by the worker, and counted in what a pod asks for only where images are planned.
"""

from __future__ import annotations

from typing import NamedTuple

from modelserve.units import GIB, MIB

MOST_PER_REQUEST = 64
ENCODED_BYTES = 16 * MIB
"""Of one image as it is sent."""

ENCODED_BYTES_OF_REQUEST = 48 * MIB
MOST_PIXELS = 64_000_000
"""Of one image as its header says: 8,000 x 8,000."""

DECODER_BYTES = GIB
"""Address space of one decoding process. An image of MOST_PIXELS takes 256 MB; of one in progressive JPEG the decoder
keeps coefficients beside it, and one with alpha is there twice."""

DECODER_CPU_SECONDS = 10
"""Most processor time of one image. 12 MP take about a quarter of a second, the largest PNG some three."""

HELD_PIXELS_BYTES = GIB
"""Most that pixels of open requests take in the front end; as much again in each rank, until they are in a step."""

KNOWN_PIXELS_BYTES = 64 * MIB
"""Pixels of images that were decoded before, so that a known one is not decoded again."""


class ImageInput(NamedTuple):
    """Room for images in a worker: how many of a request, how many soft tokens each, how many values one token is made
    of."""

    per_request: int
    max_soft_tokens: int
    patch_values: int

    @property
    def image_bytes(self) -> int:
        """Pixels of the largest image."""
        return self.max_soft_tokens * self.patch_values


def decode_processes(*, on_cpu: bool) -> int:
    """Images that are decoded at a time. On a CPU the model has the processors."""
    return 1 if on_cpu else 2


def held_pixels_bytes(images: ImageInput, *, max_num_seqs: int) -> int:
    """Pixels that open requests may have in the front end: of a whole step's, within HELD_PIXELS_BYTES, and of one
    request's at least. What would exceed it is refused (429)."""
    one = images.per_request * images.image_bytes
    return max(one, min(max_num_seqs * one, HELD_PIXELS_BYTES))


def image_host_bytes(images: ImageInput, *, max_num_seqs: int, ranks: int, on_cpu: bool) -> int:
    """Host memory of a worker for images: decoders, pixels in front end and ranks, known ones, and a body with images
    while it is read: as bytes, as text and as files."""
    held = held_pixels_bytes(images, max_num_seqs=max_num_seqs)
    bodies = 3 * min(images.per_request * ENCODED_BYTES, ENCODED_BYTES_OF_REQUEST)
    decoders = decode_processes(on_cpu=on_cpu) * DECODER_BYTES
    return decoders + (1 + max(1, ranks)) * held + KNOWN_PIXELS_BYTES + bodies
