"""What images cost: how many there were, their soft tokens, the seconds of decoding, and what was refused."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from modelserve_worker.media.media_error import (
    MediaError,
    MediaFetchFailed,
    MediaTooLarge,
    MediaUndecodable,
    MediaUrlRefused,
    ModalityNotServed,
)

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 60)
_REASONS = (ModalityNotServed, MediaTooLarge, MediaUndecodable, MediaUrlRefused, MediaFetchFailed)


class ImageMetrics:
    """Of a server that takes images. For any thread."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = ["model_name"]
        items = Counter(
            "modelserve_images", "Images of requests; known ones were not decoded again.", [*labels, "known"],
            registry=registry,
        )  # fmt: skip
        self._items = {known: items.labels(model_name, str(known).lower()) for known in (False, True)}
        tokens = Counter("modelserve_image_soft_tokens", "Rows of prompts that were images.", labels, registry=registry)
        self._tokens = tokens.labels(model_name)
        seconds = Histogram(
            "modelserve_image_decode_seconds", "From an image's bytes to its patches, waiting included.", labels,
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._seconds = seconds.labels(model_name)
        fetches = Histogram(
            "modelserve_image_fetch_seconds", "Of images by address, from waiting for a turn to the last byte.", labels,
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._fetches = fetches.labels(model_name)
        refused = Counter(
            "modelserve_images_refused", "Requests that were refused for what they sent, by reason.",
            [*labels, "reason"], registry=registry,
        )  # fmt: skip
        self._refused: dict[type[MediaError], Counter] = {
            kind: refused.labels(model_name, kind.__name__) for kind in _REASONS
        }

    def read(self, soft_tokens: int, decode_s: float | None) -> None:
        """An image of so many soft tokens is part of a prompt; None: it was known."""
        self._items[decode_s is None].inc()
        self._tokens.inc(soft_tokens)
        if decode_s is not None:
            self._seconds.observe(decode_s)

    def fetched(self, seconds: float) -> None:
        """An image has come from its address."""
        self._fetches.observe(seconds)

    def refused(self, error: MediaError) -> None:
        self._refused[type(error)].inc()
