"""What images cost a worker beside tokens and weights: host memory and processors. Bytes unless they say otherwise.

All of it is bounded by the worker, and counted in what a pod asks for only where images are planned.
"""

from __future__ import annotations

from typing import NamedTuple

from modelserve.model.images import ImageArchitecture
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

HELD_REQUESTS = 64  # with as many images as they may have
KNOWN_PIXELS_BYTES = 64 * MIB
"""Pixels of images that were decoded before, so that a known one is not decoded again."""


class ImageInput(NamedTuple):
    """Room for images in a worker: how many of a request, how many soft tokens each, what makes them of patches, and
    the hosts that they are fetched from."""

    per_request: int
    max_soft_tokens: int
    architecture: ImageArchitecture
    urls: tuple[str, ...] = ()

    @property
    def image_bytes(self) -> int:
        """Pixels of the largest image."""
        return self.max_soft_tokens * self.architecture.patch_values


def decode_processes(*, on_cpu: bool) -> int:
    """Images that are decoded at a time. On a CPU the model has the processors."""
    return 1 if on_cpu else 2


def held_pixels_bytes(images: ImageInput) -> int:
    """Pixels that open requests may have in the front end: of HELD_REQUESTS, within HELD_PIXELS_BYTES, which any one
    request's fit into. What would exceed it is refused (429)."""
    return min(HELD_REQUESTS * images.per_request * images.image_bytes, HELD_PIXELS_BYTES)


def encoded_bytes(per_request: int) -> int:
    """Of all images of one request as they are sent."""
    return min(per_request * ENCODED_BYTES, ENCODED_BYTES_OF_REQUEST)


def image_host_bytes(images: ImageInput, *, ranks: int, on_cpu: bool) -> int:
    """Host memory of a worker for images: decoders, pixels in front end and ranks, known ones, and a body with images
    while it is read: as bytes, as text and as files."""
    held = held_pixels_bytes(images)
    bodies = 3 * encoded_bytes(images.per_request)
    decoders = decode_processes(on_cpu=on_cpu) * DECODER_BYTES
    return decoders + (1 + max(1, ranks)) * held + KNOWN_PIXELS_BYTES + bodies
