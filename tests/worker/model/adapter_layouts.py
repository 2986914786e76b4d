"""An adapter that PEFT saved, laid out as other tools do: the same terms, under other names and in other tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelserve.model.adapters.config import ADAPTER_CONFIG_FILE, ADAPTER_FILE

Tensors = dict[str, Tensor]
Layout = Callable[[Tensors, dict[str, Any]], Tensors]
ROOT = "base_model.model.model."
_STACKED = re.compile(r".*\.experts(\.base_layer)?\.lora_[AB]\.weight")


def laid_out(saved: Path, into: Path, layout: Layout) -> Path:
    """A copy of the adapter in `saved`. A layout takes its tensors and the document of its settings, which it may
    change."""
    config = json.loads((saved / ADAPTER_CONFIG_FILE).read_text())
    tensors = layout(load_file(saved / ADAPTER_FILE), config)
    into.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, into / ADAPTER_FILE)
    (into / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    return into


def peft(tensors: Tensors, _: dict[str, Any]) -> Tensors:
    return tensors


def unsloth(tensors: Tensors, _: dict[str, Any]) -> Tensors:
    """Of the model with its towers."""
    return {name.replace(ROOT, f"{ROOT}language_model."): tensor for name, tensor in tensors.items()}


def turned(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Stacked experts of earlier versions of PEFT, which took a parameter's last size for its outputs."""
    found = dict(tensors)
    for a_name, b_name, a, b in _stacked(tensors, config):
        found[a_name] = b.permute(0, 2, 1).flatten(0, 1)  # [experts * rank, outputs]
        found[b_name] = a.permute(2, 1, 0).flatten(1)  # [inputs, rank * experts]
    return found


def one_by_one(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Experts as ART and Axolotl have them: three modules an expert."""
    found = dict(tensors)
    for a_name, b_name, a, b in _stacked(tensors, config):
        del found[a_name], found[b_name]
        below = a_name.partition(".experts.")[0] + ".experts"
        parts = b.chunk(2, dim=1) if b.shape[1] != _hidden(tensors) else (b,)
        for name, part in zip(("gate_proj", "up_proj") if len(parts) > 1 else ("down_proj",), parts, strict=True):
            for expert in range(len(a)):
                found[f"{below}.{expert}.{name}.lora_A.weight"] = a[expert].clone()
                found[f"{below}.{expert}.{name}.lora_B.weight"] = part[expert]
    return found


def fused(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Gate and up as one module with one A: of both ranks, each half of B with zeros for the other's."""
    found = dict(tensors)
    for name in tensors:
        if not name.endswith(".mlp.gate_proj.lora_A.weight"):
            continue
        names = [name.replace("gate_proj", each) for each in ("gate_proj", "up_proj")]
        a = [found.pop(each) for each in names]
        b = [found.pop(each.replace("lora_A", "lora_B")) for each in names]
        whole = name.replace("gate_proj", "gate_up_proj")
        found[whole], found[whole.replace("lora_A", "lora_B")] = torch.cat(a), torch.block_diag(*b)
    config["rank_pattern"] = {"gate_up_proj": 2 * config["r"]}
    config["alpha_pattern"] = {"gate_up_proj": 2 * config["lora_alpha"]}
    return found


LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "PEFT": (peft,),
    "Unsloth": (unsloth,),
    "earlier PEFT": (turned, unsloth),
    "ART": (one_by_one,),
    "Axolotl": (one_by_one, fused, unsloth),
}


def layout_of(tool: str) -> Layout:
    def apply(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        for each in LAYOUTS[tool]:
            tensors = each(tensors, config)
        return tensors

    return apply


def _hidden(tensors: Tensors) -> int:
    return next(tensor.shape[1] for name, tensor in tensors.items() if name.endswith("q_proj.lora_A.weight"))


def _stacked(tensors: Tensors, config: Mapping[str, Any]) -> list[tuple[str, str, Tensor, Tensor]]:
    """Names and factors of stacked experts: A [experts, rank, inputs] and B [experts, outputs, rank]."""
    found = []
    for name, a in tensors.items():
        if _STACKED.fullmatch(name) and ".lora_A." in name:
            other, rank = name.replace(".lora_A.", ".lora_B."), config["r"]
            experts = len(a) // rank
            b = tensors[other].view(-1, rank, experts).permute(2, 0, 1)
            found.append((name, other, a.view(experts, rank, -1), b))
    return found
