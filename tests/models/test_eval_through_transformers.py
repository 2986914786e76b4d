"""The in-process evaluation writes a report that modelserve-eval pairs with its own, exercise by exercise."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rendering import Rendered
from torch import Tensor
from torch.nn import functional
from untrained import write_untrained

from modelserve_tools.evaluation.cells import fingerprint
from modelserve_tools.evaluation.comparison import compare
from modelserve_tools.evaluation.report import read_report
from modelserve_tools.evaluation.skills import exercise

SCRIPT = Path(__file__).parents[1] / "bench/engine/eval_through_transformers.py"
FLAGS = ["--skills", "arithmetic,recall", "--distances", "60,90000", "--n", "3", "--n-at", "60=5", "--seed", "4"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("ple")
    write_untrained(directory, "gemma4-tiny-ple")
    return directory


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("eval_through_transformers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_both_ways_mark_the_exercises_of_modelserve_eval(program: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    """Groups of two, so that cells end in part of one."""
    reports = []
    for way in ("transformers", "engine"):
        path = tmp_path / f"{way}.json"
        flags = ["--checkpoint", str(checkpoint), "--logits-of", way, "--dtype", "float32", "--json", str(path)]
        assert program.main([*flags, *FLAGS, "--group", "2"]) == 0
        reports.append(read_report(path))
    arithmetic, recall, too_far = reports[0].cells
    assert (len(arithmetic.outcomes), len(recall.outcomes), too_far.outcomes) == (3, 5, "")
    assert too_far.skipped is not None
    assert recall.fingerprint == fingerprint(exercise("recall", seed=4, index=0, distance=60))
    comparison = compare(reports[0], reports[1], names=("transformers", "engine"))
    assert [(cell.pairs, cell.gained, cell.lost) for cell in comparison.cells] == [(3, 0, 0), (5, 0, 0)]


def test_outcomes_stand_in_the_order_of_the_exercises(program: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    """A model that knows every answer, and in place of each third one says another last token."""
    asked = 0

    def logits(rendered: Sequence[Rendered]) -> list[Tensor]:
        nonlocal asked
        rows = []
        for each in rendered:
            said = torch.tensor(each.token_ids[each.prompt_tokens :])
            said[-1] += asked % 3 == 2
            asked += 1
            rows.append(functional.one_hot(said, 2048).float())
        return rows

    source = lambda directory, options: (logits, "a test")  # noqa: E731
    path = tmp_path / "report.json"
    flags = ["--checkpoint", str(checkpoint), "--json", str(path), "--skills", "arithmetic", "--n", "5", "--group", "2"]
    assert program.main([*flags, "--at-least", "80"], source) == 0
    assert read_report(path).cells[0].outcomes == "11011"
    assert program.main([*flags, "--at-least", "81"], source) == 1


def test_several_checkpoints_write_several_files(program: ModuleType) -> None:
    assert program.report_path(Path("out/a.json"), Path("models/tiny"), alone=True) == Path("out/a.json")
    assert program.report_path(Path("out/a.json"), Path("models/tiny"), alone=False) == Path("out/a-tiny.json")
