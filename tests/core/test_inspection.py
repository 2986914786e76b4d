"""Checkpoint directories, whole and broken, and the messages an inspect Job leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve.cli.__main__ import main
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.inspection import inspect_checkpoint
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.model_facts import ModelFacts
from modelserve.model.weight_format import BFLOAT16, FLOAT32, int4
from modelserve.sizing.weights.text import weight_bytes
from modelserve.termination import (
    MESSAGE_LIMIT_BYTES,
    TERMINAL_EXIT_CODE,
    TerminationMessage,
    TerminationReason,
)

VOCAB, HIDDEN = 64, 16
CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "sliding_window": 8, "max_position_embeddings": 128, "vocab_size": VOCAB,
}  # fmt: skip
EMBEDDING = "model.language_model.embed_tokens.weight"


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4, "I32": 4}[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))


def checkpoint(
    directory: Path, *, dtype: str = "BF16", shape: tuple[int, int] = (VOCAB, HIDDEN), **config: Any
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    write_safetensors(directory / "model.safetensors", {EMBEDDING: (dtype, list(shape))})
    return directory


def test_one_file(tmp_path: Path) -> None:
    facts = inspect_checkpoint(checkpoint(tmp_path))
    assert (facts.architecture.hidden_size, facts.format) == (HIDDEN, BFLOAT16)
    assert facts.weight_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_files_that_are_exchanged_have_another_identity(tmp_path: Path) -> None:
    before = inspect_checkpoint(checkpoint(tmp_path)).identity
    assert inspect_checkpoint(checkpoint(tmp_path)).identity == before
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": "9"}))
    assert inspect_checkpoint(tmp_path).identity == before, "weights are what counts"
    write_safetensors(tmp_path / "model.safetensors", {EMBEDDING: ("F32", [VOCAB, HIDDEN])})
    grown = inspect_checkpoint(tmp_path).identity
    assert grown != before
    weight_map = {EMBEDDING: "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert inspect_checkpoint(tmp_path).identity != grown


def test_an_index_names_the_files_that_count(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    vision = "model.vision_tower.patch.weight"
    write_safetensors(
        tmp_path / "b.safetensors", {vision: ("F32", [512, 512]), "model.norm.weight": ("BF16", [HIDDEN])}
    )
    (tmp_path / "stale.safetensors").write_bytes(b"left over")
    weight_map = {EMBEDDING: "a.safetensors", vision: "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    facts = inspect_checkpoint(tmp_path)
    assert facts.weight_bytes == sum((tmp_path / name).stat().st_size for name in ("a.safetensors", "b.safetensors"))
    assert facts.format == BFLOAT16  # of the text weights; the vision tower is not served

    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"b\.safetensors, which is not in"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd"])
def test_an_index_may_not_leave_the_directory(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path / "inner")
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "inner" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: name}}))
    with pytest.raises(InvalidInput, match="beside the index"):
        inspect_checkpoint(tmp_path / "inner")


def test_float32(tmp_path: Path) -> None:
    assert inspect_checkpoint(checkpoint(tmp_path, dtype="F32")).format == FLOAT32


def test_other_formats_are_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="I32"):
        inspect_checkpoint(checkpoint(tmp_path, dtype="I32"))
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        inspect_checkpoint(checkpoint(tmp_path, quantization_config={"quant_method": "compressed-tensors"}))


def test_int4_weights_are_recognised(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
    stated = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    checkpoint(tmp_path, quantization_config=stated)
    with pytest.raises(InvalidInput, match="no I32 tensor"):
        inspect_checkpoint(tmp_path)
    packed = "model.language_model.layers.0.mlp.up_proj.weight_packed"
    write_safetensors(
        tmp_path / "model.safetensors", {EMBEDDING: ("BF16", [VOCAB, HIDDEN]), packed: ("I32", [HIDDEN, 4])}
    )
    facts = inspect_checkpoint(tmp_path)
    assert facts.format == int4(8)
    assert ModelFacts.model_validate_json(facts.model_dump_json(by_alias=True)) == facts


def test_a_config_of_another_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"\[64, 8\].*\[64, 16\]"):
        inspect_checkpoint(checkpoint(tmp_path, shape=(VOCAB, 8)))


def test_a_file_cut_short(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match="cut short"):
        inspect_checkpoint(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json"):
        inspect_checkpoint(tmp_path)
    (checkpoint(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"no \*\.safetensors file"):
        inspect_checkpoint(tmp_path)


@given(data=st.binary(max_size=64), header=st.none() | st.text(max_size=40) | st.just("[]") | st.just('{"a": {}}'))
def test_a_broken_file_is_refused_not_crashed_on(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, header: str | None
) -> None:
    directory = checkpoint(tmp_path_factory.mktemp("broken"))
    if header is not None:
        text = header.encode()
        data = len(text).to_bytes(8, "little") + text
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(InvalidInput):
        inspect_checkpoint(directory)


def test_the_command_writes_the_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert len(printed.encode()) <= MESSAGE_LIMIT_BYTES
    facts = ModelFacts.model_validate_json(printed)
    assert set(json.loads(printed)) == {"architecture", "weightBytes", "format"}, "as 0.1.0 reads it"
    output = tmp_path / "facts.json"
    assert main(["inspect", str(tmp_path), "--output", str(output)]) == 0
    assert ModelFacts.model_validate_json(output.read_text()) == facts


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, TerminationReason.UnsupportedModel),
        ({"attention_bias": True}, TerminationReason.UnsupportedModel),
        ({"hidden_size": None}, TerminationReason.InvalidCheckpoint),
    ],
)
def test_the_command_leaves_a_termination_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], reason: TerminationReason
) -> None:
    output = tmp_path / "termination-log"
    code = main(["inspect", str(checkpoint(tmp_path, **config)), "--output", str(output)])
    message = TerminationMessage.model_validate_json(output.read_text())
    assert (code, message.reason) == (TERMINAL_EXIT_CODE, reason)
    assert message.message in capsys.readouterr().err


@given(text=st.text(max_size=6000), repeat=st.integers(1, 3))
def test_a_termination_message_fits_and_stays_json(text: str, repeat: int) -> None:
    message = TerminationMessage(reason=TerminationReason.LoadStalled, message=text * repeat, shortfallBytes=1)
    encoded = message.encode()
    assert len(encoded.encode()) <= MESSAGE_LIMIT_BYTES
    decoded = TerminationMessage.model_validate_json(encoded)
    assert (decoded.reason, decoded.shortfallBytes) == (message.reason, 1)
    assert message.message.startswith(decoded.message.removesuffix("..."))


def test_a_quantised_directory_is_planned_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weight files, on the CPU: INT4 weights, of which the plan says the bytes."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    directory = checkpoint(tmp_path / "model", quantization_config=stated | {"ignore": ["lm_head"]})
    (directory / "model.safetensors").unlink()
    spec = {"model": {"uri": f"file://{directory}"}, "accelerators": {"products": ["CPU"]}}
    document = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "metadata": {"name": "x"}}
    (tmp_path / "x.yaml").write_text(json.dumps(document | {"spec": spec}))
    assert main(["plan", "-f", str(tmp_path / "x.yaml"), "-o", "json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    stored = int4(8, symmetric=False)
    counted = weight_bytes(ModelArchitecture.from_config(CONFIG), tensor_parallel_size=1, weight_format=stored)
    assert entry["plan"]["perGpu"]["weightsBytes"] == counted


def test_a_plan_says_what_a_checkpoint_states_and_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its facts carry it; those of checkpoints without have no such field, which earlier releases may not know."""
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": False}}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["lm_head"]}
    directory = checkpoint(tmp_path / "model", quantization_config=stated)
    (directory / "model.safetensors").unlink()
    spec = {"model": {"uri": f"file://{directory}"}, "accelerators": {"products": ["CPU"]}}
    document = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "metadata": {"name": "x"}}
    (tmp_path / "x.yaml").write_text(json.dumps(document | {"spec": spec}))
    assert main(["plan", "-f", str(tmp_path / "x.yaml")]) == 0
    assert "\n\nnote: static scales of inputs (input_scale) are not used" in capsys.readouterr().out
    plain = inspect_checkpoint(checkpoint(tmp_path / "plain", dtype="F32"))
    assert "unused" not in plain.model_dump(by_alias=True)
    noted = plain.model_copy(update={"unused": ("a note",)})
    assert ModelFacts.model_validate_json(noted.model_dump_json(by_alias=True)) == noted
