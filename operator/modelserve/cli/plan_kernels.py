"""`modelserve plan --kernels`: which kernels a rank launches on the accelerators that a plan considers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from modelserve.cli.plan_text import ShownCandidate
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.evaluation import Fit
from modelserve.planning.wishes import Wishes
from modelserve.sizing.backends.generations import known_capability
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import Choice, KernelTable
from modelserve.sizing.rank_settings import Profile
from modelserve.units import MIB


def kernels_json(
    shown: Sequence[ShownCandidate], architecture: ModelArchitecture, wishes: Wishes
) -> list[dict[str, Any]]:
    """An entry for each of `shown` that fits, in their order."""
    return [
        {"accelerator": fit.accelerator.product, "tensorParallel": fit.tensor_parallel} | table.to_json()
        for fit, table in _tables(shown, architecture, wishes)
    ]


def kernels_text(shown: Sequence[ShownCandidate], architecture: ModelArchitecture, wishes: Wishes) -> str:
    """A line for each choice: what it is of, for how many rows, its kernels, shared memory and workspace."""
    parts: list[str] = []
    for fit, table in _tables(shown, architecture, wishes):
        headline, *_ = table.lines()
        parts += [f"{fit.accelerator.product}, tensor parallel size {fit.tensor_parallel}: {headline}"]
        parts += [f"  {choice}{_memory(choice)}" for choice in table.choices]
    return "\n".join(parts)


def _tables(
    shown: Sequence[ShownCandidate], architecture: ModelArchitecture, wishes: Wishes
) -> Iterator[tuple[Fit, KernelTable]]:
    """Those that fit, each with the table of one rank; a GPU newer than all known ones has the newest's."""
    for fit in (each.evaluation for each in shown if isinstance(each.evaluation, Fit)):
        capability = known_capability(fit.accelerator.compute_capability)
        formats = Formats(wishes.weight_format, fit.geometry.dtype, fit.geometry.layout)
        profile: Profile = "exact" if wishes.exact else "fast"
        yield fit, resolve(capability, architecture, formats, profile, ranks=fit.tensor_parallel)


def _memory(choice: Choice) -> str:
    """What a call holds: shared memory of a block, and workspace."""
    held = []
    if choice.shared_bytes:
        held.append(f"{choice.shared_bytes >> 10} KiB shared")
    if choice.workspace_bytes:
        held.append(f"{choice.workspace_bytes / MIB:.0f} MiB {choice.buffer.replace('_', ' ') or 'workspace'}")
    if choice.row_bytes:
        held.append(f"{choice.row_bytes:,} bytes a row")
    return f"; {', '.join(held)}" if held else ""
