"""Token counts of a response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from modelserve_worker.embedded_spans import AudioFrames, ImagePatches
from modelserve_worker.server.answers.preparation import SequenceSpec
from modelserve_worker.server.answers.sequences import Reply


def usage(specs: Sequence[SequenceSpec], replies: Iterable[Reply], *, n: int) -> dict[str, Any]:
    """Every prompt counts once, however many answers it has, and so do its tokens that were found in the prefix cache,
    and those that were rows of images and of sounds;
    every generated token counts, the ending one included. Where tokens were proposed, how many of them are in the
    answers and how many are not."""
    replies = list(replies)
    prompt_tokens = sum(len(spec.request.prompt_token_ids) for spec in specs[::n])
    completion_tokens = sum(reply.num_tokens for reply in replies)
    cached_tokens = sum(reply.cached_tokens for reply in replies if reply.index % n == 0)
    media = {
        name: sum(len(span) for spec in specs[::n] for span in spec.request.spans if isinstance(span.embeddings, kind))
        for name, kind in (("image_tokens", ImagePatches), ("audio_tokens", AudioFrames))
    }
    accepted = sum(reply.accepted_drafts for reply in replies)
    rejected = sum(reply.rejected_drafts for reply in replies)
    proposed = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            **{name: count for name, count in media.items() if count},
        },
        **({"completion_tokens_details": proposed} if accepted + rejected else {}),
    }


def chat_usage(specs: Sequence[SequenceSpec], replies: Iterable[Reply], *, n: int) -> dict[str, Any]:
    """`usage`, and how many of the generated tokens were inside thoughts."""
    replies = list(replies)
    counts = usage(specs, replies, n=n)
    thought = {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)}
    return {**counts, "completion_tokens_details": {**thought, **counts.get("completion_tokens_details", {})}}
