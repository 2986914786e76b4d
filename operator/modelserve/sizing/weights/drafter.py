"""Bytes of what drafts beside a model on one rank, whatever its design."""

from __future__ import annotations

from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.drafters.reading import DrafterArchitecture
from modelserve.sizing.weights.assistant import assistant_weight_bytes, ranks_problem
from modelserve.sizing.weights.dflash import dflash_ranks_problem, dflash_weight_bytes


def drafter_weight_bytes(drafter: DrafterArchitecture, *, tensor_parallel_size: int) -> int:
    """Bytes of one rank's weights."""
    if isinstance(drafter, DFlashArchitecture):
        return dflash_weight_bytes(drafter, tensor_parallel_size=tensor_parallel_size)
    return assistant_weight_bytes(drafter, tensor_parallel_size=tensor_parallel_size)


def drafter_ranks_problem(drafter: DrafterArchitecture, tensor_parallel_size: int) -> str | None:
    """What keeps a drafter from so many ranks, or None."""
    if isinstance(drafter, DFlashArchitecture):
        return dflash_ranks_problem(drafter, tensor_parallel_size)
    return ranks_problem(drafter, tensor_parallel_size)
