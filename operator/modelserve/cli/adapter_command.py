"""`modelserve adapter`: whether a LoRA adapter binds to a model, all of it, and what it adapts. Reads headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modelserve.cli.columns import in_columns
from modelserve.errors import InvalidInput
from modelserve.inspection import read_architecture
from modelserve.model.adapters.binding import BoundAdapter, Factors, read_adapter
from modelserve.model.architecture import ModelArchitecture
from modelserve.published import published_model
from modelserve.units import MIB

_HEADINGS = ("LINEAR", "MODULES", "LAYERS", "RANK", "SCALE")
_ELEMENT_BYTES = 2  # of bfloat16


def run_adapter(directory: Path, model: str, output: str) -> str:
    """The page of one adapter. `model`: a checkpoint's directory, or the address of a published one. Raises
    InvalidInput for files that are broken, and UnsupportedModel, with every name, for what does not bind."""
    adapter = read_adapter(directory, _architecture(model))
    if output == "json":
        return json.dumps(_to_json(adapter), indent=2)
    return _text(adapter)


def _architecture(model: str) -> ModelArchitecture:
    if (facts := published_model(model)) is not None:
        return facts.architecture
    if "://" in model:
        raise InvalidInput(
            f"--model {model} is no published model that this release knows: download its config.json, and give its "
            "directory"
        )
    return read_architecture(Path(model))


def _to_json(adapter: BoundAdapter) -> dict[str, Any]:
    return {
        "baseModel": adapter.base_model,
        "rank": adapter.rank,
        "parameters": adapter.parameters,
        "bytes": adapter.parameters * _ELEMENT_BYTES,
        "linears": [dict(zip(map(str.lower, _HEADINGS), row, strict=True)) for row in _rows(adapter.factors)],
        "withoutEffect": [each.name for each in adapter.without_effect],
    }


def _text(adapter: BoundAdapter) -> str:
    rows = [_HEADINGS, *(tuple(map(str, row)) for row in _rows(adapter.factors))]
    lines = in_columns(rows, left=len(_HEADINGS))
    size = adapter.parameters * _ELEMENT_BYTES / MIB
    lines.append(f"\nAll tensors bind: {adapter.parameters:,} parameters, {size:.1f} MiB in bfloat16")
    if adapter.base_model:
        lines.append(f"Trained on {adapter.base_model}, as it says")
    if idle := [each.name for each in adapter.without_effect]:
        lines.append(f"Of layers that read another's cache, with no effect: {', '.join(idle)}")
    return "\n".join(lines)


def _rows(factors: Iterable[Factors]) -> list[tuple[str, int, int, str, str]]:
    """A row a kind of linear layer: its adapted modules (each expert's is one), their layers, ranks and scales."""
    kinds: dict[str, list[Factors]] = {}
    for each in factors:
        kinds.setdefault(each.module.linear.value, []).append(each)
    return [
        (
            kind,
            sum(max(1, one.module.experts) for one in each),
            len({one.module.layer for one in each}),
            _several({one.rank for one in each}),
            _several({one.scale for one in each}),
        )
        for kind, each in kinds.items()
    ]


def _several(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))
