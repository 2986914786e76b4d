"""A worker that is started with an assistant: loaded beside its model, counted, heard; and one that does not fit."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from assisted import ASSISTANT, TARGET, write_assistant
from model_checkpoints import make_checkpoint, random_tokens

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.inspection import read_assistant, read_drafter
from modelserve.sizing.weights.assistant import assistant_weight_bytes
from modelserve.sizing.weights.drafter import drafter_weight_bytes
from modelserve_worker.batch import AskedDrafter
from modelserve_worker.drafters.assistant_drafter import AssistantDrafter
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.drafters.drafter import LongestProposal
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine.plan_report import plan_report
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.step_costs import MeasuredCosts, Seconds
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.startup.replica import LaunchedReplica, launch

DFLASH = TARGET.parent / "gemma4-tiny-keqv-dflash"


def args(target: Path, **settings: object) -> EngineArgs:
    known = {
        "model": str(target), "device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 2,
        "max_num_batched_tokens": 64, "cpu_memory_bytes": 1 << 30,
    }  # fmt: skip
    return EngineArgs.model_validate(known | settings)


class _OneAsked(MeasuredCosts):
    """By which one drafter costs nothing and the others are never worth it."""

    def __init__(self, drafters: Sequence[AskedDrafter], only: int) -> None:
        super().__init__(drafters)
        self._only = only

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> Seconds:
        return np.where(np.arange(most + 1) > 0, 0.0 if drafter == self._only else 1e9, 0.0)


def told(replica: LaunchedReplica, *, only: int | None = None) -> tuple[list[int], int]:
    """Tokens of a request, and the steps that they took; of several drafters by one."""
    scheduler = Scheduler(
        SchedulerLimits(64, 2, 128, ()),
        replica.geometry,
        replica.pool_bytes,
        draft_tokens=replica.runner.draft_tokens,
        asked_drafts=replica.runner.asked_drafts,
        step_costs=None if only is None else _OneAsked(replica.runner.asked_drafts, only),
    )
    engine = Engine(scheduler, replica.runner)
    request = Request("r", tuple(random_tokens(20, seed=1)), SamplingParams(seed=1, max_tokens=24, temperature=0.0))
    engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
    return request.output_token_ids, engine.steps_done


def test_the_assistant_is_loaded_counted_and_changes_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """Alone, and beside prompt lookup; its bytes are those that the plan names."""
    without = launch(args(TARGET))
    tokens, steps = told(without)
    for lookup in (False, True):
        settings = args(TARGET, drafter=str(ASSISTANT), num_speculative_tokens=3, prompt_lookup=lookup)
        with caplog.at_level(logging.INFO):
            replica = launch(settings)
        assert f"drafts of up to 3 tokens by the drafter in {ASSISTANT}" in caplog.text
        assert isinstance(replica.runner, GPUModelRunner)
        assert isinstance(replica.runner._drafter, LongestProposal if lookup else AssistantDrafter)
        said, taken = told(replica)
        assert said == tokens
        assert taken < steps
        held = replica.memory.weights_bytes - without.memory.weights_bytes
        report = plan_report(settings, replica.architecture, replica.memory, replica.table)
        terms = {term["name"]: term for term in report["terms"]}
        assert terms["weights"]["predictedBytes"] == terms["weights"]["measuredBytes"]
        assistant = read_assistant(ASSISTANT).model_copy(update={"dtype": "float32"})
        assert held == assistant_weight_bytes(assistant, tensor_parallel_size=1) > 0


def test_a_drafter_of_blocks_is_loaded_counted_and_changes_no_token() -> None:
    """Weights, buffers and what it keeps in the cache are those that the plan names; of 7 drafts most are right."""
    without = launch(args(TARGET))
    tokens, steps = told(without)
    settings = args(TARGET, drafter=str(DFLASH))
    replica = launch(settings)
    assert isinstance(replica.runner, GPUModelRunner)
    assert isinstance(replica.runner._drafter, BlockDrafter)
    assert replica.runner.draft_tokens == 7
    said, taken = told(replica)
    assert said == tokens
    assert taken < 0.7 * steps
    report = plan_report(settings, replica.architecture, replica.memory, replica.table)
    terms = {term["name"]: term for term in report["terms"]}
    assert terms["weights"]["predictedBytes"] == terms["weights"]["measuredBytes"]
    drafter = read_drafter(DFLASH).model_copy(update={"dtype": "float32"})
    held = replica.memory.weights_bytes - without.memory.weights_bytes
    assert held == drafter_weight_bytes(drafter, tensor_parallel_size=1) > 0
    more = replica.geometry.held_bytes(128) - without.geometry.held_bytes(128)
    row = 2 * 2 * 64 * 4  # K and V, 2 heads of 64 in float32
    pages = without.geometry.global_pages(128)
    assert more == pages * 64 * row + replica.geometry.draft_ring_pages(128) * replica.geometry.global_page.page_bytes


def test_both_kinds_are_loaded_counted_and_change_no_token() -> None:
    """Whichever is asked; in whatever order they are named, the assistant is the worker's first."""
    without = launch(args(TARGET))
    tokens, steps = told(without)
    settings = args(TARGET, drafter=[str(DFLASH), str(ASSISTANT)])
    replica = launch(settings)
    assert isinstance(replica.runner, GPUModelRunner)
    assert isinstance(replica.runner._drafter, LongestProposal)
    assert replica.runner.asked_drafts == (AskedDrafter(8), AskedDrafter(7, at_once=True))
    for asked in (0, 1):
        said, taken = told(replica, only=asked)
        assert said == tokens
        assert taken < steps
    report = plan_report(settings, replica.architecture, replica.memory, replica.table)
    terms = {term["name"]: term for term in report["terms"]}
    assert terms["weights"]["predictedBytes"] == terms["weights"]["measuredBytes"]
    both = [read_drafter(each).model_copy(update={"dtype": "float32"}) for each in (ASSISTANT, DFLASH)]
    held = replica.memory.weights_bytes - without.memory.weights_bytes
    assert held == sum(drafter_weight_bytes(each, tensor_parallel_size=1) for each in both)


