"""quantization_config as published checkpoints state it, and what is refused by name.

READ: from a public copy of the checkpoint's config, recipe or tensor list. INFERRED: from the tool's defaults.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from architecture_of import architecture_of
from hypothesis import given
from hypothesis import strategies as st

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.inspection import _as_the_files_hold_experts
from modelserve.model.quantization_config import modules, stated_format
from modelserve.model.weight_format import StoredType, TextLinear, WeightFormat, int4
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


PUBLISHED = {
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
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method gptq .*made with GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method awq .*compressed-tensors INT4"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes .*compressed-tensors INT4"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "FP8-dynamic or FP8-block"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt .*INT4 or FP8"),
        ({"quantization_config": {"quant_method": "gguf"}}, "gguf .*qat-w4a16-ct"),
        ({"quantization_config": {"quant_method": "gemma"}}, "gemma .*qat-w4a16-ct"),
        ({"quantization_config": "int4"}, "quant_method str .*bfloat16"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "no config_groups"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": 1}}},
            "group without weights",
        ),
        (config(W4 | {"num_bits": 8}, []), "num_bits 8"),
        (config(W4, [], layout="int-quantized"), "format int-quantized"),
        (config(W4 | {"strategy": "channel", "group_size": None}, []), "strategy channel"),
        (config(W4 | {"group_size": 12}, []), "group_size 12"),
        (config(W4, [], activations=PER_TOKEN), "num_bits 4"),
        (
            config({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, [], layout="nvfp4"),
            "type float, num_bits 4, strategy tensor_group.*INT4",
        ),
        (fp8(E4M3 | {"strategy": "block", "block_structure": [64, 64]}, []), r"block_structure \[64, 64\]"),
        (
            config(E4M3, [], layout="float-quantized", activations=PER_TOKEN | {"dynamic": False}),
            "input_activations .*dynamic",
        ),
        (config(W4, ["lm_head"], kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
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
                {"targets": ["re:.*mlp.*"], "weights": W4},
                {"targets": ["re:.*self_attn.*"], "weights": E4M3},
            ),
            "int4_g32 and fp8_channel",
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
    fused = ["model.language_model.layers.0.experts.gate_up_proj", "model.language_model.layers.0.experts.down_proj"]
    left = _as_the_files_hold_experts(stated, fused)
    assert left.dense == (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)
    packed = [f"{name}_packed" for name in fused]
    assert _as_the_files_hold_experts(stated, [*packed, "model.layers.0.experts.3.gate_proj.weight"]) == stated


@given(
    nonsense=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["quant_method", "config_groups", "weights", "targets", "ignore", "num_bits", "type",
                                 "strategy", "group_size", "input_activations", "format", "block_structure"]),
                inner | st.sampled_from(["compressed-tensors", "int", "float", "group", 4, 32]), max_size=6,
            )
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_nonsense_is_refused_and_not_crashed_on(nonsense: Any) -> None:
    stated = {"quant_method": "compressed-tensors", "config_groups": {"g": nonsense}, "ignore": []}
    for config_json in ({"quantization_config": nonsense}, {"quantization_config": stated}):
        with suppress(InvalidInput):
            stated_format(config_json, architecture_of("E2B"))
