"""What a GGUF file says of a model: geometry, weight format and bytes, from files of the published sizes' own names,
shapes and keys that hold no weights; and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from architecture_of import architecture_of
from gguf_models import tensor_shapes, types_of, write_sparse

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.inspection import inspect_checkpoint, read_architecture, read_unused_parts, read_weight_format
from modelserve.model.gguf.tensor_names import gguf_name, text_name
from modelserve.model.weight_format import Layout, ScaleType, StoredType, TextLinear
from modelserve.sizing.weights.text import weight_bytes

SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")


@pytest.mark.parametrize("size", SIZES)
def test_the_geometry_is_that_of_config_json(size: str, tmp_path: Path) -> None:
    architecture = architecture_of(size)
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, "Q4_0"))
    found = read_architecture(tmp_path)
    assert set(found.eos_token_ids) == {50, 106}
    assert found.model_copy(update={"eos_token_ids": architecture.eos_token_ids}) == architecture


@pytest.mark.parametrize("size", SIZES)
def test_names_are_those_of_llama_cpp(size: str) -> None:
    gguf = pytest.importorskip("gguf")
    architecture = architecture_of(size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, architecture.num_hidden_layers)
    for name, _ in tensor_shapes(architecture):
        ours = text_name(name)
        assert ours is not None
        assert gguf_name(ours) == name
        if name.endswith("_inp.scale"):
            assert ours.endswith("router.scale")  # the converter renames both by hand
        elif name.endswith("_exps.scale"):
            assert ours.endswith("router.per_expert_scale")
        else:
            found = names.get_name(f"model.{ours}", try_suffixes=(".weight",))
            assert found.removesuffix(".weight") == name.removesuffix(".weight")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16"])
def test_bytes_are_planned_from_the_header(size: str, kind: str, tmp_path: Path) -> None:
    """Those of the file's own blocks, but for tables, which are held in bfloat16."""
    architecture = architecture_of(size)
    named = {"per_layer_model_proj": "BF16"}
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, kind, **named, token_embd="Q6_K"))
    facts = inspect_checkpoint(tmp_path)
    per_block = {"Q4_0": 18 / 32, "Q8_0": 34 / 32, "BF16": 2}
    expected = 0.0
    for name, shape in tensor_shapes(architecture):
        elements = 1
        for each in shape:
            elements *= each
        held = per_block[kind] if len(shape) > 1 and "embd" not in name and "_proj" not in name else 2
        expected += elements * (2 if "ffn_gate_inp" in name else held)
    assert weight_bytes(facts.architecture, tensor_parallel_size=1, weight_format=facts.format) == expected
    assert facts.weight_bytes == (tmp_path / "m.gguf").stat().st_size


def test_k_quants_are_int8_and_it_is_said(tmp_path: Path) -> None:
    architecture = architecture_of("31B")
    named = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, "Q4_K", **named))
    stored = read_weight_format(tmp_path)
    assert str(stored) == "int8_g32_f16"
    (said,) = read_unused_parts(tmp_path, stored)
    assert said.startswith("410 tensors, blk.0.attn_q.weight (Q4_K) the first, are held in INT8, rounded once more")
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, "Q4_0", token_embd="Q6_K"))
    assert read_unused_parts(tmp_path, read_weight_format(tmp_path)) == ()


def test_types_become_the_smallest_format_that_holds_them_all(tmp_path: Path) -> None:
    architecture, path = architecture_of("26B-A4B"), tmp_path / "m.gguf"
    write_sparse(path, architecture, types_of(architecture, "Q4_0", ffn_down="Q8_0", attn_v="Q5_0", attn_output="F16"))
    found = read_weight_format(tmp_path)
    assert str(found) == "int4_g32_f16 with int8_g32_f16 for qkv, down without o"
    assert {each.layout for each in found.formats()} == {Layout.GGUF}
    assert found.matrix(TextLinear.QKV).scale_type is ScaleType.FLOAT16
    assert found.of(None) is StoredType.BFLOAT16


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "two bits": ({"attn_v": "Q2_K"}, r"'blk.0.attn_v.weight' is Q2_K; F32, F16, .* use a Q4_0 or Q8_0 file"),
    "a codebook": ({"ffn_down": "IQ4_NL"}, r"'blk.0.ffn_down.weight' is IQ4_NL"),
    "some of a kind": ({"attn_k": "F16"}, r"'blk.0.attn_q.weight' is Q4_0 and 'blk.0.attn_k.weight' F16; qkv of all"),
    "a table": ({"token_embd": "IQ4_NL"}, "'token_embd.weight' is IQ4_NL"),
    "a norm": ({"attn_norm": "F64"}, "'blk.0.attn_norm.weight' is F64; F32, F16, BF16 are served"),
    "a router": ({"ffn_gate_inp": "Q8_0"}, "'blk.0.ffn_gate_inp.weight' is Q8_0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_types_that_are_not_served_are_refused_with_tensor_and_remedy(case: str, tmp_path: Path) -> None:
    named, message = REFUSED[case]
    architecture = architecture_of("26B-A4B")
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, "Q4_0", **named))
    with pytest.raises(UnsupportedModel, match=message):
        inspect_checkpoint(tmp_path)


