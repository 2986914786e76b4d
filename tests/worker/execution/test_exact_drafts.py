"""Profile `exact` with drafts and grammars, stop strings, penalties, aborts and preemptions: bytes, not only tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from assisted import ASSISTANT, TARGET, assistant_for
from block_drafts import TurnByTurn, block_drafter, geometry_beside
from model_checkpoints import load_checkpoint
from test_drafts import LONGEST, SEQUENCES, Said, assert_same, engine_of, run, specs
from trained_answers import MODEL, TrainedModel
from true_drafter import TrueDrafter

from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.drafters.drafter import Drafter, LongestProposal
from modelserve_worker.drafters.prompt_lookup import PromptLookup
from modelserve_worker.kernels.operations import PLAIN_EXACT
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.server.answers.preparation import SequenceSpec

SIZES = {"max_num_seqs": SEQUENCES, "max_model_len": LONGEST, "device": torch.device("cpu")}


@dataclass
class Exact:
    """A trained model, and what some requests say without drafts, in chunks of another size."""

    trained: TrainedModel
    model: Gemma4ForCausalLM
    names: tuple[str, ...]
    alone: dict[str, Said] = field(default_factory=dict)

    def wanted(self) -> list[SequenceSpec]:
        return [spec for spec in specs(self.trained) if spec.request.request_id in self.names]

    def check(
        self, drafter: Drafter, *, ahead: bool, aborted: str, block: BlockDrafter | None = None,
        costs: TurnByTurn | None = None,
    ) -> int:  # fmt: skip
        """Drafts that were accepted. `block`: the one of them that keeps rows of its own."""
        geometry = geometry_beside(self.model, block.network) if block is not None else None
        engine = engine_of(self.trained, self.model, drafter, pool_of=2, caching=True, geometry=geometry, costs=costs)
        engine.runner.launches_ahead = ahead
        said = run(self.trained, engine, self.wanted(), aborted=aborted, preempting=True, seed=3)
        assert engine.scheduler.stats().preemptions_total > 0
        for name, alone in self.alone.items():
            assert_same(said[name], alone, name, apart=0.0)
        return sum(engine.scheduler.stats().accepted_per_position)


def exact(directory, *names: str) -> Exact:
    made = Exact(TrainedModel(directory), load_checkpoint(directory, operations=PLAIN_EXACT), names)
    engine = engine_of(made.trained, made.model, None, pool_of=SEQUENCES, chunk=64)
    made.alone = run(made.trained, engine, made.wanted())
    return made


@pytest.mark.drawn
@pytest.mark.parametrize("looked_up", [False, True])
def test_drafts_change_no_byte(looked_up: bool) -> None:
    """Answers to one body, penalties, a stop string, min_tokens, prompt log probabilities and a grammar."""
    made = exact(MODEL, "r1", "r5", "r10", "r11", "r13", "r14")
    answers = {name: said.tokens for name, said in made.alone.items()}
    drafter: Drafter = TrueDrafter(
        answers, num_tokens=3, right=0.5, slots=SEQUENCES, longest=LONGEST,
        vocab_size=made.model.architecture.vocab_size,
    )  # fmt: skip
    if looked_up:
        drafter = LongestProposal([drafter, PromptLookup(num_tokens=6, **SIZES)])
    assert made.check(drafter, ahead=not looked_up, aborted="r1") > 0


def test_a_trained_assistant_changes_no_byte() -> None:
    made = exact(TARGET, "r0", "r4", "r10")
    drafter = assistant_for(made.model, ASSISTANT, num_tokens=4, slots=SEQUENCES)
    assert made.check(drafter, ahead=True, aborted="r10") > 0


def test_another_drafter_every_few_steps_changes_no_byte() -> None:
    """The trained DFlash, the trained assistant, lookup and none by turns; what DFlash keeps is kept up meanwhile."""
    made = exact(TARGET, "r0", "r4", "r10", "r11")
    directory = TARGET.parent / "gemma4-tiny-keqv-dflash"
    block = block_drafter(made.model, directory, num_tokens=15, slots=SEQUENCES, step_rows=24 + 16 * SEQUENCES)
    assistant = assistant_for(made.model, ASSISTANT, num_tokens=4, slots=SEQUENCES)
    drafter = LongestProposal([PromptLookup(num_tokens=6, **SIZES), assistant, block])
    costs = TurnByTurn(2)
    assert made.check(drafter, ahead=True, aborted="r10", block=block, costs=costs) > 0
    assert min(costs.asked) > 3
