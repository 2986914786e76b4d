"""How programs of Triton divide the factors of adapters, of any kernel that multiplies by them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

_LEAST_COLUMNS, _MOST_COLUMNS = 16, 64  # of a product


def columns_together(columns: int) -> int:
    """Of A x, that one program has."""
    return min(_MOST_COLUMNS, padded_rank(columns))


def padded_rank(rank: int) -> int:
    """Of B, the rank that one program has."""
    return max(_LEAST_COLUMNS, int(triton.next_power_of_2(rank)))


def precision(factor: Tensor) -> str:
    """Of products with a factor of this dtype."""
    return "ieee" if factor.dtype == torch.float32 else "tf32"
