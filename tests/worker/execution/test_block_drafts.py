"""A drafter that proposes blocks: what it says over paged rows is what it would say over the whole text, whatever
chunks and preemptions there were; and requests say what they say without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from assisted import TARGET, engine_with
from block_drafts import DenseDrafts, block_drafter, geometry_beside, write_block_drafter
from model_checkpoints import load_checkpoint
from paged_logits import geometry_of
from test_drafts import Said, assert_same, run, specs
from trained_answers import TrainedModel

from modelserve_worker.batch import AdmittedRequest, Asked
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.drafters.drafter import Accepted, Drafter, Proposal, TargetCaches
from modelserve_worker.kernels.step import Step

SLOTS, LONGEST, CHUNK = 5, 300, 24


class Compared(Drafter):
    """Hands on what `inner` proposes, and compares it with what it says over the whole text."""

    speaks_unasked = True  # it hears of all tokens

    def __init__(self, inner: BlockDrafter, dense: DenseDrafts) -> None:
        self.inner, self.dense, self.num_tokens, self.asked = inner, dense, inner.num_tokens, inner.asked
        self.texts: dict[int, list[int]] = {}
        self.same = self.all = self.proposals = 0

    def attach(self, caches: TargetCaches) -> None:
        self.inner.attach(caches)

    def store(self, step: Step) -> None:
        self.inner.store(step)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        for request in admitted:
            self.texts[request.slot] = [*request.prompt_token_ids, *request.output_token_ids]

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        proposal = self.inner.propose(accepted, asked)
        for place, slot in enumerate(accepted.slots.tolist()):
            first, count = int(accepted.firsts[place]), int(accepted.counts[place])
            end = int(accepted.positions[place])
            text = self.texts[slot][: end + 1 - count] + accepted.sampled[first : first + count].tolist()
            self.texts[slot] = text
            assert len(text) == end + 1
            self.proposals += 1
            if not asked.drafts or self.proposals % 6:  # what is said over all of a text takes long
                continue
            said, told = self.dense.behind(text, self.num_tokens), proposal.tokens[place].tolist()
            self.same += sum(a == b for a, b in zip(said, told, strict=True))
            self.all += len(said)
        return proposal


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["zlab", "dspark"])
def test_what_is_paged_is_what_the_text_says(kind: str, tmp_path: Path) -> None:
    directory = write_block_drafter(tmp_path / kind, TARGET, kind=kind)
    trained, model = TrainedModel(TARGET), load_checkpoint(TARGET)
    drafter = block_drafter(model, directory, num_tokens=5, slots=SLOTS, step_rows=CHUNK + 64)
    compared = Compared(drafter, DenseDrafts(load_checkpoint(TARGET), directory, longest=LONGEST))
    geometry = geometry_beside(model, drafter.network)
    engine = engine_with(
        model, geometry, compared, chunk=CHUNK, slots=SLOTS, longest=LONGEST, pool_of=2,
        grammars=trained.engine._grammars,
    )  # fmt: skip
    said: dict[str, Said] = run(trained, engine, specs(trained)[:7], aborted="r1", preempting=True, seed=3)
    assert engine.scheduler.stats().preemptions_total > 0
    assert compared.all > 60
    assert compared.same >= 0.995 * compared.all, "but for tokens that are as likely"
    plain = engine_with(
        load_checkpoint(TARGET), geometry_of(model), None, chunk=CHUNK,
        slots=SLOTS, longest=LONGEST, pool_of=SLOTS, grammars=trained.engine._grammars,
    )  # fmt: skip
    alone = run(trained, plain, specs(trained)[:7])
    for name, each in alone.items():
        assert_same(said[name], each, name)
