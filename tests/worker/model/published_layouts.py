"""Published layouts of quantised weights, read with numpy in float64: what the product's layers are compared with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj$")


def nibbles(words: Tensor) -> np.ndarray:
    """int32 [..., n] -> 0..15 [..., 8 n], the lowest bits first."""
    unsigned = words.numpy().astype(np.int64) & 0xFFFFFFFF
    return ((unsigned[..., None] >> np.arange(0, 32, 4)) & 15).reshape(*unsigned.shape[:-1], -1)


def int4_elements(parts: dict[str, Tensor]) -> np.ndarray:
    """float64 [N, K] of `packed`, `scale` and what else there is: (q - zero) * scale of the column's group."""
    q, scale = nibbles(parts["packed"]), parts["scale"].double().numpy()
    zero = nibbles(parts["zero_point"].T).T if "zero_point" in parts else np.full(scale.shape, 8)
    columns = q.shape[1]
    index = parts["g_idx"].numpy() if "g_idx" in parts else np.arange(columns) // (columns // scale.shape[1])
    elements: np.ndarray = (q - zero[:, index]) * scale[:, index]
    return elements


def fp8_elements(weight: Tensor, scale: Tensor) -> np.ndarray:
    """float64 [N, K]: e4m3 times the scale of its row, of the matrix, or of its block of 128 x 128."""
    elements, factors = weight.double().numpy(), scale.double().numpy()
    rows, columns = elements.shape
    if scale.numel() > 1 and scale.shape != (rows, 1):
        factors = factors[np.arange(rows) // 128][:, np.arange(columns) // 128]
    result: np.ndarray = elements * factors
    return result


def write_dequantised(directory: Path, output: Path, *, prefix: str = "model.") -> Path:
    """Write the quantised checkpoint `directory` as a float32 one to `output`, for the text model of transformers."""
    output.mkdir()
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (output / "config.json").write_text(json.dumps(config))
    tensors = {
        k.removeprefix("model.language_model."): v for k, v in load_file(directory / "model.safetensors").items()
    }
    modules = {name.removesuffix("_scale").removesuffix(".weight") for name in tensors if name.endswith("_scale")}
    modules -= {name for name in modules if f"{name}_scale" in tensors and "experts" not in name}
    dense: dict[str, Tensor] = {}
    for module in sorted(modules):
        stem = f"{module}_" if f"{module}_scale" in tensors else f"{module}.weight_"
        parts = {name.removeprefix(stem): tensors.pop(name) for name in list(tensors) if name.startswith(stem)}
        if "packed" not in parts:
            elements = fp8_elements(tensors.pop(f"{module}.weight"), parts["scale"])
        elif parts["packed"].dim() == 3:
            each = [{k: v[expert] for k, v in parts.items()} for expert in range(len(parts["packed"]))]
            dense[module] = torch.from_numpy(np.stack([int4_elements(one) for one in each])).float()
            continue
        else:
            elements = int4_elements(parts)
        dense[module if EXPERT.match(module) else f"{module}.weight"] = torch.from_numpy(elements).float()
    everything = {name: tensor.float() for name, tensor in (tensors | _fused(dense)).items()}
    save_file({prefix + name: tensor.contiguous() for name, tensor in everything.items()}, output / "model.safetensors")
    return output


def _fused(dense: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of their own names as one parameter for all."""
    found: dict[str, dict[int, dict[str, Tensor]]] = {}
    rest = {}
    for name, tensor in dense.items():
        match = EXPERT.match(name)
        if match is None:
            rest[name] = tensor
        else:
            found.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for prefix, experts in found.items():
        order = [experts[index] for index in range(len(experts))]
        rest[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in order])
        rest[f"{prefix}.down_proj"] = torch.stack([each["down"] for each in order])
    return rest
