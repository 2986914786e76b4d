"""Bounds how long a step may take before its device counts as hung, and how long its process is silent. Torch-free."""

from __future__ import annotations

GPU_STEP_DEADLINE_S = 120.0
"""A GPU's slowest honest step takes a few seconds: 2,048 tokens of 31B (127 TFLOP of linears) on the weakest supported
card, over 128k tokens of context. The rest is for kernels that the first step of a shape compiles, and for a clock
that a hot card has lowered. Two minutes also lie below the ten that NCCL waits by itself."""

CPU_STEP_DEADLINE_S = 1800.0
"""The same 127 TFLOP take a quarter of an hour on a few cores at 0.15 TFLOP/s. Nothing but the join of ranks can hang
on a CPU, and gloo gives a lost rank up after 600 s by itself; this is the last resort."""

HEARTBEAT_S = 2.0
"""A thread of the engine's process says this often that the process runs, however long a step takes."""

SILENT_HEARTBEATS = 8
"""So many in a row that are missing mean that the process is stopped or its interpreter stuck: 16 s, so that within
25 s its requests have ended, the worker too, and no Service leads to it. They are counted, not timed: a front end that
was itself stopped (a frozen container) has not missed any."""


def step_deadline_s(device: str) -> float:
    """Seconds for `device` as MemoryReport names it: "cpu", or the name of a GPU."""
    return CPU_STEP_DEADLINE_S if device == "cpu" else GPU_STEP_DEADLINE_S
