"""What a kernel module declares of its kernels, so that they can be compiled for a GPU that is not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelSpecimen:
    """One kernel at one shape that a real model launches.

    A kernel module lists its own in a module-level `SPECIMENS`; the compile checks find them there. `signature` maps
    every run-time parameter to its Triton type ("*bf16", "i32", "fp32"), `constants` every tl.constexpr and every
    pointer passed as None to its value. Pointers are taken to be aligned to 16 bytes, as tensors are; integer arguments
    that are multiples of 16 at run time are named in `multiples_of_16`.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    multiples_of_16: frozenset[str] = field(default_factory=frozenset)
    spilled_bytes: int = 0  # most bytes of spill stores that are accepted
    lowest_capability: int = 80  # 89 where fp8_e4m3 is computed with
    highest_capability: int = 1000  # less where later GPUs are given another tile
    settled: frozenset[str] = field(default_factory=frozenset)  # what may be read before the wait (`dependent_launch`)
    waits_first: bool = False  # the next kernel starts when this one has waited, not before (`dependent_launch`)

    @property
    def name(self) -> str:
        """Kernel, types and constants, short enough for a table."""
        types = ",".join(f"{name}:{kind}" for name, kind in self.signature.items() if kind.startswith("*"))
        constants = ",".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel.__name__}({types}; {constants})"
