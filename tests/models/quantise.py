"""Quantise a checkpoint into a published layout:

    PYTHONPATH=operator:worker python tests/models/quantise.py MODEL --format int4_g32 --output DIR

Round to nearest, no data. The layouts are compressed-tensors': pack-quantized INT4 as google/gemma-4-*-it-qat-w4a16-ct
and cyankiwi's AWQ-4bit have it, float-quantized FP8 as RedHatAI's FP8-dynamic and FP8-block have it, INT8, and
nvfp4-pack-quantized; ModelOpt's NVFP4; transformers' FP8 in blocks; GPTQ's, of both versions, and AWQ's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from quantised_layouts import GPTQ, matrix_tensors
from safetensors.torch import load_file
from torch import Tensor

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.quantization.linears import modules
from modelserve.model.weight_format import FP8_BLOCK, Layout, ScaleType, StoredType, TextLinear, WeightFormat
from modelserve_tools.tiny.weights import PREFIX, save_weights

ALWAYS_IGNORED = ["lm_head", "re:.*embed.*", "re:.*router.*", "re:.*vision_tower.*", "re:.*audio_tower.*"]


def int4(group_size: int, **settings: Any) -> WeightFormat:
    return WeightFormat(stored=StoredType.INT4, scales="group", group_size=group_size, **settings)


def int8(group_size: int | None = None, **settings: Any) -> WeightFormat:
    scales = "channel" if group_size is None else "group"
    return WeightFormat(stored=StoredType.INT8, scales=scales, group_size=group_size, **settings)


def nvfp4(layout: Layout) -> WeightFormat:
    return WeightFormat(stored=StoredType.NVFP4, scales="group", group_size=16, layout=layout)


_HALF: dict[str, Any] = {"scale_type": ScaleType.FLOAT16}


FORMATS = {
    **{
        f"int4_g{size}{'_asym' if not symmetric else ''}{'_actorder' if ordered else ''}": int4(
            size, symmetric=symmetric, activation_order=ordered
        )
        for size in (32, 128)
        for symmetric in (True, False)
        for ordered in (False, True)
    },
    **{
        f"fp8_{scales}": WeightFormat(stored=StoredType.FP8, scales=scales) for scales in ("channel", "tensor", "block")
    },
    "fp8_block_inv": WeightFormat(stored=StoredType.FP8, scales="block", layout=Layout.BLOCK_FP8),
    "int8_channel": int8(),
    "int8_g32": int8(32),
    "int8_channel_packed": int8(layout=Layout.PACKED_INT8),
    "nvfp4": nvfp4(Layout.COMPRESSED_TENSORS),
    "nvfp4_modelopt": nvfp4(Layout.MODELOPT),
    "gptq_g32": int4(32, layout=Layout.GPTQ, **_HALF),
    "gptq_g32_asym": int4(32, layout=Layout.GPTQ, symmetric=False, **_HALF),
    "gptq_g32_desc_act": int4(32, layout=Layout.GPTQ, activation_order=True, **_HALF),
    "gptq_v2_g32_asym": int4(32, layout=Layout.GPTQ_V2, symmetric=False, **_HALF),
    "gptq_8bit_g32": int8(32, layout=Layout.GPTQ, **_HALF),
    "gptq_8bit": int8(layout=Layout.GPTQ_V2),
    "awq_g32": int4(32, layout=Layout.AWQ, symmetric=False, **_HALF),
}


def quantisable(architecture: ModelArchitecture, stored: WeightFormat) -> list[TextLinear]:
    """Kinds of linear layers whose inputs are whole groups."""
    a, size = architecture, stored.group_size or 1
    heads = a.num_attention_heads
    inputs = {
        TextLinear.OUTPUT: (heads * a.head_dim, heads * a.global_head_dim),
        TextLinear.DOWN: (a.intermediate_size,),
        TextLinear.EXPERT_DOWN: (a.moe_intermediate_size,),
        TextLinear.LAYER_PROJECTION: (a.hidden_size_per_layer_input,),
    }
    fitting = [each for each in modules(a) if not any(k % size for k in inputs.get(each, (a.hidden_size,)))]
    within_layers = stored.layout in (*GPTQ, Layout.AWQ)
    return [each for each in fitting if not within_layers or each is not TextLinear.MODEL_PROJECTION]


def quantization_config(
    architecture: ModelArchitecture, stored: WeightFormat, dense: Sequence[TextLinear], *, rounds_inputs: bool = True
) -> dict[str, Any]:
    """As tools write it, with the modules of `dense` in `ignore` by name. GPTQ and AWQ name none of them."""
    if stored.layout in (*GPTQ, Layout.AWQ):
        size = stored.group_size or -1
        if stored.layout is Layout.AWQ:
            return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        return {
            "quant_method": "gptq", "bits": 8 if stored.stored is StoredType.INT8 else 4, "group_size": size,
            "sym": stored.symmetric, "desc_act": stored.activation_order, "checkpoint_format": str(stored.layout),
        }  # fmt: skip
    if stored.layout is Layout.BLOCK_FP8:
        left = ["lm_head", *(name for each in dense for name in modules(architecture)[each])]
        scheme = "dynamic" if rounds_inputs else None
        config = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "modules_to_not_convert": left}
        return config | ({"activation_scheme": scheme} if scheme else {})
    if stored.layout is Layout.MODELOPT:
        left = [
            "lm_head",
            "*router*",
            "*embed*",
            *(PREFIX + name for each in dense for name in modules(architecture)[each]),
        ]
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": left}
    layout, activations, weights = "pack-quantized", None, dict[str, Any]()
    if stored.stored is StoredType.INT4:
        weights = {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": stored.group_size,
            "symmetric": stored.symmetric, "actorder": "group" if stored.activation_order else None,
        }  # fmt: skip
    elif stored.stored is StoredType.INT8:
        layout = "pack-quantized" if stored.layout is Layout.PACKED_INT8 else "int-quantized"
        weights = {"num_bits": 8, "type": "int", "strategy": stored.scales, "group_size": stored.group_size}
    elif stored.stored is StoredType.NVFP4:
        layout = "nvfp4-pack-quantized"
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    else:
        layout = "float-quantized"
        weights = {"num_bits": 8, "type": "float", "strategy": stored.scales, "symmetric": True}
        weights["block_structure"] = [FP8_BLOCK, FP8_BLOCK] if stored.scales == "block" else None
        rounded = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        activations = rounded if rounds_inputs else None
    named = modules(architecture)
    ignored = [PREFIX + name for each in dense for name in named[each]]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*ALWAYS_IGNORED, *ignored],
        "kv_cache_scheme": None,
    }


def quantised_tensors(
    tensors: Mapping[str, Tensor],
    architecture: ModelArchitecture,
    stored: WeightFormat,
    linears: Sequence[TextLinear],
    *,
    fused_experts: bool,
) -> dict[str, Tensor]:
    """All tensors of the quantised checkpoint, by name without prefix. `fused_experts`: packed INT4 in one tensor."""
    written = dict(tensors)
    for linear in linears:
        for name in modules(architecture)[linear]:
            weight = _take(written, tensors, name)
            seeded = torch.Generator().manual_seed(weight.shape[1])
            order = torch.arange(weight.shape[1])
            if stored.activation_order:  # what a matrix's inputs are ordered by is the same for all that share them
                order = torch.randperm(weight.shape[1], generator=seeded)
            made = matrix_tensors(weight, stored.matrix(linear), order)
            written |= {f"{name}{part}": tensor for part, tensor in made.items()}
    return _fuse_experts(written, architecture) if fused_experts else written


def _take(written: dict[str, Tensor], tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """Remove a module's weight, or the fused experts that it is part of, and return it."""
    if f"{module}.weight" in tensors:
        return written.pop(f"{module}.weight").float()
    layer, _, rest = module.partition(".experts.")
    expert, _, name = rest.partition(".")
    fused = f"{layer}.experts.{'down' if name == 'down_proj' else 'gate_up'}_proj"
    written.pop(fused, None)
    whole = tensors[fused][int(expert)].float()
    return whole if name == "down_proj" else whole.chunk(2)[0 if name == "gate_proj" else 1]


