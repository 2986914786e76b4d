"""Products of the profile `exact`: the bits of a row are those of its own numbers, whatever rows lie beside it.

A library chooses the order in which it adds by the number of rows. So rows go to it in blocks of EXACT_ROWS, the last
of them padded with zeros: each call has the same shape, addresses aligned alike, and as many threads. That a row has
the same bits in each place of a block is no promise of the library's; the tests try it, and `check_places` on the
machine that is to compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.errors import InvalidInput

EXACT_ROWS = 16


class PlainExactProducts:
    """`ElementProducts` in plain PyTorch."""

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        result = x.new_empty(x.shape[0], weight.shape[0])
        for first in range(0, x.shape[0], EXACT_ROWS):
            rows = x[first : first + EXACT_ROWS]
            block = x.new_zeros(EXACT_ROWS, x.shape[1])  # its own memory, so that no call begins at another alignment
            block[: len(rows)] = rows
            result[first : first + len(rows)] = functional.linear(block, weight)[: len(rows)]
        return result

    def grouped(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        result = x.new_zeros(x.shape[0], weights.shape[1])
        first = 0
        for expert, end in enumerate(ends.tolist()):
            if end > first:
                result[first:end] = self.dense(x[first:end], weights[expert])
            first = end
        return result


def check_places(product: Callable[[Tensor], Tensor], like: Tensor) -> None:
    """Raise InvalidInput where a row [K] of the shape, dtype and device of `like` has other bits in another place or
    beside another number of rows of `product`, [T, K] -> [T, N]."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(len(like), generator=generator).to(like)
    alone = product(row[None])[0]
    for rows, place in (
        (EXACT_ROWS, 1),
        (EXACT_ROWS, EXACT_ROWS // 2),
        (2 * EXACT_ROWS, 20),
        (3 * EXACT_ROWS, 3 * EXACT_ROWS - 1),
        (150, 70),
        (200, 110),  # as many as tiles for many rows are for
    ):
        x = torch.randn(rows, len(row), generator=generator).to(like)
        x[place] = row
        if not torch.equal(product(x)[place], alone):
            raise InvalidInput(
                f"profile exact: on this machine the product of a row of {len(row)} inputs with a matrix of "
                f"{len(alone)} outputs has other bits as row {place} of {rows} than alone; use profile fast",
                field="profile",
            )
