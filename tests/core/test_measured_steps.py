"""Times of single steps that an H200 took beside what the formulas say: docs/expected-speed.md has the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architecture_of import architecture_of

from modelserve.hardware import CATALOGUE
from modelserve.planning.speed.step_time import NO_ROWS, PromptRows, RankSpeed
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "expected-speed.md").read_text()
WITHIN = 0.1
# model | rows that decode | behind tokens | rows of a prompt | measured, ms | expected, ms | error
ROW = re.compile(
    r"^\| ([\w-]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([-+][\d.]+) % \|$", re.MULTILINE
)
ROWS = [[each.replace(",", "") for each in row] for row in ROW.findall(DOCUMENT)]


def _rank(variant: str) -> RankSpeed:
    architecture = architecture_of(variant)
    layout = KVCacheLayout.least(architecture)
    geometry = cache_geometry(architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    return RankSpeed(architecture, CATALOGUE["NVIDIA-H200"], geometry, tensor_parallel=1, weight_format=None)


def expected_ms(variant: str, decodes: int, context: int, rows: int) -> float:
    rank = _rank(variant)
    prompts = PromptRows.chunk(0, rows, window=rank.window, ends=True) if rows else NO_ROWS
    return 1e3 * rank.step(decodes=decodes, context=context, prompts=prompts).seconds


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:4]) for row in ROWS])
def test_a_step_is_expected_to_take_what_it_took(row: list[str]) -> None:
    variant, decodes, context, rows, measured, written, error = row
    found = expected_ms(variant, int(decodes), int(context), int(rows))
    assert found == pytest.approx(float(written), rel=0.005), "docs/expected-speed.md"
    assert float(error) == pytest.approx(100 * (float(written) / float(measured) - 1), abs=0.1)
    assert found == pytest.approx(float(measured), rel=WITHIN)


def test_each_model_has_steps_of_one_of_many_and_of_a_prompt() -> None:
    for variant in ("31B", "E4B", "26B-A4B"):
        of_model = [row for row in ROWS if row[0] == variant]
        assert {"0", "1"} <= {row[1] for row in of_model}, variant
        assert max(int(row[1]) for row in of_model) >= 32, variant
