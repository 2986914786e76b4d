"""Token counts of a response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from modelserve_worker.server.preparation import SequenceSpec
from modelserve_worker.server.sequences import Reply


def usage(specs: Sequence[SequenceSpec], replies: Iterable[Reply], *, n: int) -> dict[str, Any]:
    """Every prompt counts once, however many answers it has, and so do its tokens that were found in the prefix cache;
    every generated token counts, the ending one included."""
    replies = list(replies)
    prompt_tokens = sum(len(spec.request.prompt_token_ids) for spec in specs[::n])
    completion_tokens = sum(reply.num_tokens for reply in replies)
    cached_tokens = sum(reply.cached_tokens for reply in replies if reply.index % n == 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_usage(specs: Sequence[SequenceSpec], replies: Iterable[Reply], *, n: int) -> dict[str, Any]:
    """`usage`, and how many of the generated tokens were inside thoughts."""
    replies = list(replies)
    details = {"completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)}}
    return {**usage(specs, replies, n=n), **details}
