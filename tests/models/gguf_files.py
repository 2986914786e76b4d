"""Write a checkpoint directory as the GGUF file that llama.cpp's converter and quantiser would make of it:

    PYTHONPATH=operator:worker:tests/core python tests/models/gguf_files.py MODEL Q4_0 OUTPUT.gguf

Keys and names are theirs, and so is what they leave unquantised: norms, scales, the router, rows that are no whole
blocks. The tokenizer goes in whole (`tokenizer.huggingface.json`), since the trained models' is none of llama.cpp's.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf_models import TEXT, architecture_metadata, factors
from gguf_writer import Stored, gguf_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.gguf.block_types import BLOCK_TYPES
from modelserve.model.gguf.tensor_names import gguf_name
from modelserve.model.gguf.weight_format import ROUNDED
from modelserve_worker.models.gemma4_checkpoint import text_name

ROUNDED_NAMES = {kind.name for kind in ROUNDED}
KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}


def write_gguf(
    model: Path, kind: str, path: Path, *, types: Mapping[str, str] | None = None, parts: int = 1, **metadata: Any
) -> None:
    """The checkpoint in `model` with matrices in `kind`, but those whose name ends as one of `types` says, where rows
    are whole blocks."""
    architecture = ModelArchitecture.from_config(json.loads((model / "config.json").read_text()))
    tensors: dict[str, Stored] = {}
    for full_name, tensor in load_file(model / "model.safetensors").items():
        name = text_name(full_name)
        assert name is not None
        named = gguf_name(name)
        stored = stored_as(named, tensor, kind, types or {})
        tensors[named] = stored, tuple(tensor.shape), ENCODERS[stored](tensor.float())
    pairs, half = architecture.global_rotary_pairs, architecture.global_head_dim // 2
    tensors["rope_freqs.weight"] = "F32", (half,), factors(pairs, half)
    text = text_metadata(model) if (model / "tokenizer.json").is_file() else TEXT
    stated = {**architecture_metadata(architecture), **text, **metadata}
    if parts == 1:
        path.write_bytes(gguf_bytes(stated, tensors))
    for part in range(parts if parts > 1 else 0):
        held = dict(list(tensors.items())[part::parts])
        split = {"split.no": part, "split.count": parts, "split.tensors.count": len(tensors)}
        part_path = path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf")
        part_path.write_bytes(gguf_bytes({**split, **({} if part else stated)}, held))


def stored_as(name: str, tensor: Tensor, kind: str, types: Mapping[str, str]) -> str:
    if tensor.dim() < 2 or "ffn_gate_inp" in name:
        return "F32"
    wanted = next((each for ending, each in types.items() if name.removesuffix(".weight").endswith(ending)), kind)
    return wanted if tensor.shape[-1] % KINDS[wanted].elements == 0 else "F16"


def write_dequantised(model: Path, path: Path, directory: Path) -> Path:
    """The checkpoint in `model`, in float32, with the elements that the `gguf` package finds in the file at `path`, and
    those of linear layers that INT8 does not hold exactly as it rounds them to Q8_0."""
    import gguf

    directory.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, directory)
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = {}
    for name in load_file(model / "model.safetensors"):
        stored = held[gguf_name(text_name(name) or "")]
        values = gguf.dequantize(stored.data, stored.tensor_type)
        if stored.tensor_type.name in ROUNDED_NAMES and "embd" not in stored.name:
            eight = gguf.GGMLQuantizationType.Q8_0
            values = gguf.dequantize(gguf.quantize(values, eight), eight)
        elements = torch.from_numpy(values.copy())
        tensors[name] = elements.reshape([int(size) for size in reversed(stored.shape)])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def text_metadata(model: Path) -> dict[str, Any]:
    """Tokenizer, template and ids as the converter writes them."""
    document = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    held = document["model"]["vocab"]
    ids = held if isinstance(held, dict) else {piece: i for i, (piece, _) in enumerate(held)}
    special = {token["id"] for token in document["added_tokens"] if token["special"]}
    tokens = {i: text for text, i in ids.items()}  # of two texts with one id the last
    ordered = [tokens[i] for i in range(len(tokens))]
    merges = document["model"].get("merges") or []
    gemma = document["model"]["type"] == "BPE" and document["model"]["byte_fallback"]
    whole = {} if gemma else {"tokenizer.huggingface.json": json.dumps(document)}
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = (model / "chat_template.jinja").read_text()
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ordered,
        "tokenizer.ggml.scores": [-1000.0] * len(ordered),
        "tokenizer.ggml.token_type": [_token_type(i, text, special) for i, text in enumerate(ordered)],
        **({"tokenizer.ggml.merges": [" ".join(pair) for pair in merges]} if merges else {}),
        **{f"tokenizer.ggml.{name}_token_id": ids[settings[role]] for name, role in roles.items()},
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": template,
        **whole,
    }


SHOWN = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'}


def _token_type(token_id: int, text: str, special: set[int]) -> int:
    if text in SHOWN:
        return 4
    return 3 if token_id in special else 6 if text.startswith("<0x") and len(text) == 6 else 1


def _q8_0(x: Tensor) -> bytes:
    blocks = x.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    q = torch.where(scale > 0, blocks / scale, 0).round().to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), q.view(torch.uint8)], dim=1).numpy().tobytes()


def _q4_0(x: Tensor) -> bytes:
    blocks = x.reshape(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    q = torch.where(scale != 0, blocks / scale, 0).add(8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), q[:, :16] | (q[:, 16:] << 4)], dim=1).numpy().tobytes()


def _q5_0(x: Tensor) -> bytes:
    blocks = x.reshape(-1, 32)
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -16
    q = torch.where(scale != 0, blocks / scale, 0).add(16.5).trunc().clamp(0, 31).to(torch.uint8)
    high = ((q.int() >> 4) << torch.arange(8).repeat(4)).view(-1, 4, 8).sum(2).to(torch.uint8)
    low = (q[:, :16] & 15) | ((q[:, 16:] & 15) << 4)
    return torch.cat([scale.half().view(torch.uint8), high, low], dim=1).numpy().tobytes()


def _q6_k(x: Tensor) -> bytes:
    """Not the quantiser's search for the best scales, but its layout."""
    groups = x.reshape(-1, 16, 16)
    wanted = groups.abs().amax(2) / 31
    scale = (wanted.amax(1, keepdim=True) / 127).half()
    steps = torch.where(scale > 0, wanted / scale.float(), 0).ceil().clamp(0, 127).to(torch.int8)
    step = (scale.float() * steps.float()).unsqueeze(2)
    q = torch.where(step > 0, groups / step, 0).round().clamp(-32, 31).add(32).to(torch.uint8).view(-1, 2, 4, 32)
    low = torch.cat([(q[:, :, 0] & 15) | ((q[:, :, 2] & 15) << 4), (q[:, :, 1] & 15) | ((q[:, :, 3] & 15) << 4)], dim=2)
    high = (q[:, :, 0] >> 4) | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), steps.view(torch.uint8), scale.view(torch.uint8)]
    return torch.cat(parts, dim=1).numpy().tobytes()


