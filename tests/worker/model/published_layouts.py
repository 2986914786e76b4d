"""Published layouts of quantised weights, read with numpy in float64: what the product's layers are compared with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FUSED = re.compile(r"\.experts\.(gate_up|down)_proj_scale$")  # of all experts together
SCALE = re.compile(rf"\.weight_scale$|\.weight_scale_inv$|\.scales$|{FUSED.pattern}")
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


def octets(words: Tensor) -> np.ndarray:
    """int32 [..., n] -> 0..255 [..., 4 n], the lowest bits first."""
    unsigned = words.numpy().astype(np.int64) & 0xFFFFFFFF
    return ((unsigned[..., None] >> np.arange(0, 32, 8)) & 255).reshape(*unsigned.shape[:-1], -1)


def gptq_elements(parts: dict[str, Tensor], *, version: int) -> np.ndarray:
    """float64 [N, K] of GPTQ: words along the inputs, zero points along the outputs, in version 1 less one."""
    scale = parts["scales"].double().numpy()
    bits = 32 * parts["qzeros"].shape[1] // scale.shape[1]
    unpacked = nibbles if bits == 4 else octets
    words = parts["qzeros"].numpy().astype(np.int64) & 0xFFFFFFFF
    if version == 1:  # of the word: a borrow crosses nibbles
        words = (words + (0x11111111 if bits == 4 else 0x01010101)) & 0xFFFFFFFF
    zero, q = unpacked(torch.from_numpy(words)), unpacked(parts["qweight"].T.contiguous()).T
    index = parts["g_idx"].numpy() if "g_idx" in parts else np.arange(len(q)) // (len(q) // len(scale))
    elements: np.ndarray = (scale[index] * (q - zero[index])).T
    return elements


def awq_elements(parts: dict[str, Tensor]) -> np.ndarray:
    """float64 [N, K] of AWQ's tensors: column 8 j + c of a row is nibble `places[c]` of word j."""
    places = [0, 4, 1, 5, 2, 6, 3, 7]
    q, zero = (
        nibbles(parts[name]).reshape(len(parts[name]), -1, 8)[..., places].reshape(len(parts[name]), -1)
        for name in ("qweight", "qzeros")
    )
    scale = parts["scales"].double().numpy()
    size = len(q) // len(scale)
    elements: np.ndarray = ((q - zero.repeat(size, 0)) * scale.repeat(size, 0)).T
    return elements


def int8_elements(weight: Tensor, scale: Tensor) -> np.ndarray:
    """float64 [N, K] of int8, or of words with 128 added, times the scale of the row or group."""
    q = weight.numpy().astype(np.int64) if weight.dtype is torch.int8 else octets(weight) - 128
    factors = scale.double().numpy()
    elements: np.ndarray = q * factors.repeat(q.shape[1] // factors.shape[1], 1)
    return elements


def nvfp4_elements(packed: Tensor, scale: Tensor, whole: float) -> np.ndarray:
    """float64 [N, K]: e2m1, the first of two in the low half, times the scale of 16 and that of the matrix."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate((values, -values))
    octet = packed.numpy()
    q = table[np.stack((octet & 15, octet >> 4), axis=-1).reshape(len(octet), -1)]
    elements: np.ndarray = q * scale.double().numpy().repeat(16, 1) * whole
    return elements


def fp8_elements(weight: Tensor, scale: Tensor) -> np.ndarray:
    """float64 [N, K]: e4m3 times the scale of its row, of the matrix, or of its block of 128 x 128."""
    elements, factors = weight.double().numpy(), scale.double().numpy()
    rows, columns = elements.shape
    if scale.numel() > 1 and scale.shape != (rows, 1):
        factors = factors[np.arange(rows) // 128][:, np.arange(columns) // 128]
    result: np.ndarray = elements * factors
    return result


def matrix_elements(parts: dict[str, Tensor], stated: dict[str, Any]) -> np.ndarray:
    """float64 [N, K] of the tensors of one module by the end of their names; "" is `weight` itself."""
    if "qweight" in parts:
        if stated["quant_method"] == "awq" or "awq" in stated.get("packing_format", ""):
            return awq_elements(parts)
        as_it_is = ("gptq_v2", "auto_round", "auto_round:gptqmodel")
        named = stated.get("checkpoint_format", stated.get("packing_format", "gptq"))
        return gptq_elements(parts, version=2 if named in as_it_is else 1)
    if "global_scale" in parts:
        return nvfp4_elements(parts["packed"], parts["scale"], 1 / float(parts["global_scale"]))
    if "scale_2" in parts:
        return nvfp4_elements(parts[""], parts["scale"], float(parts["scale_2"]))
    if "packed" in parts and 8 * parts["packed"].shape[1] == int(parts["shape"][1]):
        return int4_elements(parts)
    if "packed" in parts or parts[""].dtype is torch.int8:
        return int8_elements(parts["packed" if "packed" in parts else ""], parts["scale"])
    return fp8_elements(parts[""], parts["scale" if "scale" in parts else "scale_inv"])


def write_dequantised(directory: Path, output: Path, *, prefix: str = "model.") -> Path:
    """Write the quantised checkpoint `directory` as a float32 one to `output`, for the text model of transformers."""
    output.mkdir()
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (output / "config.json").write_text(json.dumps(config))
    tensors = {
        k.removeprefix("model.language_model."): v for k, v in load_file(directory / "model.safetensors").items()
    }
    stated = json.loads((directory / "config.json").read_text())["quantization_config"]
    dense: dict[str, Tensor] = {}
    for scale in sorted(name for name in tensors if SCALE.search(name)):
        stem = re.sub(r"(scale|scale_inv|scales)$", "", scale)
        module = stem.removesuffix("_").removesuffix(".weight").removesuffix(".")
        parts = {name.removeprefix(stem): tensors.pop(name) for name in list(tensors) if name.startswith(stem)}
        parts |= {"": tensors.pop(f"{module}.weight")} if f"{module}.weight" in tensors else {}
        tensors.pop(f"{module}.input_scale", None)
        if FUSED.search(scale):
            each = [{k: v[expert] for k, v in parts.items()} for expert in range(len(parts["packed"]))]
            dense[module] = torch.from_numpy(np.stack([int4_elements(one) for one in each])).float()
            continue
        elements = matrix_elements(parts, stated)
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
