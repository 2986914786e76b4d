"""Kernels with one fault each, that compile_kernels.py must find, and one without."""

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.dependent_launch import launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.specimen import KernelSpecimen


@triton.jit
def sound(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, tl.load(at) * 2)


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


FLOATS = {"x": "*fp32"}
SPECIMENS = (
    KernelSpecimen(sound, FLOATS, {"SIZE": 128}, num_warps=1),
    KernelSpecimen(sound, FLOATS, {"SIZE": 256}, num_warps=1, lowest_capability=90),
    KernelSpecimen(does_not_compile, FLOATS, {"SIZE": 128}, num_warps=1),
    KernelSpecimen(too_much_shared_memory, {"x": "*bf16"}, {"SIZE": 128}, num_warps=4, spilled_bytes=1024),
    KernelSpecimen(spills, FLOATS, {"SIZE": 16384}, num_warps=1),
    KernelSpecimen(sound, FLOATS, {"LENGTH": 128}, num_warps=1),
    KernelSpecimen(waits, {**FLOATS, "weight": "*fp32"}, {"SIZE": 128}, num_warps=1, lowest_capability=90),
    *(
        KernelSpecimen(kernel, FLOATS, {"SIZE": 64}, num_warps=1, lowest_capability=90)
        for kernel in (sound, returns_early, reads_early, writes_early, waits_first)
    ),
)
