"""Products of many rows on Hopper: which of cuBLASLt's ways is taken.

Long products hold an H200 at its power limit: the clock gives way, 1.4 to 1.7 GHz of 1.98, and the thriftiest tile is
the fastest one. The library orders its offers for the full clock. Here an offer costs the turns its tiles take of the
multiprocessors, over what the tile computes in a turn that is full: rates from `tests/gpu/product_tiles.py`, which
keeps the GPU at its limit. For the layers of 31B that is up to 8 % less time, for those of E4B 6 to 13 %, from 1,024
rows on. Inputs are summed in one order whatever the tile, so the choice changes no bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from modelserve_worker.kernels.cublaslt import CublasLt, Offer, Product, Sizes, fits, library, strided
from modelserve_worker.kernels.linear_tiles import kernel_capability

LEAST_ROWS = 1024  # below, the library's first offer is as good or better
LEAST_INPUTS = 1024
LEAST_OUTPUT = 132 * 128 * 128  # elements: a turn of tiles
_HOPPER = 90
# Of a tile, by its number in cublasLt.h, on an H200 at 700 W: what it computes in a time, 128 x 256 being 1.
RATES = {
    20: 1.017,  # 128 x 128
    21: 0.89,  # 256 x 64
    22: 0.66,  # 64 x 512
    23: 1.0,  # 128 x 256
    24: 0.995,  # 256 x 128
    25: 0.64,  # 512 x 64
    28: 1.0,  # 96 x 128
    29: 1.018,  # 128 x 160
    31: 0.98,  # 192 x 128
    32: 0.95,  # 128 x 192
    135: 1.047,  # 80 x 128
    165: 1.023,  # 112 x 128
    184: 1.029,  # 144 x 128
    197: 1.015,  # 168 x 128
    201: 1.019,  # 176 x 128
    208: 0.926,  # 192 x 64
    209: 0.958,  # 192 x 192
    247: 1.021,  # 320 x 64
    248: 0.978,  # 320 x 128
    263: 0.977,  # 384 x 64
    272: 0.992,  # 448 x 64
    495: 0.985,  # 256 x 96
}
OTHER_RATE = 0.9  # of a tile that was not timed


def chosen(offers: Sequence[Offer]) -> Offer | None:
    """The offer that costs least of those that sum all inputs in one go; None where there is none."""
    whole = [offer for offer in offers if offer.splits <= 1]
    return min(whole, key=_cost, default=None)


def _cost(offer: Offer) -> float:
    turns = math.ceil(offer.waves - 1e-3)  # the library's number is a rounded one
    return turns / offer.waves / RATES.get(offer.tile, OTHER_RATE)


class ManyRows:
    """The door of one device."""

    def __init__(self, device: torch.device) -> None:
        self._library = CublasLt(device)
        self._plans: dict[Sizes, tuple[Product, Offer | None]] = {}

    def multiply(self, x: Tensor, matrix: Tensor, output: Tensor) -> bool:
        """output [T, N] = x [T, K] times the transposed matrix [N, K]; False, and nothing done, where it is not for
        this door."""
        rows, inputs = x.shape
        small = rows < LEAST_ROWS or inputs < LEAST_INPUTS or output.numel() < LEAST_OUTPUT
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
    return ManyRows(device) if kernel_capability(device) == _HOPPER and library() is not None else None


def write_product(x: Tensor, matrix: Tensor, output: Tensor) -> None:
    """output [T, N] = x [T, K] times the transposed matrix [N, K]; rows of any may lie apart."""
    door = many_rows_door(x.device)
    if door is None or not door.multiply(x, matrix, output):
        torch.mm(x, matrix.t(), out=output)
