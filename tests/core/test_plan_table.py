"""The table of `modelserve plan`: one line a product unless asked for more, and headings that say what figures mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from modelserve.api import ModelServe
from modelserve.cli import plot
from modelserve.cli.__main__ import main
from modelserve.cli.plan_command import PlannedServe, PlanOptions, plan_serves
from modelserve.cli.plan_sources import inventory
from modelserve.hardware import CATALOGUE

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gemma4-31b.yaml"
ROW = re.compile(r"^ +(\d+) +(Chosen|Fits|Refused) ", re.MULTILINE)


def _table(capsys: pytest.CaptureFixture[str], *arguments: str, file: Path = EXAMPLE) -> str:
    assert main(["plan", "-f", str(file), *arguments]) == 0
    return capsys.readouterr().out


def test_without_an_accelerator_each_product_has_its_best_and_all_shows_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    products = [record for record in CATALOGUE.values() if not record.is_cpu]
    best = _table(capsys)
    assert len(ROW.findall(best)) == len(products)
    (left_out,) = re.findall(r"--all shows (\d+) more", best)
    every = _table(capsys, "--all")
    assert len(ROW.findall(every)) == len(products) + int(left_out)
    assert "--all" not in every
    named = _table(capsys, "--accelerator", "NVIDIA-H200:4")
    assert len(ROW.findall(named)) == 3
    assert len(best.splitlines()) < len(every.splitlines()) / 2


def test_the_headings_say_for_which_prompt_and_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["workload"] = {"inputTokens": 8192, "outputTokens": 512, "concurrency": 8}
    document["spec"]["objective"] = "Cost"
    document["spec"]["accelerators"] = {"costPerHour": {"NVIDIA-H200": "4.10"}}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(document))
    table = " ".join(_table(capsys, "--accelerator", "NVIDIA-H200", file=file).split())
    assert "TTFT: milliseconds to the first token of one prompt of 8,192 tokens, alone." in table
    assert "while BATCH requests of 8,192 + 512 tokens are open at a time." in table
    assert "objective Cost: lowest price of a replica-hour ($/H" in table
    assert re.search(r"TPOT BATCH \$/H \$/1M", table)
    assert re.search(r" 8 4\.10 \d", table)


def _compared(*accelerators: str) -> PlannedServe:
    options = PlanOptions(str(EXAMPLE), accelerators, compare="vllm:0.33", plot="unused.png")
    where = inventory(accelerators, node_file=None, catalogue_file=None)
    (entry,) = plan_serves([ModelServe.parse(yaml.safe_load(EXAMPLE.read_text()))], where, options)
    return entry


def test_every_candidate_and_the_peer_are_drawn_with_plain_ticks(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib.figure")
    figure = _compared().figure()
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [str(line.get_label()) for line in axes.get_lines()]
    ticks = [tick.get_text() for tick in axes.get_yticklabels() if tick.get_text()]
    every = _table(capsys, "--all")
    assert len(labels) == len(re.findall(r" (?:Chosen|Fits) ", every)) + 1
    assert sum("vllm 0.33" in label for label in labels) == 1
    assert "100" in ticks
    assert not any("$" in tick or "^" in tick or "e" in tick for tick in ticks)


def test_curves_of_the_peer_fall_with_the_length() -> None:
    ((name, points),) = _compared("NVIDIA-H200").peers
    assert name.startswith("vllm 0.33")
    assert [length for length, _ in points][:2] == [plot.SHORTEST, 2 * plot.SHORTEST]
    assert [held for _, held in points] == sorted((held for _, held in points), reverse=True)
