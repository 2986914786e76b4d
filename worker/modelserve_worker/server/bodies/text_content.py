"""Contents of messages: a text, or parts that are text, and of some messages images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationInfo

from modelserve_worker.server.bodies.field_policy import PART_FIELDS, policy_of
from modelserve_worker.server.bodies.image_parts import image_part, refuse_media


def text_parts(
    content: Any, kinds: Sequence[str], info: ValidationInfo, *, images: bool = False
) -> str | list[dict[str, str]]:
    """A string, or the parts of it, all of one of `kinds`, or with `images` image_url parts, as parts of chat messages.
    Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is a string or a list of text parts, not {type(content).__name__}")
    policy = policy_of(info.context)
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if images and isinstance(part, dict) and kind == "image_url":
            parts.append(image_part(part, index, info))
            continue
        if not isinstance(part, dict) or kind not in kinds:
            refuse_media(kind, index)
            raise ValueError(f"content part {str(kind)[:40]!r} is not supported: this server reads {_read(images)}")
        kept = policy.without_ignored(part, PART_FIELDS, "messages.content.")
        if set(kept) != {"type", "text"} or not isinstance(kept["text"], str):
            raise ValueError(f'a text part is {{"type": "{kind}", "text": "..."}}')
        parts.append({"type": "text", "text": kept["text"]})
    return parts


def _read(images: bool) -> str:
    return "text and images (image_url)" if images else "text only here"
