"""`quantization_config` as published checkpoints state it, by name, with the variant and the format that it states.

READ: from a public copy of the checkpoint's config, recipe or tensor list. INFERRED: from the tool's defaults.
"""

from __future__ import annotations

from typing import Any

from modelserve.model.weight_format import (
    Layout,
    MatrixFormat,
    MixedLinears,
    ScaleType,
    StoredType,
    TextLinear,
    WeightFormat,
    int4,
)

W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
E4M3 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
BLOCK = E4M3 | {"strategy": "block", "block_structure": [128, 128]}
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
TOWERS = ["re:.*embed.*", "re:.*vision_tower.*", "re:.*vision_embedder.*", "re:.*audio_tower.*"]


def config(
    weights: dict[str, Any],
    ignore: list[str],
    *,
    layout: str = "pack-quantized",
    activations: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    stated = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return {"quantization_config": stated | {"config_groups": {"group_0": group}, "ignore": ignore} | more}


def fp8(weights: dict[str, Any], ignore: list[str], **more: Any) -> dict[str, Any]:
    return config(weights, ignore, layout="float-quantized", activations=PER_TOKEN, **more)


FP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}
FP4_INPUTS = FP4 | {"dynamic": "local"}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NVFP4 = WeightFormat(stored=StoredType.NVFP4, scales="group", group_size=16)
MODELOPT_NVFP4 = NVFP4.model_copy(update={"layout": Layout.MODELOPT})
ATTENTION, MLP = (TextLinear.QKV, TextLinear.OUTPUT), (TextLinear.GATE_UP, TextLinear.DOWN)
GPTQ = {
    "quantization_config": {
        "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False, "quant_method": "gptq",
        "checkpoint_format": "gptq", "pack_dtype": "int32", "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:7"]},
    }
}  # fmt: skip


