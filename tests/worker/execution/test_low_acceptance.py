"""A drafter that is not of this model is told after minutes of real steps; the model's own is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from assisted import ASSISTANT, TARGET, assistant_for, engine_with, write_assistant
from model_checkpoints import load_checkpoint
from paged_logits import geometry_of
from teacher_forcing import checkpoint_renderer, render_cell

from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams

SLOTS, LONGEST, STEP_S = 6, 400, 5.0
FEW = 60  # proposals; fewer than minutes of a worker have


@pytest.fixture(scope="module")
def model() -> Gemma4ForCausalLM:
    return load_checkpoint(TARGET)


def answered(model: Gemma4ForCausalLM, assistant: Path) -> tuple[list[list[int]], float, bool]:
    """Of exercises that the pair was trained for: answers, the share of first drafts that were right, and the alarm."""
    engine = engine_with(
        model, geometry_of(model), assistant_for(model, assistant, num_tokens=2, slots=SLOTS), chunk=256, slots=SLOTS,
        longest=LONGEST, pool_of=SLOTS,
    )  # fmt: skip
    drafting = engine.scheduler.drafting
    drafting.least_proposals = FEW
    drafting._now, drafting._judged_since = (lambda: engine.steps_done * STEP_S), 0.0
    rendered = render_cell(checkpoint_renderer(TARGET), Cell("tool_call", None, 16), seed=5)
    requests = []
    for number, each in enumerate(rendered):
        sampling = SamplingParams(seed=number, max_tokens=40, temperature=0.0)
        requests.append(Request(str(number), each.token_ids[: each.prompt_tokens], sampling))
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    assert drafting.proposals_judged_total >= FEW
    metrics = WorkerMetrics("tiny")
    metrics.observe_engine(engine.scheduler.stats, cache_config={})
    alarm = metrics.registry.get_sample_value("modelserve_low_draft_acceptance", {"model_name": "tiny"})
    first = drafting.accepted_per_position[0] / drafting.drafts_total
    return [request.output_token_ids for request in requests], float(first), bool(alarm)


def test_a_wrong_pair_raises_the_alarm_and_changes_no_answer(
    model: Gemma4ForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    own, right, alarm = answered(model, ASSISTANT)
    assert right > 0.9
    assert (alarm, caplog.records) == (False, [])
    write_assistant(tmp_path / "other", TARGET, seed=4)
    answers, right, alarm = answered(model, tmp_path / "other")
    assert answers == own
    assert right < 0.05
    assert alarm
    assert "is not one of this model" in caplog.text
