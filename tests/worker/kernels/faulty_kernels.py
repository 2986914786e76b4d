"""Kernels with one fault each, that compile_kernels.py must find, and one without."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites


@triton.jit
def doubled(values):
    """No kernel, but called by one."""
    return values * 2


@triton.jit
def sound(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, doubled(tl.load(at)))


@triton.jit
def forgotten(x, SIZE: tl.constexpr):
    """No launch makes it."""
    tl.store(x + tl.arange(0, SIZE), 0.0)


@triton.jit
def does_not_compile(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.arange(0, SIZE + 1))


@triton.jit
def too_much_shared_memory(x, SIZE: tl.constexpr):
    """Two operands of 64 KiB each."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, 256)[None, :]
    left = tl.load(x + row * 256 + column)
    right = tl.load(x + tl.arange(0, 256)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    product = tl.dot(left, right).to(tl.bfloat16)
    tl.store(x + row * SIZE + tl.arange(0, SIZE)[None, :], product)


@triton.jit
def spills(x, SIZE: tl.constexpr):
    """One warp that keeps 512 numbers a thread while it sums them twice."""
    values = tl.load(x + tl.arange(0, SIZE))
    values = values / tl.sum(values * values, axis=0)
    tl.store(x + tl.arange(0, SIZE), values / tl.sum(values * values, axis=0))


@triton.jit
def waits(x, weight, SIZE: tl.constexpr):
    """What is allowed: weights before, all else after."""
    launch_dependents()
    at = tl.arange(0, SIZE)
    factor = tl.load(weight + at)
    wait_for_prerequisites()
    tl.store(x + at, tl.load(x + at) * factor)


@triton.jit
def returns_early(x, SIZE: tl.constexpr):
    launch_dependents()
    if tl.program_id(0) > 7:
        return
    wait_for_prerequisites()
    tl.store(x + tl.arange(0, SIZE), 1.0)


@triton.jit
def reads_early(x, SIZE: tl.constexpr):
    launch_dependents()
    at = x + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(at)
    wait_for_prerequisites()
    tl.store(at, values * 2)


@triton.jit
def writes_early(x, SIZE: tl.constexpr):
    launch_dependents()
    tl.store(x + tl.arange(0, SIZE), 1.0)
    wait_for_prerequisites()


@triton.jit
def waits_first(x, SIZE: tl.constexpr):
    wait_for_prerequisites()
    launch_dependents()
    tl.store(x + tl.arange(0, SIZE), 1.0)


def launch_all() -> None:
    x, weight = (torch.empty(1 << 15, dtype=torch.float32, device="cuda") for _ in range(2))
    sound[(1,)](x, SIZE=128, num_warps=1)
    does_not_compile[(1,)](x, SIZE=128, num_warps=1)
    too_much_shared_memory[(1,)](x.to(torch.bfloat16), SIZE=128, num_warps=4)
    spills[(1,)](x, SIZE=16384, num_warps=1)
    waits[(1,)](x, weight, SIZE=128, num_warps=1)
    for kernel in (sound, returns_early, reads_early, writes_early, waits_first):
        kernel[(1,)](x, SIZE=64, num_warps=1)
