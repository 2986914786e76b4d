"""How large a body may be, and what all open ones may hold together: both known before a byte of them is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modelserve.sizing.host.front_end import HELD_BYTES_PER_TOKEN, OPEN_BODIES_BYTES
from modelserve.sizing.media.audio_input import sent_bytes
from modelserve.sizing.media.image_input import encoded_bytes
from modelserve_worker.media.audio_reader import AudioReader
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.server.errors.errors import ApiError

BYTES_PER_TOKEN = 24
"""JSON bytes that a token of an honest prompt takes at most, on average: escaped Cyrillic (\\u0431) has about four
letters a token. English has 4 to 5 bytes a token, a list of token ids 7."""

SLACK_BYTES = 256 * 1024  # the names of fields, and settings beside the text
SEVERAL_PROMPTS_BYTES = 4 * 1024 * 1024  # also with a short context, many prompts fit into one body


def largest_body_bytes(max_model_len: int, images: ImageReader | None = None, audio: AudioReader | None = None) -> int:
    """Bytes of a body for a context of `max_model_len` tokens: one prompt that fills it, or several shorter ones; and
    `images` and `audio` beside it, in base64."""
    sent = 0 if images is None else encoded_bytes(images.images.per_request)
    sent += 0 if audio is None else sent_bytes(audio.audio.per_request)
    return max(SEVERAL_PROMPTS_BYTES, SLACK_BYTES + BYTES_PER_TOKEN * max_model_len) + -(-sent * 4 // 3)


class OpenBodies:
    """Bytes that clients make this process hold, all together. For one event loop."""

    def __init__(self, limit_bytes: int = OPEN_BODIES_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    @contextmanager
    def account(self) -> Iterator[BodyAccount]:
        """An account of one request; what it holds is given back at the end."""
        account = BodyAccount(self)
        try:
            yield account
        finally:
            account.hold(0)


class BodyAccount:
    """What one request holds: the bytes of its body, later its prompts' tokens and what is kept of its answers."""

    def __init__(self, bodies: OpenBodies) -> None:
        self._bodies = bodies
        self._held_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Hold `num_bytes` instead of what was held. Raises ApiError 429, and has changed nothing, at the limit."""
        bodies = self._bodies
        total = bodies.held_bytes - self._held_bytes + num_bytes
        if num_bytes > self._held_bytes and total > bodies.limit_bytes:
            raise ApiError(
                f"open requests hold {bodies.held_bytes} bytes and this one needs "
                f"{num_bytes - self._held_bytes} more; the limit is {bodies.limit_bytes}: send it again later",
                status=429, code="server_busy",
            )  # fmt: skip
        bodies.held_bytes = total
        self._held_bytes = num_bytes

    def hold_tokens(self, num_tokens: int) -> None:
        """Hold prompts of `num_tokens` tokens. Raises ApiError 429."""
        self.hold(num_tokens * HELD_BYTES_PER_TOKEN)

    def hold_more(self, num_bytes: int) -> None:
        """Hold `num_bytes` beside what is held. Raises ApiError 429, and has changed nothing, at the limit."""
        self.hold(self._held_bytes + num_bytes)
