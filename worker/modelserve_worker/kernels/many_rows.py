"""Products of thousands of rows on Hopper: which of cuBLASLt's ways is taken.

Such products hold an H200 at its power limit, where the clock gives way, 1.4 to 1.7 GHz of 1.98. The library orders its
offers for the full clock, and PyTorch takes the first. Of four tiles, the one is taken here whose turns of the
multiprocessors are the fullest, over what it computes in a full one. In steps of 8,192 rows that is 1.5 % of 31B's time
and 0.9 % of E4B's (`tests/gpu/step_products.py`). Inputs are summed in one order whatever the tile, so no bit changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from modelserve_worker.kernels.cublaslt import CublasLt, Offer, Product, Sizes, fits, library, strided
from modelserve_worker.kernels.linear_tiles import HOPPER, kernel_capability

LEAST_ROWS = 4096  # below, beside decodes, PyTorch's way is as good or better: 1 % of steps of 1,024 rows
LEAST_INPUTS = 1024
LEAST_OUTPUTS = 1024
# Of a tile, by its number in cublasLt.h, on an H200 at 700 W: what it computes in a time, 128 x 256 being 1. Smaller
# tiles, as thrifty when a product is alone, gained nothing in steps; larger ones are slower at that clock.
RATES = {
    23: 1.0,  # 128 x 256
    24: 0.995,  # 256 x 128
    197: 1.015,  # 168 x 128
    201: 1.019,  # 176 x 128
}


def chosen(offers: Sequence[Offer]) -> Offer | None:
    """The offer that costs least, of these tiles and without splitting the inputs; None where there is none."""
    known = [offer for offer in offers if offer.tile in RATES and offer.splits <= 1]
    return min(known, key=_cost, default=None)


def _cost(offer: Offer) -> float:
    turns = math.ceil(offer.waves - 1e-3)  # the library's number is a rounded one
    return turns / offer.waves / RATES[offer.tile]


class ManyRows:
    """The door of one device."""

    def __init__(self, device: torch.device) -> None:
        self._library = CublasLt(device)
        self._plans: dict[Sizes, tuple[Product, Offer | None]] = {}

    def multiply(self, x: Tensor, matrix: Tensor, output: Tensor) -> bool:
        """output [T, N] = x [T, K] times the transposed matrix [N, K]; False, and nothing done, where it is not for
        this door."""
        (rows, inputs), outputs = x.shape, matrix.shape[0]
        small = rows < LEAST_ROWS or inputs < LEAST_INPUTS or outputs < LEAST_OUTPUTS
        if small or not fits((x, matrix, output)):
            return False
        sizes = strided(x, matrix, output)
        if sizes not in self._plans:
            product = self._library.product(sizes)
            self._plans[sizes] = product, chosen(self._library.offers(product))
        product, offer = self._plans[sizes]
        if offer is None:
            return False
        self._library.launch(product, offer, x, matrix, output)
        return True


@cache
def many_rows_door(device: torch.device) -> ManyRows | None:
    """The door of a device; None where PyTorch's own choice is taken."""
    return ManyRows(device) if kernel_capability(device) == HOPPER and library() is not None else None


def write_product(x: Tensor, matrix: Tensor, output: Tensor) -> None:
    """output [T, N] = x [T, K] times the transposed matrix [N, K]; rows of any may lie apart."""
    door = many_rows_door(x.device)
    if door is None or not door.multiply(x, matrix, output):
        torch.mm(x, matrix.t(), out=output)