def _fuse_experts(written: dict[str, Tensor], architecture: ModelArchitecture) -> dict[str, Tensor]:
    for layer in range(architecture.num_hidden_layers):
        for part in ("packed", "scale", "zero_point"):
            prefix, ending = f"layers.{layer}.experts.", f"_proj.weight_{part}"
            if f"{prefix}0.down{ending}" not in written:
                continue
            take = [
                [written.pop(f"{prefix}{e}.{name}{ending}") for name in ("gate", "up", "down")]
                for e in range(architecture.num_experts)
            ]
            written[f"{prefix}gate_up_proj_{part}"] = torch.stack([torch.cat(each[:2]) for each in take])
            written[f"{prefix}down_proj_{part}"] = torch.stack([each[2] for each in take])
    return {name: tensor for name, tensor in written.items() if not (".experts." in name and name.endswith("_shape"))}


def quantise(
    model: Path,
    output: Path,
    format_name: str,
    *,
    leave: Sequence[TextLinear] = (),
    fused_experts: bool = False,
    rounds_inputs: bool = True,
) -> WeightFormat:
    """Write the checkpoint `model`, quantised but for the linear layers of `leave`, to `output`; return its format.

    `rounds_inputs`: one of FP8 says that it is made for inputs that are rounded by token. Raises KeyError for a format
    that is not in FORMATS.
    """
    stored, config = FORMATS[format_name], json.loads((model / "config.json").read_text())
    architecture = ModelArchitecture.from_config(config)
    linears = [each for each in quantisable(architecture, stored) if each not in leave]
    dense = [each for each in modules(architecture) if each not in linears]
    output.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, output)
    config["quantization_config"] = quantization_config(architecture, stored, dense, rounds_inputs=rounds_inputs)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    source = {k: v for file in sorted(model.glob("*.safetensors")) for k, v in load_file(file).items()}
    prefix = PREFIX if any(name.startswith(PREFIX) for name in source) else "model."
    bare = {name.removeprefix(prefix): tensor for name, tensor in source.items()}
    made = quantised_tensors(bare, architecture, stored, linears, fused_experts=fused_experts)
    save_weights({PREFIX + name: tensor.contiguous() for name, tensor in made.items()}, output)
    rounds = rounds_inputs and stored.stored is StoredType.FP8
    return stored.model_copy(update={"dense": tuple(dense), "fp8_activations": rounds})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a directory with an unquantised checkpoint")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--leave", nargs="*", choices=[*TextLinear], default=[], help="linear layers to leave in bfloat16"
    )
    parser.add_argument("--fused-experts", action="store_true", help="experts in one tensor, INT4 only")
    arguments = parser.parse_args(argv)
    leave = [TextLinear(each) for each in arguments.leave]
    stored = quantise(
        arguments.model, arguments.output, arguments.format, leave=leave, fused_experts=arguments.fused_experts
    )
    print(f"{arguments.output}: {stored}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
