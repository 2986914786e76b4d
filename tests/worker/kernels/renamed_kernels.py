"""One kernel more than once: what is called otherwise, explained and laid out otherwise, and what computes otherwise.

Launches of those with 128 have one machine code, and no other has it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def scaled(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, tl.load(at) * 2.0)


@triton.jit
def a_longer_name_in_other_lines(values, WIDTH: tl.constexpr):
    """Explained."""
    # And commented.
    addresses = values + tl.arange(0, WIDTH)

    loaded = tl.load(addresses)
    tl.store(addresses, loaded * 2.0)


@triton.jit
def scaled_by_three(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, tl.load(at) * 3.0)


def launch_all() -> None:
    x = torch.empty(1 << 15, dtype=torch.float32, device="cuda")
    scaled[(1,)](x, SIZE=128, num_warps=1)
    a_longer_name_in_other_lines[(1,)](x, WIDTH=128, num_warps=1)
    scaled_by_three[(1,)](x, SIZE=128, num_warps=1)
