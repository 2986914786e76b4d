"""Generations of GPUs as kernels see them: which have any, which are given which size of tiles.

Tiles go by the shared memory that a thread block may have.

CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Of these only 9.0 was measured; kernels
for the others are compiled and held to their limits by CI, all but 8.6's, whose tiles are those of 8.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """Compute capabilities, 10 * major + minor, that are given the same tiles."""

    lowest: int
    highest: int
    shared_bytes: int  # of one thread block, at most
    place: int  # of its tiles in a kernel's table


LEAST_CAPABILITY = 80  # 10 * major + minor: below, GPUs have no bfloat16, and models run on plain PyTorch
FP8_CAPABILITY = 89  # from where on matrix units take e4m3
HOPPER = 90  # of kernels in CUDA C++ that are written for it alone
DEPENDENT_LAUNCH = 90  # from where on a kernel may start while the one before it ends
MULTIPROCESSOR_SHARED_BYTES = 228 << 10  # of Hopper: what thread blocks share that live on one at a time
RESERVED_SHARED_BYTES = 1 << 10  # of it, for each thread block

GENERATIONS = (
    Generation(80, 80, 163 << 10, 0),
    Generation(86, 89, 99 << 10, 1),
    Generation(90, 99, 227 << 10, 2),
    Generation(100, 119, 227 << 10, 3),  # whose matrix units Triton feeds through more shared memory
    Generation(120, 129, 99 << 10, 1),  # Blackwell's cards, which are not the data centre's
)
HIGHEST = GENERATIONS[-1].highest


class UnknownGenerationError(ValueError):
    """No kernels have tiles for this GPU."""


def generation_of(capability: int) -> Generation:
    """Raises UnknownGenerationError for a GPU whose shared memory is not known here."""
    for generation in GENERATIONS:
        if generation.lowest <= capability <= generation.highest:
            return generation
    known = ", ".join(f"{g.lowest / 10} to {g.highest / 10}" for g in GENERATIONS)
    raise UnknownGenerationError(f"no kernels for compute capability {capability / 10}: there are tiles for {known}")


def nearest_known(capability: int) -> int:
    """It, or the nearest one below it that has tiles, or the least: for speeds, which refuse nothing."""
    below = [min(capability, generation.highest) for generation in GENERATIONS if generation.lowest <= capability]
    return max(below, default=LEAST_CAPABILITY)


def known_capability(compute_capability: tuple[int, int]) -> int | None:
    """The nearest known one to a GPU's (major, minor); None of a CPU, and of a GPU that nobody described: (0, 0)."""
    major, minor = compute_capability
    return nearest_known(10 * major + minor) if major else None


def tiles_for(tiles: Sequence[T], capability: int) -> T:
    """Of a table that ends where generations to come have its last tiles. Raises as `generation_of`."""
    return tiles[min(generation_of(capability).place, len(tiles) - 1)]
