"""Sizes of steps: of query blocks, and of those that are captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryBlocks:
    """Tokens of one query block of the chunk kernels, by page kind, and keys that one expansion may hold."""

    global_tokens: int
    sliding_tokens: int
    expansion_keys: int


@dataclass(frozen=True, order=True)
class StepSize:
    """Rows of a captured step and how many of them have hidden states, both with padding."""

    rows: int
    last: int  # once narrowed; all, in a step without chunks
    few: int = 1  # most rows of a segment that is no chunk
    adapted: bool = False  # whether rows have adapters
