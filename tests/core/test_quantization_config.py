"""quantization_config as published checkpoints state it, and what is refused by name.

READ: from a public copy of the checkpoint's config, recipe or tensor list. INFERRED: from the tool's defaults.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from architecture_of import architecture_of
from hypothesis import given
from hypothesis import strategies as st

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.checkpoint_files import TensorEntry
from modelserve.model.quantization.config import read_config, stated_format, unused_parts
from modelserve.model.quantization.files import as_files_hold
from modelserve.model.quantization.linears import modules
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
from modelserve.sizing.weights.text import tensor_parallel_problem

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_states_its_format(name: str) -> None:
    variant, stated, expected = PUBLISHED[name]
    assert stated_format(stated, architecture_of(variant)) == expected
    assert WeightFormat.model_validate_json(expected.model_dump_json()) == expected


def test_what_is_not_quantised_states_nothing() -> None:
    assert stated_format({}, architecture_of("E2B")) is None


def test_the_linear_layers_of_e2b_are_those_that_its_checkpoint_quantises() -> None:
    """276 packed tensors (READ): 15 layers of 9, 20 KV-shared ones of 7, and the model's projection."""
    named = modules(architecture_of("E2B"))
    assert sum(map(len, named.values())) == 15 * 9 + 20 * 7 + 1
    keys = [name for name in named[TextLinear.QKV] if name.endswith("k_proj")]
    assert keys == [f"layers.{layer}.self_attn.k_proj" for layer in range(15)]


@pytest.mark.parametrize(
    ("patterns", "dense"),
    [
        (["re:.*self_attn.*"], (TextLinear.QKV, TextLinear.OUTPUT)),  # as NVFP4 of NVIDIA leaves attention
        (["re:.*o_proj", "re:.*down_proj$"], (TextLinear.OUTPUT, TextLinear.DOWN)),
        (["re:model[.]layers[.].*[.]mlp[.](gate|up)_proj"], (TextLinear.GATE_UP,)),  # names of a bare text model
    ],
)
def test_an_ignore_list_of_whole_kinds_is_honoured(patterns: list[str], dense: tuple[TextLinear, ...]) -> None:
    stated = stated_format(config(W4, ["lm_head", *patterns]), architecture_of("31B"))
    assert stated is not None
    assert stated.dense == dense
    assert stated.of(dense[0]) is StoredType.BFLOAT16
    assert str(stated) == f"int4_g32 without {', '.join(dense)}"


GROUP = {"targets": ["Linear"], "weights": W4}


