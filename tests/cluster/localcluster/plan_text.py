"""status.plan of a ModelServe as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TERMS = {
    "weightsBytes": "Weights",
    "activationBytes": "Workspace",
    "overheadBytes": "Overhead",
    "kvPoolBytes": "KV pool",
}


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"


def describe_plan(plan: Mapping[str, Any]) -> str:
    """A table of the chosen plan and of every candidate's verdict. Figures are those of status.plan, per GPU."""
    gpus = plan.get("gpusPerReplica") or 0
    device = plan["accelerator"] if not gpus else f"{gpus} x {plan['accelerator']}"
    cache = plan["kvCache"]
    rows = [
        ("Plan", f"{plan['hash']}: {device}, tensor parallel {plan['tensorParallel']}"),
        ("Context", f"{plan['maxModelLen']:,} tokens, KV cache {cache['dtype']} {cache['layout']}"),
        *((label, _size(plan["perGpu"][name])) for name, label in _TERMS.items()),
    ]
    for name, size in sorted(plan["perRequest"].items()):
        at = name.removesuffix("Bytes")
        rows.append((f"Request {_length(at)}", f"{_size(size)} each, {plan['concurrency'][at]} at once"))
    for candidate in plan.get("candidates", ()):
        reason = candidate.get("message") or candidate.get("limitedBy") or ""
        remedy = f" Remedy: {candidate['remedy']}" if candidate.get("remedy") else ""
        rows.append((f"  {candidate['accelerator']}", f"{candidate['verdict']}. {reason}{remedy}"))
    return "\n".join(f"{name:24}{value}" for name, value in rows)


def _length(at: str) -> str:
    return "at maxModelLen" if at == "atMax" else f"of {at.removeprefix('at').removesuffix('k')}k"
