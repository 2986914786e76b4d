"""How long a step may take before its device or a rank counts as hung. Torch-free."""

from __future__ import annotations

GPU_STEP_DEADLINE_S = 120.0
"""A GPU's slowest honest step takes a few seconds: 2,048 tokens of 31B (127 TFLOP of linears) on the weakest supported
card, over 128k tokens of context. The rest is for kernels that the first step of a shape compiles, and for a clock
that a hot card has lowered. Two minutes also lie below the ten that NCCL waits by itself."""

CPU_STEP_DEADLINE_S = 1800.0
"""The same 127 TFLOP take a quarter of an hour on a few cores at 0.15 TFLOP/s. Nothing but the join of ranks can hang
on a CPU, and gloo gives a lost rank up after 600 s by itself; this is the last resort."""


def step_deadline_s(device: str) -> float:
    """Seconds for `device` as MemoryReport names it: "cpu", or the name of a GPU."""
    return CPU_STEP_DEADLINE_S if device == "cpu" else GPU_STEP_DEADLINE_S