def two_groups(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    stated = {"quant_method": "compressed-tensors", "config_groups": {"a": first, "b": second}, "ignore": []}
    return {"quantization_config": stated}


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "None bits, group_size 128"),
        (
            {"quantization_config": GPTQ["quantization_config"] | {"bits": 3}},
            "3 bits, group_size 128.*GPTQ checkpoint of 4",
        ),
        ({"quantization_config": GPTQ["quantization_config"] | {"group_size": -1}}, "4 bits, group_size -1"),
        ({"quantization_config": GPTQ["quantization_config"] | {"bits": 8, "sym": False}}, "8 bits.*asymmetric"),
        ({"quantization_config": GPTQ["quantization_config"] | {"bits": 8, "desc_act": True}}, "8 bits.*desc_act"),
        (
            {"quantization_config": GPTQ["quantization_config"] | {"checkpoint_format": "marlin"}},
            "checkpoint_format marlin",
        ),
        (
            {"quantization_config": GPTQ["quantization_config"] | {"dynamic": {".*7.*": {"bits": 8}}}},
            r"in int4_g128_f16 and layers.7.* in int8_g128_f16 .one format must hold",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "None bits, group_size 128, asymmetric in awq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "version gemv"),
        (auto_round(packing_format="auto_round:fp8"), "packing_format auto_round:fp8"),
        (auto_round(data_type="mx_fp"), "data_type mx_fp"),
        (auto_round(act_bits=8), "act_bits 8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes .*GPTQ, AWQ"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"\[64, 64\].*\[128, 128\]"),
        (modelopt(quant_algo="W4A8_AWQ"), "quant_algo W4A8_AWQ .*NVFP4, FP8"),
        (modelopt(quant_algo="NVFP4", group_size=32), "NVFP4 with group_size 32"),
        (modelopt(quant_algo="MIXED_PRECISION"), "without quantized_layers"),
        (modelopt(quant_algo="NVFP4", exclude_modules=["*layers.3.mlp*"]), r"layers\.0\.mlp.* quantised and layers\.3"),
        ({"quantization_config": {"quant_method": "gguf"}}, "gguf .*qat-w4a16-ct"),
        ({"quantization_config": {"quant_method": "gemma"}}, "gemma .*qat-w4a16-ct"),
        ({"quantization_config": "int4"}, "quant_method str .*bfloat16"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "no config_groups"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": 1}}},
            "group without weights",
        ),
        (config(W4 | {"num_bits": 8, "symmetric": False}, []), "num_bits 8.*asymmetric"),
        (config(W4, [], layout="int-quantized"), "format int-quantized"),
        (config(W4 | {"strategy": "channel", "group_size": None}, []), "strategy channel"),
        (config(W4 | {"group_size": 12}, []), "group_size 12"),
        (config(W4, [], activations=PER_TOKEN), "num_bits 4"),
        (
            config(FP4 | {"group_size": 32, "strategy": "group"}, [], layout="mxfp4-pack-quantized"),
            "type float, num_bits 4, strategy group, group_size 32.*INT4",
        ),
        (fp8(E4M3 | {"strategy": "block", "block_structure": [64, 64]}, []), r"block_structure \[64, 64\]"),
        (
            config(E4M3, [], layout="float-quantized", activations=PER_TOKEN | {"num_bits": 6}),
            "input_activations .*known are",
        ),
        (config(W4, ["lm_head"], sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (config(W4, ["lm_head"], quantization_status="frozen"), "quantization_status frozen"),
        (config(W4, ["re:(("]), "no regular expression"),
        (config(W4, ["Linear"]), "no weight scheme"),
        (
            config(W4, ["lm_head", "model.language_model.layers.7.mlp.down_proj"]),
            r"layers\.0\.mlp\.down_proj quantised and layers\.7\.mlp\.down_proj not",
        ),
        (config(W4, ["lm_head", "re:.*q_proj"]), r"layers\.0\.self_attn\.k_proj quantised and .*q_proj not"),
        (
            two_groups(
                {"targets": ["re:.*layers.0.mlp.*"], "weights": W4}, {"targets": ["re:.*mlp.*"], "weights": E4M3}
            ),
            r"layers\.0\.mlp\.gate_proj in int4_g32 and layers\.1\.mlp\.gate_proj in fp8_channel",
        ),
    ],
)
def test_other_schemes_are_refused_by_name(stated: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        stated_format(stated, architecture_of("31B"))


def test_a_quantised_router_or_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.router\.proj is quantised"):
        stated_format(config(W4, ["lm_head"]), architecture_of("26B-A4B"))
    untied = architecture_of("31B").model_copy(update={"tie_word_embeddings": False})
    with pytest.raises(UnsupportedModel, match="lm_head is quantised"):
        stated_format(config(W4, []), untied)
    assert stated_format(config(W4, ["lm_head"]), untied) == int4(32)
    assert stated_format(config(W4, []), architecture_of("31B")) == int4(32)  # tied: the file's head is not read


def test_an_activation_order_is_known_where_it_is_stored() -> None:
    for stated, ordered in (("group", True), ("weight", False), ("static", False), (None, False)):
        found = stated_format(config(W4 | {"actorder": stated}, ["lm_head"]), architecture_of("12B"))
        assert found is not None
        assert found.activation_order is ordered
    found = stated_format(config(W4 | {"actorder": "group"}, ["lm_head"]), architecture_of("12B"))
    assert "weight_g_idx" in (tensor_parallel_problem(architecture_of("12B"), 2, weight_format=found) or "")
    assert tensor_parallel_problem(architecture_of("12B"), 1, weight_format=found) is None
    with pytest.raises(UnsupportedModel, match="experts with an activation order"):
        stated_format(config(W4 | {"actorder": "group"}, ["re:.*router"]), architecture_of("26B-A4B"))


def test_the_files_say_whether_experts_are_quantised() -> None:
    """Fused experts are no module of class Linear: tools that quantise those leave them, and write the same config."""
    stated = int4(32)
    moe, prefix = architecture_of("26B-A4B"), "model.language_model.layers.0.experts."
    fused = [entry(f"{prefix}{name}", "BF16") for name in ("gate_up_proj", "down_proj")]
    left = as_files_hold(stated, moe, fused)
    assert left.dense == (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)
    packed = [entry(f"{prefix}{name}_packed", "I32") for name in ("gate_up_proj", "down_proj")]
    assert as_files_hold(stated, moe, [*packed, entry(f"{prefix}3.gate_proj.weight_packed", "I32")]) == stated


def entry(name: str, dtype: str) -> TensorEntry:
    return TensorEntry(name, Path("model.safetensors"), dtype, (1,), 0, 2)


def test_the_files_say_which_layers_a_gptq_checkpoint_leaves_and_what_its_scales_are() -> None:
    """Its config names neither."""
    e4b, prefix = architecture_of("E4B"), "model.language_model."
    stated = stated_format(GPTQ, e4b)
    assert stated is not None
    assert str(stated) == "int4_g128_f16 without per_layer_model_projection"
    dense = modules(e4b)[TextLinear.LAYER_INPUT_GATE]
    tensors = [entry(f"{prefix}{name}.weight", "BF16") for name in dense]
    tensors.append(entry(f"{prefix}layers.0.mlp.gate_proj.scales", "BF16"))
    tensors.append(entry(f"{prefix}layers.0.self_attn.q_proj.scales", "F16"))
    found = as_files_hold(stated, e4b, tensors)
    assert found.dense == (TextLinear.LAYER_INPUT_GATE, TextLinear.MODEL_PROJECTION)
    assert found.matrix(TextLinear.GATE_UP).scale_type is ScaleType.BFLOAT16
    assert found.matrix(TextLinear.QKV).scale_type is ScaleType.FLOAT16
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.per_layer_input_gate quantised and layers\.0"):
        as_files_hold(stated, e4b, tensors[:1])


@given(
    nonsense=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["quant_method", "config_groups", "weights", "targets", "ignore", "num_bits", "type",
                                 "strategy", "group_size", "input_activations", "format", "block_structure", "bits",
                                 "quant_algo", "quantized_layers", "dynamic", "extra_config", "packing_format", "sym"]),
                inner | st.sampled_from(["compressed-tensors", "int", "float", "group", 4, 32, "NVFP4"]), max_size=6,
            )
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_nonsense_is_refused_and_not_crashed_on(nonsense: Any) -> None:
    stated = {"quant_method": "compressed-tensors", "config_groups": {"g": nonsense}, "ignore": []}
    configs = [{"quantization_config": nonsense}, {"quantization_config": stated}]
    if isinstance(nonsense, dict):
        methods = ("gptq", "awq", "auto-round", "modelopt", "fp8", "compressed-tensors")
        configs += [{"quantization_config": {**nonsense, "quant_method": method}} for method in methods]
    for config_json in configs:
        with suppress(InvalidInput):
            stated_format(config_json, architecture_of("E2B"))


def test_what_a_checkpoint_states_and_is_not_used_is_said() -> None:
    def said(stated: dict[str, Any]) -> str:
        return " ".join(unused_parts(stated, stated_format(stated, architecture_of("31B"))))

    assert said(config(W4, ["lm_head"])) == ""
    assert "k_scale and v_scale are not read" in said(config(W4, ["lm_head"], kv_cache_scheme=KV_SCHEME))
    assert "k_scale" in said(modelopt(quant_algo="NVFP4", kv_cache_quant_algo="FP8"))
    assert "not rounded to NVFP4" in said(config(FP4, [], layout="nvfp4-pack-quantized", activations=FP4_INPUTS))
    assert said(config(FP4, [], layout="nvfp4-pack-quantized")) == ""
    assert said(modelopt(quant_algo="W4A16_NVFP4")) == ""
    assert "input_scale" in said(config(E4M3, [], layout="float-quantized", activations=STATIC))
    assert said(fp8(E4M3, [])) == ""


def test_modelopts_own_file_counts_where_config_json_is_silent(tmp_path: Path) -> None:
    def write(config_json: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps(config_json))
        found = read_config(tmp_path).get("quantization_config")
        assert found is None or isinstance(found, dict)
        return found or {}

    assert write({}) == {}
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = {"quantization_config": write({})}
    assert stated_format(found, architecture_of("31B")) == MODELOPT_NVFP4
    assert write({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})["quant_algo"] == "FP8"