def modelopt(**said: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", "producer": {"name": "modelopt"}, **said}}


def auto_round(**said: Any) -> dict[str, Any]:
    stated = {
        "bits": 4, "group_size": 128, "sym": True, "data_type": "int", "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq", "autoround_version": "0.9.0", "iters": 200,
        "block_name_to_quantize": "model.language_model.layers",
    }  # fmt: skip
    return {"quantization_config": stated | said}


def packed(
    group_size: int, layout: Layout, *, symmetric: bool = True, dense: tuple[TextLinear, ...] = ()
) -> WeightFormat:
    scale_type = ScaleType.FLOAT16
    return int4(group_size, symmetric=symmetric).model_copy(
        update={"layout": layout, "scale_type": scale_type, "dense": dense}
    )


PUBLISHED = {
    # READ (model card, hf_quant_config.json as NVIDIA's tool writes it): the MLP only.
    "nvidia/Gemma-4-31B-IT-NVFP4": (
        "31B",
        modelopt(
            quant_algo="NVFP4",
            group_size=16,
            kv_cache_quant_algo="FP8",
            exclude_modules=[
                "lm_head",
                "model.language_model.layers.*.self_attn*",
                "model.vision_tower*",
                "model.embed_vision*",
            ],
        ),
        MODELOPT_NVFP4.model_copy(update={"dense": ATTENTION}),
    ),
    # INFERRED from the tool: config.json as it converts it.
    "nvidia/Gemma-4-26B-A4B-IT-NVFP4": (
        "26B-A4B",
        modelopt(
            quant_algo="NVFP4",
            config_groups={
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            ignore=[
                "lm_head",
                *(f"model.language_model.layers.{i}.{part}*" for i in range(30) for part in ("self_attn", "router")),
            ],
            kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"},
        ),
        MODELOPT_NVFP4.model_copy(update={"dense": ATTENTION}),
    ),
    # INFERRED: each module named, two algorithms, as ollama's gemma4:31b-nvfp4.
    "modelopt MIXED_PRECISION": (
        "31B",
        modelopt(
            quantization={
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": "FP8",
                "quantized_layers": {
                    f"model.language_model.layers.{i}.{name}": {"quant_algo": "NVFP4", "group_size": 16}
                    if "mlp" in name
                    else {"quant_algo": "FP8"}
                    for i in range(60)
                    for name in (
                        "self_attn.q_proj",
                        "self_attn.k_proj",
                        "self_attn.v_proj",
                        "self_attn.o_proj",
                        "mlp.gate_proj",
                        "mlp.up_proj",
                        "mlp.down_proj",
                    )
                },
            }
        ),
        MODELOPT_NVFP4.model_copy(
            update={
                "mixed": (
                    MixedLinears(
                        linears=ATTENTION, format=MatrixFormat(stored="fp8", scales="tensor", fp8_activations=True)
                    ),
                )
            }
        ),
    ),
    # READ (the tool's example): W4A4 of all linear layers.
    "RedHatAI/gemma-4-31B-it-NVFP4": (
        "31B",
        config(
            FP4,
            ["lm_head", "re:.*vision_tower.*", "re:.*embed_vision.*"],
            layout="nvfp4-pack-quantized",
            activations=FP4_INPUTS,
            kv_cache_scheme=None,
        ),
        NVFP4,
    ),
    "RedHatAI/gemma-4-26B-A4B-it-NVFP4": (
        "26B-A4B",
        config(
            FP4,
            ["lm_head", "re:.*vision.*", "re:.*router.*"],
            layout="nvfp4-pack-quantized",
            activations=FP4_INPUTS,
            kv_cache_scheme=KV_SCHEME,
        ),
        NVFP4,
    ),
    "ebircak/gemma-4-31B-it-NVFP4A16-GPTQ": (
        "31B",
        config(FP4, ["lm_head", "re:.*vision.*"], layout="nvfp4-pack-quantized"),
        NVFP4,
    ),
    # INFERRED: two schemes in one config, whose format is that of its groups.
    "compressed-tensors mixed-precision": (
        "31B",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "ignore": ["lm_head", "re:.*vision.*"],
                "config_groups": {
                    "group_0": {
                        "targets": ["re:.*self_attn.*"],
                        "weights": E4M3,
                        "input_activations": PER_TOKEN,
                        "format": "float-quantized",
                    },
                    "group_1": {
                        "targets": ["Linear"],
                        "weights": FP4,
                        "input_activations": FP4_INPUTS,
                        "format": "nvfp4-pack-quantized",
                    },
                },
            }
        },
        NVFP4.model_copy(
            update={
                "mixed": (
                    MixedLinears(
                        linears=ATTENTION, format=MatrixFormat(stored="fp8", scales="channel", fp8_activations=True)
                    ),
                )
            }
        ),
    ),
    "llm-compressor W8A16": (
        "12B",
        config(E4M3 | {"type": "int"}, ["lm_head", *TOWERS]),
        WeightFormat(stored=StoredType.INT8, scales="channel", layout=Layout.PACKED_INT8),
    ),
    "llm-compressor W8A8": (
        "12B",
        config(
            E4M3 | {"type": "int"},
            ["lm_head", *TOWERS],
            layout="int-quantized",
            activations=PER_TOKEN | {"type": "int"},
        ),
        WeightFormat(stored=StoredType.INT8, scales="channel"),
    ),
    "llm-compressor FP8 (static)": (
        "12B",
        config(
            E4M3 | {"strategy": "tensor"},
            ["lm_head", *TOWERS],
            layout="float-quantized",
            activations=STATIC,
            kv_cache_scheme=KV_SCHEME,
        ),
        WeightFormat(stored=StoredType.FP8, scales="tensor", fp8_activations=True),
    ),
    "transformers FP8": (
        "31B",
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", "vision_tower", "embed_vision"],
            }
        },
        WeightFormat(stored=StoredType.FP8, scales="block", fp8_activations=True, layout=Layout.BLOCK_FP8),
    ),
    "transformers FP8, 26B-A4B": (
        "26B-A4B",
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", "vision_tower", "embed_vision", "router"],
            }
        },
        WeightFormat(stored=StoredType.FP8, scales="block", fp8_activations=True, layout=Layout.BLOCK_FP8),
    ),
    "GPTQModel": ("31B", GPTQ, packed(128, Layout.GPTQ)),
    "GPTQModel of E4B": ("E4B", GPTQ, packed(128, Layout.GPTQ, dense=(TextLinear.MODEL_PROJECTION,))),
    "GPTQModel, 8 bits beside 4": (
        "31B",
        {
            "quantization_config": GPTQ["quantization_config"]
            | {"checkpoint_format": "gptq_v2", "dynamic": {"+:.*down_proj": {"bits": 8}, "-:.*o_proj": {}}}
        },
        packed(128, Layout.GPTQ_V2, dense=(TextLinear.OUTPUT,)).model_copy(
            update={
                "mixed": (
                    MixedLinears(
                        linears=(TextLinear.DOWN,),
                        format=MatrixFormat(
                            stored="int8", scales="group", group_size=128, scale_type="float16", layout="gptq_v2"
                        ),
                    ),
                )
            }
        ),
    ),
    "AutoAWQ": (
        "31B",
        {
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": ["vision_tower", "self_attn.o_proj"],
            }
        },
        packed(128, Layout.AWQ, symmetric=False, dense=(TextLinear.OUTPUT,)),
    ),
    "Intel/gemma-4-31B-it-int4-AutoRound": ("31B", auto_round(), packed(128, Layout.GPTQ)),
    "AutoRound, asymmetric": (
        "31B",
        auto_round(sym=False, packing_format="auto_round"),
        packed(128, Layout.GPTQ_V2, symmetric=False),
    ),
    "AutoRound for AWQ": ("31B", auto_round(packing_format="auto_round:auto_awq"), packed(128, Layout.AWQ)),
    "AutoRound, some modules otherwise": (
        "31B",
        auto_round(
            extra_config={
                **{f"model.language_model.layers.{i}.mlp.down_proj": {"bits": 8} for i in range(60)},
                ".*self_attn.*": {"bits": 16, "data_type": "float"},
            }
        ),
        packed(128, Layout.GPTQ, dense=ATTENTION).model_copy(
            update={
                "mixed": (
                    MixedLinears(
                        linears=(TextLinear.DOWN,),
                        format=MatrixFormat(
                            stored="int8", scales="group", group_size=128, scale_type="float16", layout="gptq"
                        ),
                    ),
                )
            }
        ),
    ),
    # READ (recipe.yaml of the 12B): everything but the ignored, so also the linear layers of per-layer embeddings.
    **{
        f"google/gemma-4-{variant}-it-qat-w4a16-ct": (
            variant,
            config(W4, ["lm_head", *TOWERS, "re:.*router.*"]),
            int4(32),
        )
        for variant in ("E2B", "E4B", "12B", "31B")
    },
    # READ: asymmetric, groups of 32; the projection of the whole model is quantised, those of layers are not.
    "cyankiwi/gemma-4-E4B-it-AWQ-INT4": (
        "E4B",
        config(
            W4 | {"symmetric": False, "observer": "mse", "actorder": None},
            [
                "lm_head",
                *(f"model.language_model.layers.{i}.per_layer_input_gate" for i in range(42)),
                *(f"model.language_model.layers.{i}.per_layer_projection" for i in range(42)),
                "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear",
            ],
        ),
        int4(32, symmetric=False).model_copy(
            update={"dense": (TextLinear.LAYER_INPUT_GATE, TextLinear.LAYER_PROJECTION)}
        ),
    ),
    # READ: asymmetric, groups of 128.
    "ebircak/gemma-4-31B-it-4bit-W4A16-AWQ": (
        "31B",
        config(
            W4 | {"group_size": 128, "symmetric": False, "zp_dtype": "torch.int8"},
            ["lm_head", "re:model.vision_tower.*", "re:model.multi_modal_projector.*"],
        ),
        int4(128, symmetric=False),
    ),
    # INFERRED from the example of the tool that made it.
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": (
        "31B",
        fp8(E4M3, ["lm_head", "re:.*embed.*", "re:.*vision_tower.*"]),
        WeightFormat(stored=StoredType.FP8, scales="channel", fp8_activations=True),
    ),
    "RedHatAI/gemma-4-31B-it-FP8-block": (
        "31B",
        config(
            BLOCK,
            ["lm_head", "re:.*embed.*", "re:.*vision_tower.*"],
            layout="float-quantized",
            activations=PER_TOKEN | {"strategy": "group", "group_size": 128},
        ),
        WeightFormat(stored=StoredType.FP8, scales="block", fp8_activations=True),
    ),
    # READ (its model card): experts one by one.
    "SilentEight/gemma-4-26B-A4B-it-FP8-Dynamic": (
        "26B-A4B",
        fp8(E4M3, ["lm_head", "re:.*embed.*", "re:.*router", "re:.*vision_tower.*", "re:.*norm.*"]),
        WeightFormat(stored=StoredType.FP8, scales="channel", fp8_activations=True),
    ),
}
