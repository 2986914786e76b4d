"""A drafter that is optional and would not start is left out before anything is loaded, with why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from assisted import ASSISTANT, TARGET

from modelserve.engine_args import EngineArgs
from modelserve.inspection import read_architecture
from modelserve.measured_drafts import MeasuredDrafts
from modelserve_worker.drafters.optional_drafter import without_missing_drafter
from modelserve_worker.engine.measured_drafts import measured_drafts
from modelserve_worker.scheduling.stats import EngineStats


def _args(drafter: Path, **settings: object) -> EngineArgs:
    return EngineArgs.model_validate({"model": str(TARGET), "drafter": str(drafter), **settings})


def _lost(copy: Path) -> None:
    shutil.rmtree(copy)


def _no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()


def _cut(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _half_downloaded(copy: Path) -> None:
    (copy / ".modelserve-fetch.lock").write_text("")


def _of_another_model(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "backbone_hidden_size": 64}))


@pytest.mark.parametrize("damage", [_lost, _no_weights, _cut, _half_downloaded, _of_another_model])
def test_a_broken_one_is_left_out(damage: Callable[[Path], None], tmp_path: Path) -> None:
    copy = tmp_path / "drafter"
    shutil.copytree(ASSISTANT, copy)
    architecture = read_architecture(TARGET)
    whole = _args(copy, drafter_optional=True)
    assert without_missing_drafter(whole, architecture) == (whole, None)
    damage(copy)
    left, why = without_missing_drafter(whole, architecture)
    assert left == whole.model_copy(update={"drafter": None})
    assert why
    needed = _args(copy)
    assert without_missing_drafter(needed, architecture) == (needed, None), "the start says what is wrong"


def test_ranks_that_cannot_share_it_go_without() -> None:
    args = _args(ASSISTANT, drafter_optional=True, tensor_parallel_size=16)
    left, why = without_missing_drafter(args, read_architecture(TARGET))
    assert left.drafter is None
    assert "8 query heads are not shared evenly by 16 GPUs" in str(why)


def test_of_two_the_one_that_would_start_is_kept(tmp_path: Path) -> None:
    block, architecture = tmp_path / "block", read_architecture(TARGET)
    shutil.copytree(TARGET.parent / "gemma4-tiny-keqv-dflash", block)
    both = EngineArgs(model=str(TARGET), drafter=[str(block), str(ASSISTANT)], drafter_optional=True)
    assert without_missing_drafter(both, architecture) == (both, None)
    _no_weights(block)
    left, why = without_missing_drafter(both, architecture)
    assert left == both.model_copy(update={"drafter": str(ASSISTANT)})
    assert str(why).startswith(f"{block}: ")
    shutil.copytree(ASSISTANT, again := tmp_path / "again")
    alike = EngineArgs(model=str(TARGET), drafter=[str(ASSISTANT), str(again)], drafter_optional=True)
    left, why = without_missing_drafter(alike, architecture)
    assert left.drafters == (str(ASSISTANT),)
    assert f"{ASSISTANT} and {again} are both MTP assistants" in str(why)


def test_acceptance_is_told_of_each_of_several() -> None:
    stats = EngineStats(
        accepted_per_position=(1,), proposals_judged_total=3000, draft_acceptance=0.7, judged_by_drafter=(2500, 500),
        acceptance_by_drafter=(0.816, 0.2),
    )  # fmt: skip
    told = measured_drafts(stats, problem=None)
    assert told is not None
    assert told.acceptances == (0.82, None)
    one = EngineStats(accepted_per_position=(1,), judged_by_drafter=(9,), acceptance_by_drafter=(0.5,))
    assert measured_drafts(one, problem=None) == MeasuredDrafts()


def test_what_is_told_of_drafts() -> None:
    assert measured_drafts(EngineStats(), problem=None) is None
    without = measured_drafts(EngineStats(), problem="x" * 9000)
    assert without is not None
    assert len(str(without.problem)) == 2048
    low = measured_drafts(EngineStats(accepted_per_position=(1, 0), low_acceptance=True), problem=None)
    assert low is not None
    assert low.to_json()["lowAcceptance"] is True
