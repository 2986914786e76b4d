"""Token counts of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelserve_worker.server.preparation import SequenceSpec


def usage(specs: Sequence[SequenceSpec], completion_counts: Sequence[int], *, n: int) -> dict[str, int]:
    """Every prompt counts once, however many answers it has; every generated token counts, the ending one included."""
    prompt_tokens = sum(len(spec.request.prompt_token_ids) for spec in specs[::n])
    completion_tokens = sum(completion_counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_usage(
    specs: Sequence[SequenceSpec], completion_counts: Sequence[int], *, n: int, reasoning_tokens: int
) -> dict[str, Any]:
    """`usage`, and how many of the generated tokens were inside thoughts."""
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {**usage(specs, completion_counts, n=n), **details}
