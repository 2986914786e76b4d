"""`modelserve plan --compare-formats`: a row a format, each as a plan of such a checkpoint has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from published_configs import PUBLISHED

from modelserve.cli.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "gemma4-31b.yaml"
H200 = ("--accelerator", "NVIDIA-H200")
FORMATS = ["bfloat16", "fp8_channel", "int8_channel", "int4_g32", "nvfp4 without qkv, o", "nvfp4"]
GB = {
    "bfloat16": 61.4, "fp8_channel": 32.1, "int8_channel": 32.1, "nvfp4 without qkv, o": 31.5, "nvfp4": 19.3,
    "int4_g32": 19.3,
}  # fmt: skip


def _out(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str, code: int = 0) -> str:
    assert main(["plan", "-f", str(file), *arguments]) == code
    return capsys.readouterr().out


def _entry(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    (entry,) = json.loads(_out(capsys, file, *arguments, "-o", "json", code=code))
    found: dict[str, Any] = entry
    return found


def _checkpoint(directory: Path, stated: dict[str, Any]) -> Path:
    """A ModelServe of a directory with the config of 31B, and no tensors: its format is as the config states it."""
    text = json.loads((ROOT / "operator/modelserve/data/gemma4.json").read_text())["variants"]["31B"]["text_config"]
    full = set(text.pop("full_attention_layers"))
    kinds = ["full_attention" if i in full else "sliding_attention" for i in range(text["num_hidden_layers"])]
    config = {"model_type": "gemma4", "dtype": "bfloat16", "text_config": text | {"layer_types": kinds}, **stated}
    (directory / "config.json").write_text(json.dumps(config))
    return _served(directory, f"file://{directory}")


def _served(directory: Path, uri: str, **spec: Any) -> Path:
    body = yaml.safe_load(EXAMPLE.read_text())
    body["spec"] = {"model": {"uri": uri}, **spec}
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(body))
    return file


def test_bytes_fall_with_the_format_and_what_they_free_holds_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _entry(capsys, EXAMPLE, *H200, "--compare-formats")["formats"]
    assert [row["format"] for row in rows] == FORMATS
    assert {row["format"]: round(row["weightBytes"] / 1e9, 1) for row in rows} == GB
    at = {row["format"]: row for row in rows}
    falling = [at[name]["weightBytes"] for name in GB]
    assert falling == sorted(falling, reverse=True)
    least = [at[name]["candidate"]["perGpu"]["weightsBytes"] for name in GB]
    assert all(0 <= planned - bytes_ < 0.02 * bytes_ for planned, bytes_ in zip(least, falling, strict=True))
    assert at["bfloat16"]["kvTokens"] < at["fp8_channel"]["kvTokens"] < at["int4_g32"]["kvTokens"]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("fp8_channel", "RedHatAI/gemma-4-31B-it-FP8-dynamic"),
        ("nvfp4 without qkv, o", "nvidia/Gemma-4-31B-IT-NVFP4"),
        ("nvfp4", "RedHatAI/gemma-4-31B-it-NVFP4"),
    ],
)
def test_a_row_is_the_plan_of_a_published_checkpoint_in_its_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, row: str, name: str
) -> None:
    variant, stated, _ = PUBLISHED[name]
    assert variant == "31B"
    own = _entry(capsys, _checkpoint(tmp_path, stated), *H200, "--compare-formats")
    (planned,) = own["plan"]["candidates"]
    compared = _entry(capsys, EXAMPLE, *H200, "--compare-formats")["formats"]
    for rows in (compared, own["formats"]):
        assert [each["candidate"] for each in rows if each["format"] == row] == [planned]
    assert [each["format"] for each in own["formats"]] == FORMATS


def test_int4_is_the_plan_of_the_checkpoint_that_google_publishes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    published = _served(tmp_path, "hf://google/gemma-4-31B-it-qat-w4a16-ct")
    (planned,) = _entry(capsys, published, *H200)["plan"]["candidates"]
    as_bfloat16 = _served(tmp_path, "hf://google/gemma-4-31B-it")
    rows = _entry(capsys, as_bfloat16, *H200, "--compare-formats")["formats"]
    assert [row["candidate"] for row in rows if row["format"] == "int4_g32"] == [planned]
    assert [row["candidate"] == planned for row in rows].count(True) == 1


def test_a_format_of_its_own_comes_first_and_its_quality_was_not_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = _checkpoint(tmp_path, PUBLISHED["modelopt MIXED_PRECISION"][1])
    first, *others = _entry(capsys, file, *H200, "--compare-formats")["formats"]
    assert first["format"] == "nvfp4 with fp8_tensor for qkv, o"
    assert first["qualityOfTinyModels"] is None
    assert [each["format"] for each in others] == FORMATS
    assert all(each["qualityOfTinyModels"] for each in others)
    (line,) = (line for line in _out(capsys, file, *H200, "--compare-formats").splitlines() if "fp8_tensor" in line)
    assert line.endswith("not measured")


def test_what_does_not_fit_says_so_and_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--accelerator", "NVIDIA-L40S", "--compare-formats")
    text = _out(capsys, EXAMPLE, *flags, code=3).partition("Formats of the weights")[2]
    rows = {line.split()[0]: line.split()[1:] for line in text.partition("NVIDIA-L40S")[2].splitlines()[1:6]}
    assert [name for name, cells in rows.items() if cells[0] == "-"] == ["bfloat16"]
    assert "  bfloat16 does not fit: needs" in text
    assert "GiB missing" in text
    assert max(map(len, text.splitlines())) <= 100
    found = _entry(capsys, EXAMPLE, *flags, code=3)["formats"]
    assert [row["kvTokens"] is None for row in found] == [True, *[False] * 5]
    assert found[0]["candidate"]["verdict"] == "Refused"


def test_a_model_that_a_format_cannot_hold_has_no_bytes_in_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = ROOT / "tests/models/gemma4-tiny-ple"  # 112 inputs are no whole groups of 32
    rows = _entry(capsys, _served(tmp_path, f"file://{model}"), *H200, "--compare-formats")["formats"]
    at = {row["format"].partition(" ")[0]: row for row in rows}
    assert at["int4_g32"]["weightBytes"] is None
    assert "multiple of 32" in at["int4_g32"]["candidate"]["message"]
    assert at["fp8_channel"]["weightBytes"]


def test_each_named_product_has_its_rows_and_the_plan_s_alone_where_none_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    two = ("--accelerator", "NVIDIA-L40S", "--accelerator", "NVIDIA-H200", "--compare-formats")
    rows = _entry(capsys, EXAMPLE, *two)["formats"]
    assert [row["candidate"]["accelerator"] for row in rows] == ["NVIDIA-H200"] * 6 + ["NVIDIA-L40S"] * 6
    wished = {"accelerators": {"products": ["NVIDIA-L40S", "NVIDIA-H200"]}, "parallelism": {"tensor": 2}}
    entry = _entry(capsys, _served(tmp_path, "hf://google/gemma-4-31B-it", **wished), "--compare-formats")
    assert {each["accelerator"] for each in entry["plan"]["candidates"]} == {"NVIDIA-H200", "NVIDIA-L40S"}
    assert [row["candidate"]["accelerator"] for row in entry["formats"]] == [entry["plan"]["accelerator"]] * 6
    assert "formats" not in _entry(capsys, EXAMPLE, *H200)


def test_quality_is_of_tiny_models_and_the_table_shows_the_worse(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _entry(capsys, EXAMPLE, *H200, "--compare-formats")["formats"]
    for row in rows:
        assert {*row["qualityOfTinyModels"]} == {"gemma4-tiny-keqv", "gemma4-tiny-ple"}
    text = _out(capsys, EXAMPLE, *H200, "--compare-formats").partition("Formats of the weights")[2]
    assert "of tiny" in text
    assert "not of this model" in text
    (line,) = (line for line in text.splitlines() if line.startswith("  int4_g32"))
    both = [each["prompts"]["meanKlNats"] for each in rows[3]["qualityOfTinyModels"].values()]
    assert f" {max(both):.1e} " in line
    assert max(both) > min(both)