STATED: dict[str, tuple[Any, str]] = {
    "general.architecture": ("gemma3", "architecture 'gemma3'; this release serves GGUF files of gemma4"),
    "gemma4.block_count": (None, "lacks gemma4.block_count"),
    "gemma4.attention.head_count": ([8] * 34 + [4], "head_count differs between layers"),
    "gemma4.attention.head_count_kv": ([1, 2] * 17 + [1], "head_count_kv of sliding layers differs"),
    "gemma4.attention.sliding_window_pattern": ([True] * 3, "is 3 elements; 35 whole numbers"),
    "gemma4.feed_forward_length": ([6144] * 34 + [100], "of layers that share a cache"),
    "gemma4.attention.value_length": (256, "attention.value_length is 256; 512 is served"),
    "gemma4.rope.dimension_count": (128, "rope.dimension_count is 128; 512 is served"),
    "gemma4.rope.scaling.type": ("yarn", "rope.scaling.type is yarn"),
    "gemma4.rope.freq_base_swa": (None, "lacks gemma4.rope.freq_base_swa"),
    "gemma4.embedding_length": (2048, "embedding_length is 2048; 1536 is served"),
    "gemma4.attention.layer_norm_rms_epsilon": ("tiny", "a number, 0 or more"),
    "tokenizer.ggml.eos_token_id": ("<eos>", "<eos> is no token id"),
}


@pytest.mark.parametrize("key", STATED)
def test_metadata_that_does_not_match_is_refused_by_its_key(key: str, tmp_path: Path) -> None:
    given, message = STATED[key]
    architecture = architecture_of("E2B")
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, "F16"), **{key: given})
    with pytest.raises(InvalidInput, match=message):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("token_embd.weight", "no tensor 'token_embd.weight'"),
        ("rope_freqs.weight", "no tensor 'rope_freqs.weight'"),
        ("per_layer_token_embd.weight", "no matrix 'per_layer_token_embd.weight'"),
        ("blk.4.attn_v.weight", "'blk.9.attn_v.weight' and no 'blk.4.attn_v.weight'"),
        ("blk.7.ffn_up.weight", "no tensor 'blk.7.ffn_up.weight'"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name: str, message: str, tmp_path: Path) -> None:
    architecture = architecture_of("E2B")
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, "F16"), left_out=name)
    with pytest.raises(InvalidInput, match=message):
        inspect_checkpoint(tmp_path)


def test_factors_of_a_scaled_rope_are_refused(tmp_path: Path) -> None:
    architecture = architecture_of("E2B")
    path = tmp_path / "m.gguf"
    write_sparse(path, architecture, types_of(architecture, "F16"))
    with path.open("r+b") as file:
        at = file.read(1 << 20).index(struct.pack("<64f", *[1.0] * 64))
        file.seek(at + 4 * 64)
        file.write(struct.pack("<f", 8.0))
    with pytest.raises(UnsupportedModel, match=r"'rope_freqs.weight' has 8\.0 at 64; .*RoPE is not scaled"):
        read_architecture(tmp_path)


def test_a_tower_alone_is_named(tmp_path: Path) -> None:
    architecture = architecture_of("E2B")
    write_sparse(tmp_path / "m.gguf", architecture, types_of(architecture, "F16"), **{"general.architecture": "clip"})
    with pytest.raises(UnsupportedModel, match="image or audio tower"):
        read_architecture(tmp_path)
