"""What workers measured before, as a plan may use it: bytes of memory terms by name, for one kind of rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class LearnedTerms(Protocol):
    """Looks up the measured terms of a rank; those it does not name keep their predicted bytes."""

    def __call__(
        self,
        product: str,
        *,
        tensor_parallel_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        cache_format: str,  # DTYPE/LAYOUT of the KV cache, as "bfloat16/v_only"
    ) -> Mapping[str, int]:
        """Bytes by term (weights, activation, and the names of `overhead_terms`); empty when nothing is known."""


def nothing_learned(
    product: str,  # noqa: ARG001 - the arguments are those of every LearnedTerms
    *,
    tensor_parallel_size: int,  # noqa: ARG001
    max_num_batched_tokens: int,  # noqa: ARG001
    max_num_seqs: int,  # noqa: ARG001
    cache_format: str,  # noqa: ARG001
) -> Mapping[str, int]:
    """The empty calibration."""
    return {}
