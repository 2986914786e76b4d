"""A LoRA adapter binds to its model wholly, in every layout that tools write, or is refused with each name."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import pytest
from adapter_files import (
    CONFIG,
    OLDER,
    PEFT,
    TEXT_ONLY,
    Shapes,
    dense,
    experts_one_by_one,
    experts_stacked,
    write,
)
from architecture_of import architecture_of

from modelserve.cli.__main__ import main
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.adapters.binding import BoundAdapter, read_adapter
from modelserve.model.adapters.config import AdapterConfig
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear

SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")


def bound(tmp_path: Path, shapes: Shapes, size: str, **config: object) -> BoundAdapter:
    return read_adapter(write(tmp_path / "adapter", shapes, **config), architecture_of(size))


def refusal(tmp_path: Path, shapes: Shapes, size: str = "31B", **config: object) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        bound(tmp_path, shapes, size, **config)
    return str(caught.value)


def matrices(adapter: BoundAdapter) -> set[tuple[TextLinear, int | None, int, int | None]]:
    """What is adapted: kind, layer, which of those stacked, expert."""
    return {
        (each.module.linear, each.module.layer, part, expert)
        for each in adapter.factors
        for part, _ in each.module.parts
        for expert in (range(each.module.experts) if each.module.experts else (each.module.expert,))
    }


def all_matrices(a: ModelArchitecture) -> int:
    per_layer = 2 if a.hidden_size_per_layer_input else 0
    each = sum(
        1 + (0 if not a.owns_cache(layer) else 1 if a.k_from_v(layer) else 2) + 1 + 3 + per_layer + 3 * a.num_experts
        for layer in range(a.num_hidden_layers)
    )
    return each + (1 if per_layer else 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prefix", [PEFT, TEXT_ONLY, OLDER, "base_model.model.language_model.model."])
def test_every_matrix_of_a_model_is_bound_once(size: str, prefix: str, tmp_path: Path) -> None:
    architecture = architecture_of(size)
    shapes = dense(architecture, prefix=prefix)
    if architecture.num_experts:
        shapes |= experts_stacked(architecture, prefix=prefix)
    adapter = bound(tmp_path, shapes, size)
    assert len(matrices(adapter)) == all_matrices(architecture)
    assert adapter.parameters == sum(math.prod(shape) for shape in shapes.values())
    assert {(each.rank, each.scale) for each in adapter.factors} == {(4, 2.0)}


@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts_are_told_apart_by_shapes(turned: bool, tmp_path: Path) -> None:
    architecture = architecture_of("26B-A4B")
    adapter = bound(tmp_path, experts_stacked(architecture, turned=turned), "26B-A4B")
    assert len(adapter.factors) == 60
    assert {each.turned for each in adapter.factors} == {turned}
    assert adapter.factors[0].name == "layers.0.experts.gate_up_proj"
    swapped = {name.replace(".base_layer", ".inner"): shape for name, shape in experts_stacked(architecture).items()}
    swapped = {name.replace("experts.lora", "experts.base_layer.lora"): shape for name, shape in swapped.items()}
    swapped = {name.replace(".inner", ""): shape for name, shape in swapped.items()}
    other = bound(tmp_path, swapped, "26B-A4B")
    assert matrices(other) == matrices(adapter), "PEFT wraps parameters in the order in which they are named"


def test_experts_one_by_one_are_23040_factors(tmp_path: Path) -> None:
    shapes = experts_one_by_one(architecture_of("26B-A4B"))
    assert len(shapes) == 23_040
    adapter = bound(tmp_path, shapes, "26B-A4B")
    stacked = bound(tmp_path, experts_stacked(architecture_of("26B-A4B")), "26B-A4B")
    assert matrices(adapter) == matrices(stacked)
    (del_a, del_b) = list(shapes)[:2]
    told = refusal(tmp_path, {name: shape for name, shape in shapes.items() if name != del_b}, "26B-A4B")
    assert "1 of its 23039 tensors do not bind" in told
    assert "lora_B of its module is missing" in told
    assert del_a.removeprefix("base_model.model.").split(".0.")[0] in told


def test_matrices_that_tools_fuse_are_bound_as_one(tmp_path: Path) -> None:
    for size in ("E4B", "31B"):
        architecture = architecture_of(size)
        adapter = bound(tmp_path, dense(architecture, fused=True), size)
        assert len(matrices(adapter)) == all_matrices(architecture)
        assert any(len(each.module.parts) == 3 for each in adapter.factors)
    shapes = dense(architecture_of("31B")) | dense(architecture_of("31B"), fused=True)
    assert "adapts the same matrix" in refusal(tmp_path, shapes)


def test_ranks_and_scales_are_those_of_the_patterns(tmp_path: Path) -> None:
    architecture = architecture_of("31B")
    shapes = dense(architecture) | {
        f"{PEFT}layers.7.mlp.down_proj.lora_A.weight": (16, 21504),
        f"{PEFT}layers.7.mlp.down_proj.lora_B.weight": (5376, 16),
    }
    adapter = bound(
        tmp_path,
        shapes,
        "31B",
        rank_pattern={r"layers\.7\.mlp\.down_proj": 16},
        alpha_pattern={"o_proj": 2, "^k_proj": 9},
    )
    by_name = {each.name: each for each in adapter.factors}
    assert (adapter.rank, by_name["layers.7.mlp.down_proj"].rank, by_name["layers.7.mlp.down_proj"].scale) == (
        16, 16, 0.5,
    )  # fmt: skip
    assert by_name["layers.3.self_attn.o_proj"].scale == 0.5
    assert by_name["layers.3.self_attn.k_proj"].scale == 2.0, "no name begins with k_proj"
    told = refusal(tmp_path, shapes)
    assert "lora_A is [16, 21504] and lora_B [5376, 16]; of rank 4" in told
    rooted = bound(tmp_path, dense(architecture), "31B", use_rslora=True)
    assert {each.scale for each in rooted.factors} == {4.0}


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("layers.5.self_attn.v_proj.lora_A.weight", (4, 5376), "the layer has no v_proj"),
        ("layers.60.mlp.up_proj.lora_A.weight", (4, 5376), "the model has 60 layers"),
        ("layers.0.router.proj.lora_A.weight", (4, 5376), "routers are not served"),
        ("layers.0.mlp.gate_proj.lora_magnitude_vector", (1, 21504), "DoRA"),
        ("layers.0.mlp.gate_proj.lora_B.bias", (1, 21504), "biases are not served"),
        ("embed_tokens.lora_embedding_A", (4, 262144), "embeddings are not served"),
        ("layers.0.mlp.gate_proj.weight", (21504, 5376), "whole modules"),
        ("layers.0.mlp.shared_proj.lora_A.weight", (4, 5376), "no such module"),
        ("per_layer_model_projection.lora_A.weight", (4, 5376), "no such module"),
        ("layers.0.experts.lora_A.weight", (4, 5376), "no such module"),
    ],
)
def test_a_name_that_does_not_bind_refuses_the_whole_adapter(
    name: str, shape: tuple[int, int], says: str, tmp_path: Path
) -> None:
    added = {PEFT + name: shape}
    if ".lora_A." in name:
        added[PEFT + name.replace(".lora_A.", ".lora_B.")] = (shape[1], shape[0])
    told = refusal(tmp_path, dense(architecture_of("31B")) | added)
    assert says in told
    assert f"{len(added)} of its" in told
    assert "so none is used" in told


def test_every_name_is_told_and_those_that_differ_in_numbers_once(tmp_path: Path) -> None:
    told = refusal(tmp_path, dense(architecture_of("12B")))
    assert told.startswith("adapter: none of its")
    assert "model.language_model.layers.*.mlp.up_proj.lora_B.weight (0, 1, 2, 3, " in told
    assert len(told) < 20_000


def test_towers_are_refused_with_the_command_that_strips_them(tmp_path: Path) -> None:
    tower = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.lora_A.weight"
    assert "safetensors" in refusal(tmp_path, dense(architecture_of("31B")) | {tower: (4, 1152)})


def test_keys_of_layers_that_read_another_cache_are_kept_apart(tmp_path: Path) -> None:
    architecture = architecture_of("E2B")
    layer = architecture.num_hidden_layers - 1
    added = {
        f"{PEFT}layers.{layer}.self_attn.k_proj.lora_A.weight": (4, 1536),
        f"{PEFT}layers.{layer}.self_attn.k_proj.lora_B.weight": (512, 4),
    }
    adapter = bound(tmp_path, dense(architecture) | added, "E2B")
    assert [each.name for each in adapter.without_effect] == [f"layers.{layer}.self_attn.k_proj"]
    assert len(matrices(adapter)) == all_matrices(architecture)
    assert "it would change nothing" in refusal(tmp_path, added, "E2B")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("alora_invocation_tokens", [1, 2]),
        ("init_lora_weights", "pissa_niter_4"),
        ("fan_in_fan_out", True),
        ("peft_type", "IA3"),
        ("rank_pattern", {"(a+)+$": 4}),
        ("alpha_pattern", {".*.*.*.*q_proj": 4}),
        ("alpha_pattern", {"": 4}),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_its_setting(field: str, value: object, tmp_path: Path) -> None:
    told = refusal(tmp_path, dense(architecture_of("31B")), **{field: value})
    assert field in told


def test_settings_that_mean_plain_lora_are_taken() -> None:
    config = AdapterConfig.from_document(
        {**CONFIG, "use_dora": False, "modules_to_save": None, "init_lora_weights": "gaussian", "lora_dropout": 0.1}
    )
    assert config.scale("layers.0.mlp.down_proj") == 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("r", 0), ("r", 1 << 20), ("lora_alpha", math.inf), ("lora_alpha", None), ("rank_pattern", [1])],
)
def test_broken_settings_are_told_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        AdapterConfig.from_document({**CONFIG, field: value})


def test_hostile_files_are_refused_in_flat_memory(tmp_path: Path) -> None:
    shapes = dense(architecture_of("31B"))
    directory = write(tmp_path / "adapter", shapes)
    file = directory / "adapter_model.safetensors"
    whole = file.read_bytes()[: 1 << 20]
    tracemalloc.start()
    for content in (b"", b"\xff" * 8, whole[:100], (1 << 62).to_bytes(8, "little") + whole[8:], b"\2\0\0\0\0\0\0\0[]"):
        file.write_bytes(content)
        with pytest.raises(InvalidInput):
            read_adapter(directory, architecture_of("31B"))
    write(directory, shapes, dtype="I8")
    with pytest.raises(UnsupportedModel, match="dtype is I8"):
        read_adapter(directory, architecture_of("31B"))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    file.unlink()
    (directory / "adapter_model.bin").touch()
    with pytest.raises(InvalidInput, match="may run code"):
        read_adapter(directory, architecture_of("31B"))


def test_the_command_prints_what_is_adapted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture = architecture_of("26B-A4B")
    directory = write(tmp_path / "adapter", dense(architecture) | experts_stacked(architecture))
    assert main(["adapter", str(directory), "--model", "hf://google/gemma-4-26B-A4B-it"]) == 0
    text = capsys.readouterr().out
    assert "expert_gate_up  3840     30      4     2" in text
    assert "All tensors bind" in text
    assert main(["adapter", str(directory), "--model", "hf://google/gemma-4-26B-A4B-it", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rank"] == 4
    assert found["bytes"] == 2 * found["parameters"]
    assert main(["adapter", str(directory), "--model", "hf://google/gemma-4-31B-it"]) == 2
    assert "name the model that it was trained on" in capsys.readouterr().err
    assert main(["adapter", str(directory), "--model", "hf://somebody/else"]) == 2
    assert "give its directory" in capsys.readouterr().err.replace("download its config.json, and ", "")
