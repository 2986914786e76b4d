"""Contents of messages: a text, or parts that are text, and of some messages images and sounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationInfo

from modelserve_worker.server.bodies.field_policy import PART_FIELDS, policy_of
from modelserve_worker.server.bodies.media_parts import MEDIA_KINDS, media_part, refuse_media


def text_parts(
    content: Any, kinds: Sequence[str], info: ValidationInfo, *, media: bool = False
) -> str | list[dict[str, str]]:
    """A string, or the parts of it, all of one of `kinds`, or with `media` images and sounds, as parts of messages.
    Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is a string or a list of text parts, not {type(content).__name__}")
    policy = policy_of(info.context)
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if media and isinstance(part, dict) and kind in MEDIA_KINDS:
            parts.append(media_part(part, index, info))
            continue
        if not isinstance(part, dict) or kind not in kinds:
            refuse_media(kind, index)
            raise ValueError(f"content part {str(kind)[:40]!r} is not supported: this server reads {_read(media)}")
        kept = policy.without_ignored(part, PART_FIELDS, "messages.content.")
        if set(kept) != {"type", "text"} or not isinstance(kept["text"], str):
            raise ValueError(f'a text part is {{"type": "{kind}", "text": "..."}}')
        parts.append({"type": "text", "text": kept["text"]})
    return parts


def _read(media: bool) -> str:
    return "text, images (image_url) and sounds (input_audio, audio_url)" if media else "text only here"
