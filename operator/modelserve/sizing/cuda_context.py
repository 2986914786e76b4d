"""What a process takes of a GPU's memory before it has a tensor: CUDA's context, libraries and kernels.

The driver keeps a stack for every thread that a GPU may hold at once (CUDA's stack limit, 1 KiB by default), so the
context grows with the multiprocessors: on an H200 stacks of 4,096 bytes in place of 1,760 took 602 MiB more, as 132 x
2,048 threads have it (tests/bench/kernels/nccl_memory.py). The rest hangs on what is loaded.
"""

from __future__ import annotations

from modelserve.hardware import Accelerator
from modelserve.units import MIB

HOPPER_BYTES = 704 * MIB
"""Measured on an H200 with E4B, 689 MiB outside of PyTorch's allocator with one rank, and rounded up to 64."""

STACK_BYTES = 1024  # of a thread
LOADED_BYTES = 425 * MIB  # the H200's 689 MiB without 264 of stacks: the driver's 260, cuBLAS's 158, our kernels' 7
_ROUNDING = 64 * MIB
_HOPPER = (9, 0)


def rounded_up(size: int) -> int:
    """To 64 MiB, as what was measured outside of PyTorch's allocator is, too."""
    return -(-size // _ROUNDING) * _ROUNDING


def context_bytes(accelerator: Accelerator) -> int:
    """Of one process on one GPU, rounded up to 64 MiB."""
    if accelerator.compute_capability == _HOPPER:
        return HOPPER_BYTES
    size = LOADED_BYTES + accelerator.resident_threads * STACK_BYTES
    return rounded_up(size)


def context_source(accelerator: Accelerator) -> str:
    """Where the figure comes from."""
    if accelerator.compute_capability == _HOPPER:
        return "measured on H200"
    return f"assumed: 425 MiB, and 1 KiB for each of {accelerator.resident_threads:,} threads"