def test_two_of_a_kind_are_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DFLASH, other)
    with pytest.raises(InvalidInput, match=f"{DFLASH} and {other} are both drafters of blocks"):
        launch(args(TARGET, drafter=[str(DFLASH), str(other)]))


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"drafter": ["a", "b"], "num_speculative_tokens": 4}, "a number is of one drafter"),
        ({"drafter": ["a", "a"]}, "the same twice"),
        ({"drafter": ["a", ""]}, "empty"),
        ({"drafter": []}, "missing"),
        ({"drafter": ["a", "b", "c"]}, "3 drafters; 2 are served"),
    ],
)
def test_lists_of_drafters_that_say_nothing_or_two_things_are_refused(settings: dict[str, object], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        args(TARGET, **settings)


def test_a_list_of_one_is_written_as_one() -> None:
    one = args(TARGET, drafter=["a"], num_speculative_tokens=4)
    assert (one.drafter, one.drafters) == ("a", ("a",))


def test_a_quantised_lineage_beside_another_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint("31B", tmp_path / "target", seed=1)
    write_assistant(tmp_path / "small-qat-assistant", tmp_path / "target", seed=1)
    launch(args(tmp_path / "target", drafter=str(tmp_path / "small-qat-assistant"), num_speculative_tokens=2))
    assert "few of its drafts may be right" in caplog.text


def test_a_drafter_that_is_none_ends_the_start(tmp_path: Path) -> None:
    make_checkpoint("31B", tmp_path, seed=1)
    with pytest.raises(InvalidInput, match="backbone_hidden_size 128 is not the model's hidden_size 64"):
        launch(args(tmp_path, drafter=str(ASSISTANT)))
    with pytest.raises(UnsupportedModel, match=r"drafter: model_type 'gemma4_text' .* is not served"):
        launch(args(TARGET, drafter=str(tmp_path)))
    with pytest.raises(InvalidInput, match=r"nowhere.config\.json"):
        launch(args(TARGET, drafter=str(tmp_path / "nowhere")))
