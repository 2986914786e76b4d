"""Adapters of any geometry as tools lay them out: names, shapes, and files whose factors are bytes of nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modelserve.model.adapters.modules import Module, adapted_modules, stacked_experts
from modelserve.model.architecture import ModelArchitecture

Shapes = dict[str, tuple[int, ...]]
CONFIG: Mapping[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
PEFT, TEXT_ONLY, OLDER = "base_model.model.model.language_model.", "base_model.model.model.", "language_model.model."


def dense(architecture: ModelArchitecture, *, prefix: str = PEFT, rank: int = 4, fused: bool = False) -> Shapes:
    """Of every linear layer but experts: each by itself, or those fused that some tool fuses."""
    shapes = {}
    for name, module in adapted_modules(architecture).items():
        several = len(module.parts) > 1
        alone = not several and not name.endswith(("gate_proj", "up_proj"))
        in_fused = (
            fused and not several and name.endswith(("q_proj", "k_proj", "v_proj")) and _whole(architecture, name)
        )
        if ".experts." in name or (several and not fused) or (fused and not several and not alone) or in_fused:
            continue
        shapes |= factors(prefix + name, module, rank)
    return shapes


def experts_one_by_one(architecture: ModelArchitecture, *, prefix: str = PEFT, rank: int = 4) -> Shapes:
    """As ART and Axolotl write them: three modules an expert."""
    shapes = {}
    for name, module in adapted_modules(architecture).items():
        if ".experts." in name:
            shapes |= factors(prefix + name, module, rank)
    return shapes


def experts_stacked(
    architecture: ModelArchitecture, *, prefix: str = PEFT, rank: int = 4, turned: bool = False
) -> Shapes:
    """As PEFT's `target_parameters` and Unsloth have them: gate and up in the wrapper within, down in the outer one."""
    shapes = {}
    for layer in range(architecture.num_hidden_layers):
        parameters = stacked_experts(architecture, layer)
        for wrapper, parameter in ((".base_layer", "gate_up_proj"), ("", "down_proj")):
            module, name = parameters[parameter], f"{prefix}layers.{layer}.experts{wrapper}"
            ends = (module.outputs, module.inputs) if turned else (module.inputs, module.outputs)
            rows = rank * module.experts
            shapes |= {f"{name}.lora_A.weight": (rows, ends[0]), f"{name}.lora_B.weight": (ends[1], rows)}
    return shapes


def factors(name: str, module: Module, rank: int) -> Shapes:
    return {f"{name}.lora_A.weight": (rank, module.inputs), f"{name}.lora_B.weight": (module.outputs, rank)}


def write(directory: Path, shapes: Shapes, *, dtype: str = "BF16", **config: object) -> Path:
    """An adapter's two files; its tensors lie in a hole of the file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    header, at = {}, 0
    for name, shape in shapes.items():
        size = shape[0] * shape[1] * {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return directory


def without(shapes: Shapes, endings: Iterable[str]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not name.endswith(tuple(endings))}


def _whole(architecture: ModelArchitecture, name: str) -> bool:
    """Whether the layer of this module has queries, keys and values, which are fused."""
    return f"{name.rsplit('.', 1)[0]}.qkv_proj" in adapted_modules(architecture)
