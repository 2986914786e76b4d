"""`modelserve plan --compare-formats`: the same model in each weight format, as a plan of such a checkpoint has it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from modelserve.cli.columns import in_columns
from modelserve.cli.plan_text import WIDTH, ShownCandidate, best_of_each_product
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.quantization.linears import modules
from modelserve.model.weight_format import NVFP4_GROUP, StoredType, TextLinear, WeightFormat, dense_format, int4
from modelserve.planning.evaluation import Fit
from modelserve.planning.other_settings import tokens
from modelserve.sizing.weights.text import tensor_parallel_problem, weight_bytes

_MLP = (TextLinear.GATE_UP, TextLinear.DOWN, TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)
_ATTENTION = {TextLinear.QKV, TextLinear.OUTPUT}
_HEADINGS = (
    "FORMAT", "GPUS", "GB", "MAX LEN", "KV TOKENS", "TTFT", "TPOT", "BATCH", "KL", "PROMPTS", "TOP-1", "RIGHT",
)  # fmt: skip
_EXPLAINED = """\
GB: of text weights. KV TOKENS: of as many requests of MAX LEN as the pool holds. TTFT, TPOT, BATCH: as above; \
with workload.concurrency all have one BATCH.
KL: mean nats from bfloat16 over answers; PROMPTS: over text that no training asked for, where TOP-1 is % with the \
same likeliest token; RIGHT: exercises solved. These four are of tiny trained models that were rounded to nearest, \
the worse of two, and not of this model.""".splitlines()


@dataclass(frozen=True)
class FormatRow:
    """What a plan of a checkpoint in one format comes to on one product."""

    label: str
    format: WeightFormat
    weight_bytes: int | None  # of the text; None where a matrix of the model cannot be in this format
    shown: ShownCandidate  # the product's best
    quality: Mapping[str, Mapping[str, Any]] | None  # by the tiny model it is of; None: not measured

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of as many requests of maxModelLen as the pool holds; None where nothing fits."""
        return tokens(self.shown.evaluation) if isinstance(self.shown.evaluation, Fit) else None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": str(self.format),
            "weightBytes": self.weight_bytes,
            "kvTokens": self.kv_tokens,
            "qualityOfTinyModels": self.quality,
            "candidate": self.shown.candidate.to_json(),
        }


def compared_formats(
    architecture: ModelArchitecture, stored: WeightFormat, planned: Callable[[WeightFormat], Sequence[ShownCandidate]]
) -> tuple[FormatRow, ...]:
    """A row for each format and product, products in the order of the first format's plan. `stored`: the checkpoint's
    own, first where it is none of the others; `planned`: every candidate in a format, best first."""
    rows = [
        FormatRow(label, each, _weight_bytes(architecture, each), shown, _quality(each))
        for label, each in _formats(architecture, stored).items()
        for shown in best_of_each_product(planned(each))
    ]
    products = list(dict.fromkeys(row.shown.candidate.accelerator for row in rows))
    return tuple(sorted(rows, key=lambda row: products.index(row.shown.candidate.accelerator)))


def formats_text(rows: Sequence[FormatRow]) -> str:
    """A table for each product, and below it why what does not fit does not."""
    parts = ["Formats of the weights, each as planned for a checkpoint in it"]
    parts += [_wrapped(each) for each in _EXPLAINED]
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    lines = in_columns(cells, left=1)
    parts.append(f"  {lines[0]}")
    for product in dict.fromkeys(row.shown.candidate.accelerator for row in rows):
        of_product = [(row, f"  {line}") for row, line in zip(rows, lines[1:], strict=True)
                      if row.shown.candidate.accelerator == product]  # fmt: skip
        parts += [product, *(line for _, line in of_product)]
        parts += [
            _wrapped(f"{row.label} does not fit: {row.shown.candidate.message}")
            for row, _ in of_product
            if row.kv_tokens is None
        ]
    return "\n".join(parts)


def _formats(architecture: ModelArchitecture, stored: WeightFormat) -> dict[str, WeightFormat]:
    """By what the table calls them, the checkpoint's own as it is."""
    beside_mlp = tuple(each for each in modules(architecture) if each not in _MLP)
    nvfp4 = WeightFormat(stored=StoredType.NVFP4, scales="group", group_size=NVFP4_GROUP)
    plain = (
        dense_format(architecture.dtype),
        WeightFormat(stored=StoredType.FP8, scales="channel", fp8_activations=True),
        WeightFormat(stored=StoredType.INT8, scales="channel"),
        int4(32),
    )
    named = {str(each): each for each in plain}
    named |= {"nvfp4 (MLP only)": nvfp4.model_copy(update={"dense": beside_mlp}), "nvfp4": nvfp4}
    same = next((label for label, each in named.items() if str(each) == str(stored)), None)
    return named | {same: stored} if same else {str(stored): stored, **named}


def _weight_bytes(architecture: ModelArchitecture, stored: WeightFormat) -> int | None:
    if tensor_parallel_problem(architecture, 1, weight_format=stored):
        return None
    return weight_bytes(architecture, tensor_parallel_size=1, weight_format=stored)


def _quality(stored: WeightFormat) -> Mapping[str, Mapping[str, Any]] | None:
    """By tiny model; None of what was not measured, such as linear layers in different formats."""
    if stored.mixed:
        return None
    return _measured().get(f"{stored.name}_mlp" if _ATTENTION & {*stored.dense} else stored.name)


@cache
def _measured() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    data: dict[str, Any] = json.loads(files("modelserve").joinpath("data/format_quality.json").read_text())
    formats: dict[str, Any] = data["formats"]
    return formats


def _cells(row: FormatRow) -> tuple[str, ...]:
    candidate, speed = row.shown.candidate, row.shown.candidate.speed
    return (
        row.label,
        str(candidate.gpus_per_replica) if row.kv_tokens is not None else "-",
        f"{row.weight_bytes / 1e9:.1f}" if row.weight_bytes is not None else "-",
        f"{candidate.max_model_len:,}" if candidate.max_model_len else "-",
        f"{row.kv_tokens:,}" if row.kv_tokens is not None else "-",
        f"{float(speed.time_to_first_token_ms):,.0f}" if speed else "-",
        f"{float(speed.time_per_output_token_ms):,.1f}" if speed else "-",
        str(speed.concurrency) if speed else "-",
        *_quality_cells(row.quality),
    )


def _quality_cells(quality: Mapping[str, Mapping[str, Any]] | None) -> tuple[str, str, str, str]:
    if quality is None:
        return "-", "-", "-", "not measured"
    models = quality.values()
    solved = min(models, key=lambda each: each["right"] / each["exercises"])
    return (
        f"{max(each['answers']['meanKlNats'] for each in models):.0e}",
        f"{max(each['prompts']['meanKlNats'] for each in models):.1e}",
        f"{min(each['prompts']['top1Percent'] for each in models):.1f}",
        f"{solved['right']}/{solved['exercises']}",
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
