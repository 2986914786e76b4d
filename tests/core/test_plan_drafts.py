"""`modelserve plan --drafts`: tokens a second by concurrency, from the steps that plans and workers choose by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelserve.cli.__main__ import main

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
BOTH, ONE = EXAMPLES / "gemma4-31b-two-drafters.yaml", EXAMPLES / "gemma4-31b-drafts.yaml"
H200 = ("--accelerator", "NVIDIA-H200", "--drafts")


def _out(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(["plan", "-f", str(file), *arguments]) == code
    said = capsys.readouterr()
    return said.out, said.err


def _tables(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> list[dict[str, Any]]:
    (entry,) = json.loads(_out(capsys, file, *arguments, "-o", "json")[0])
    found: list[dict[str, Any]] = entry["drafts"]
    return found


def _edited(directory: Path, file: Path, **spec: Any) -> Path:
    body = yaml.safe_load(file.read_text())
    body["spec"] |= spec
    edited = directory / "serve.yaml"
    edited.write_text(yaml.safe_dump(body))
    return edited


def test_each_row_has_none_each_drafter_and_the_fastest_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = _tables(capsys, BOTH, *H200)
    assert [each["kind"] for each in table["drafters"]] == ["MTP", "DFlash"]
    assert {(each["acceptance"], each["source"]) for each in table["drafters"]} == {("0.75", "Assumed")}
    assert [row["requests"] for row in table["rows"]] == [1, 4, 16, 64, 128]
    for row in table["rows"]:
        rates = [row["none"], *row["drafters"]]
        assert row["none"]["drafts"] == 0
        assert [each["kind"] for each in row["drafters"]] == ["MTP", "DFlash"]
        assert all(each["drafts"] >= 1 for each in row["drafters"])
        assert row["choice"] == max(rates, key=lambda each: each["tokensPerSecond"])
    asked = [row["choice"]["kind"] for row in table["rows"]]
    assert (asked[0], asked[-1]) == ("DFlash", "MTP"), "one pass for a few; few drafts of many, one after the other"
    held = {tuple(each["drafters"]): each["requests"] for each in table["held"]}
    assert held[()] > held["MTP",] > held["DFlash",] > held["MTP", "DFlash"]


def test_a_row_is_what_the_plan_expects_of_that_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    single = _edited(tmp_path, BOTH, workload={"inputTokens": 2048, "outputTokens": 512, "concurrency": 1})
    (entry,) = json.loads(_out(capsys, single, *H200, "-o", "json")[0])
    row = entry["drafts"][0]["rows"][0]
    (chosen,) = (each for each in entry["plan"]["candidates"] if each["verdict"] == "Chosen")
    assert chosen["speed"]["drafts"]["drafter"].endswith("DFlash")
    rates = [1e3 / float(each["timePerOutputTokenMs"]) for each in (chosen["speed"]["drafts"], chosen["speed"])]
    assert rates == pytest.approx([row["none"]["tokensPerSecond"], row["choice"]["tokensPerSecond"]], rel=0.01)


def test_given_and_assumed_chances_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = _edited(tmp_path, BOTH, workload={"draftAcceptance": "0.05"})
    (table,) = _tables(capsys, given, *H200)
    assert {each["source"] for each in table["drafters"]} == {"Given"}
    many = table["rows"][-1]
    assert many["choice"] == many["none"], "wrong drafts are made for nobody"
    text, _ = _out(capsys, given, *H200)
    lines = text.partition("Drafts on NVIDIA-H200")[2].splitlines()
    assert "right with a chance of 0.05 (as workload.draftAcceptance says)" in lines[1]
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0].isdigit()] == [
        "1", "4", "16", "64", "128",
    ]  # fmt: skip
    assert "none" in next(line for line in lines if line.split()[:1] == ["128"])
    assert "assumed" in _out(capsys, BOTH, *H200)[0].partition("Drafts on")[2]


def test_one_drafter_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = _tables(capsys, ONE, *H200)
    assert [len(row["drafters"]) for row in table["rows"]] == [1] * 5
    assert [each["drafters"] for each in table["held"]] == [[], ["MTP"]]


def test_what_has_no_drafter_or_no_gpu_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, error = _out(capsys, EXAMPLES / "gemma4-31b.yaml", *H200, code=2)
    assert "spec.drafter names no drafter" in error
    tiny = {"model": {"uri": "hf://google/gemma-4-E2B-it"}, "drafter": {"uri": "hf://google/gemma-4-E2B-it-assistant"}}
    on_cpu = _edited(tmp_path, ONE, **tiny, accelerators={"products": ["CPU"]},
                     pod={"resources": {"limits": {"memory": "64Gi"}}})  # fmt: skip
    text, _ = _out(capsys, on_cpu, "--drafts")
    assert "what drafts bring on a CPU is not known" in text


def test_without_room_for_both_each_is_as_it_is_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = {"context": {"maxModelLen": 32768}, "workload": {"inputTokens": 512}}
    tight = _edited(tmp_path, BOTH, **spec, kvCache={"gpuMemoryUtilization": "0.47"})
    (table,) = _tables(capsys, tight, *H200)
    held = {tuple(each["drafters"]) for each in table["held"]}
    assert ("MTP", "DFlash") not in held
    assert ("MTP",) in held
    assert table["rows"][0]["drafters"][0] is not None