def _with_minimum(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [n, 32], steps and minima [n, 1] of blocks of 32."""
    blocks = x.reshape(-1, 32)
    low = blocks.amin(1, keepdim=True).clamp(max=0)
    step = (blocks.amax(1, keepdim=True) - low) / ((1 << bits) - 1)
    q = torch.where(step > 0, (blocks - low) / step, 0).add(0.5).trunc().clamp(0, (1 << bits) - 1).to(torch.uint8)
    return q, step, low


def _q4_1(x: Tensor) -> bytes:
    q, step, low = _with_minimum(x, 4)
    parts = [step.half().view(torch.uint8), low.half().view(torch.uint8), q[:, :16] | (q[:, 16:] << 4)]
    return torch.cat(parts, dim=1).numpy().tobytes()


def _k_with_minima(x: Tensor, bits: int) -> bytes:
    """Q4_K and Q5_K: not the quantiser's search, but its layout."""
    q, step, low = _with_minimum(x, bits)
    q, step, low = q.view(-1, 8, 32), step.view(-1, 8), -low.view(-1, 8)
    whole = [each.amax(1, keepdim=True).div(63).half() for each in (step, low)]
    six = [
        torch.where(unit > 0, each / unit.float(), 0).ceil().clamp(0, 63).to(torch.uint8)
        for each, unit in zip((step, low), whole, strict=True)
    ]
    factors, minima = six
    packed = torch.cat(
        [
            (factors[:, :4] & 63) | ((factors[:, 4:] >> 4) << 6),
            (minima[:, :4] & 63) | ((minima[:, 4:] >> 4) << 6),
            (factors[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4),
        ],
        dim=1,
    )
    pairs = (q & 15).view(-1, 4, 2, 32)
    parts = [*(unit.view(torch.uint8) for unit in whole), packed]
    if bits == 5:
        parts.append(((q.int() >> 4) << torch.arange(8).view(8, 1)).sum(1).to(torch.uint8))
    parts.append((pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1))
    return torch.cat(parts, dim=1).numpy().tobytes()


ENCODERS: dict[str, Callable[[Tensor], bytes]] = {
    "F32": lambda x: x.numpy().tobytes(),
    "F16": lambda x: x.half().numpy().tobytes(),
    "BF16": lambda x: x.bfloat16().view(torch.int16).numpy().tobytes(),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q4_1": _q4_1,
    "Q4_K": lambda x: _k_with_minima(x, 4),
    "Q5_K": lambda x: _k_with_minima(x, 5),
    "Q6_K": _q6_k,
}


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
