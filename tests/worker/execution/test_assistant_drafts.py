"""With an assistant, a damaged one or a random one requests say what they say without, and all pages come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from assisted import ASSISTANT, TARGET, assistant_for, damage_checkpoint, engine_with, write_assistant
from model_checkpoints import load_checkpoint
from paged_logits import geometry_of
from step_times import PerRow
from test_drafts import Said, assert_same, run, specs
from trained_answers import MODEL, TrainedModel

from modelserve_worker.drafters.drafter import Drafter
from modelserve_worker.engine.engine import Engine
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.scheduling.costs.step_costs import StepCosts

SLOTS, LONGEST = 5, 300


class Sayings:
    """A trained target, and what it says without drafts."""

    def __init__(self, directory: Path) -> None:
        self.trained = TrainedModel(directory)
        self.model: Gemma4ForCausalLM = load_checkpoint(directory)
        self.alone = run(self.trained, self.engine(None, pool_of=SLOTS), specs(self.trained))

    def engine(self, drafter: Drafter | None, *, pool_of: int, costs: StepCosts | None = None) -> Engine:
        return engine_with(
            self.model, geometry_of(self.model), drafter, chunk=24, slots=SLOTS, longest=LONGEST, pool_of=pool_of,
            grammars=self.trained.engine._grammars, stamps=drafter is not None and drafter.num_tokens == 4,
            costs=costs,
        )  # fmt: skip


@pytest.fixture(scope="module")
def v_only() -> Sayings:
    return Sayings(TARGET)


@pytest.fixture(scope="module")
def shared() -> Sayings:
    return Sayings(MODEL)


def check(
    sayings: Sayings, assistant: Path, *, k: int, ahead: bool, costs: StepCosts | None = None
) -> tuple[list[int], list[int]]:
    """Requests of all kinds, an abort and preemptions among them; most tokens of each step's requests, and how many
    requests each draft was made of."""
    drafter = assistant_for(sayings.model, assistant, num_tokens=k, slots=SLOTS)
    engine, told, made = sayings.engine(drafter, pool_of=2, costs=costs), [], []
    drafter.assistant.register_forward_pre_hook(lambda _, inputs: made.append(len(inputs[0])))
    engine.runner.launches_ahead = ahead
    update = engine.scheduler.update
    engine.scheduler.update = lambda sampled: told.append(int(sampled.counts.max(initial=0))) or update(sampled)
    said: dict[str, Said] = run(sayings.trained, engine, specs(sayings.trained), aborted="r1", preempting=True, seed=k)
    assert engine.scheduler.stats().preemptions_total > 0
    for name, alone in sayings.alone.items():
        assert_same(said[name], alone, name)
    return told, made


@pytest.mark.drawn
@pytest.mark.parametrize(("k", "noise", "ahead"), [(4, 0.0, True), (3, 0.8, False)])
def test_a_trained_assistant_changes_no_token(
    v_only: Sayings, k: int, noise: float, ahead: bool, tmp_path: Path
) -> None:
    """Nor one that is damaged. `ahead`: steps are launched before it is known how many drafts are accepted."""
    assistant = damage_checkpoint(ASSISTANT, tmp_path / "assistant", noise=noise) if noise else ASSISTANT
    told, made = check(v_only, assistant, k=k, ahead=ahead)
    assert max(told) == k + 1 or noise
    assert len(made) > 0.6 * k * len(told)


def test_an_assistant_that_does_not_pay_is_not_run(v_only: Sayings) -> None:
    """But now and then, for one draft of each. What it says then is verified, as it is there."""
    told, made = check(v_only, ASSISTANT, k=4, ahead=True, costs=PerRow(0.01, draft=1.2))
    assert 0 < len(made) < 0.03 * len(told)
    assert max(told) <= 2


def test_a_random_assistant_of_a_model_that_shares_caches_changes_no_token(shared: Sayings, tmp_path: Path) -> None:
    """One with centroids."""
    write_assistant(tmp_path, MODEL, seed=3, centroids=64)
    check(shared, tmp_path, k=2, ahead=True)
