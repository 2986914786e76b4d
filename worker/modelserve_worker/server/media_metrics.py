"""What images and sounds cost: how many there were, their soft tokens, seconds of decoding, and what was refused."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from modelserve_worker.media.media_error import (
    AudioTooLong,
    AudioTooShort,
    MediaError,
    MediaFetchFailed,
    MediaTooLarge,
    MediaUndecodable,
    MediaUrlRefused,
    ModalityNotServed,
)

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 60)
_REASONS = (ModalityNotServed, MediaTooLarge, MediaUndecodable, MediaUrlRefused, MediaFetchFailed)


class MediaKind(NamedTuple):
    """As metrics name it: of several `items`, of one `item`, what refuses it."""

    items: str
    item: str
    reasons: tuple[type[MediaError], ...]


IMAGES = MediaKind("images", "image", _REASONS)
SOUNDS = MediaKind("sounds", "sound", (*_REASONS, AudioTooLong, AudioTooShort))


class MediaMetrics:
    """Of a server that takes such items. For any thread."""

    def __init__(self, registry: CollectorRegistry, model_name: str, kind: MediaKind) -> None:
        labels, (name, one, reasons) = ["model_name"], kind
        items = Counter(
            f"modelserve_{name}", f"{name.capitalize()} of requests; known ones were not decoded again.",
            [*labels, "known"], registry=registry,
        )  # fmt: skip
        self._items = {known: items.labels(model_name, str(known).lower()) for known in (False, True)}
        tokens = Counter(
            f"modelserve_{one}_soft_tokens", f"Rows of prompts that were {name}.", labels, registry=registry
        )
        self._tokens = tokens.labels(model_name)
        seconds = Histogram(
            f"modelserve_{one}_decode_seconds", f"From the bytes of each of the {name} to what the model takes, "
            "waiting included.", labels, buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._seconds = seconds.labels(model_name)
        fetches = Histogram(
            f"modelserve_{one}_fetch_seconds", f"Of {name} by address, from waiting for a turn to the last byte.",
            labels, buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._fetches = fetches.labels(model_name)
        refused = Counter(
            f"modelserve_{name}_refused", "Requests that were refused for what they sent, by reason.",
            [*labels, "reason"], registry=registry,
        )  # fmt: skip
        self._refused: dict[type[MediaError], Counter] = {
            reason: refused.labels(model_name, reason.__name__) for reason in reasons
        }

    def read(self, soft_tokens: int, decode_s: float | None) -> None:
        """One of so many soft tokens is part of a prompt; None: it was known."""
        self._items[decode_s is None].inc()
        self._tokens.inc(soft_tokens)
        if decode_s is not None:
            self._seconds.observe(decode_s)

    def fetched(self, seconds: float) -> None:
        """One has come from its address."""
        self._fetches.observe(seconds)

    def refused(self, error: MediaError) -> None:
        self._refused[type(error)].inc()
