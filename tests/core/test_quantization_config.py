"""quantization_config as published checkpoints state it, and what is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from architecture_of import architecture_of
from hypothesis import given
from hypothesis import strategies as st
from published_configs import (
    E4M3,
    FP4,
    FP4_INPUTS,
    GPTQ,
    KV_SCHEME,
    MODELOPT_NVFP4,
    PER_TOKEN,
    PUBLISHED,
    STATIC,
    W4,
    auto_round,
    config,
    fp8,
    modelopt,
)

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.checkpoint_files import TensorEntry
from modelserve.model.quantization.config import read_config, stated_format, unused_parts
from modelserve.model.quantization.files import as_files_hold
from modelserve.model.quantization.linears import modules
from modelserve.model.weight_format import (
    ScaleType,
    StoredType,
    TextLinear,
    WeightFormat,
    int4,
)
from modelserve.sizing.weights.text import tensor_parallel_problem


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
        (config(E4M3, [], layout="float-quantized", activations={"type": ["float"]}), "input_activations .*known are"),
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
        stored = stated_format(stated, architecture_of("31B"))
        assert stored is not None
        return " ".join(unused_parts(stated, stored))

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
    assert write({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == {"quant_method": "awq"}
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = {"quantization_config": write({})}
    assert stated_format(found, architecture_of("31B")) == MODELOPT_NVFP4
    assert write({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})["quant_algo"] == "FP8"
