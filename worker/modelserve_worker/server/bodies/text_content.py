"""Contents of messages: a text, or parts that are text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationInfo

from modelserve_worker.server.bodies.field_policy import PART_FIELDS, policy_of


def text_parts(content: Any, kinds: Sequence[str], info: ValidationInfo) -> str | list[dict[str, str]]:
    """A string, or the parts of it, all of one of `kinds`, as parts of chat messages. Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is a string or a list of text parts, not {type(content).__name__}")
    policy = policy_of(info.context)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in kinds:
            raise ValueError(f"content part {str(kind)[:40]!r} is not supported: this server reads text only")
        kept = policy.without_ignored(part, PART_FIELDS, "messages.content.")
        if set(kept) != {"type", "text"} or not isinstance(kept["text"], str):
            raise ValueError(f'a text part is {{"type": "{kind}", "text": "..."}}')
        parts.append({"type": "text", "text": kept["text"]})
    return parts
