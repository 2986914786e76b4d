"""A drafter that keeps rows in the target's pages is as often right behind a prefix that was found as behind one that
was computed; where the rows are lost, no answer and no hit tells, and drafts are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from assisted import TARGET, Around, engine_with
from block_drafts import block_drafter, geometry_beside
from model_checkpoints import load_checkpoint
from rendering import Rendered
from teacher_forcing import checkpoint_renderer, render_cell

from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.batch import Asked
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.drafters.drafter import Accepted, Proposal
from modelserve_worker.engine.engine import Engine
from modelserve_worker.kernels.step import Step
from modelserve_worker.request import Request, SamplingParams

DFLASH = TARGET.parent / "gemma4-tiny-keqv-dflash"
CELLS = (Cell("tool_call", None, 2), Cell("lookback", None, 1), Cell("recall", 400, 1))
SLOTS, LONGEST = 4, 704


class Heard(Around):
    """What `inner` proposes behind each token; the engine is handed other tokens, of which it accepts none, so that it
    comes to all of them. While it `forgets`, rows of steps are not stored."""

    def __init__(self, inner: BlockDrafter) -> None:
        super().__init__(inner)
        self.forgets = False
        self.said: dict[tuple[str, int], list[int]] = {}  # by request and position of the last token

    def store(self, step: Step) -> None:
        if not self.forgets:
            super().store(step)

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        tokens, counts = self.inner.propose(accepted, asked)
        if asked.drafts:
            places = zip(accepted.slots.tolist(), accepted.positions.tolist(), strict=True)
            keys = ((self.named[slot], position) for slot, position in places)
            self.said |= dict(zip(keys, tokens.tolist(), strict=True))
        return Proposal(torch.full_like(tokens, 4), counts)


@pytest.fixture(scope="module")
def conversations() -> list[Rendered]:
    renderer = checkpoint_renderer(TARGET)
    return [each for cell in CELLS for each in render_cell(renderer, cell, seed=11)]


def _engine() -> tuple[Engine, Heard]:
    model = load_checkpoint(TARGET)
    block = block_drafter(model, DFLASH, num_tokens=7, slots=SLOTS, step_rows=256 + SLOTS * 8)
    drafter, geometry = Heard(block), geometry_beside(model, block.network)
    return engine_with(
        model, geometry, drafter, chunk=256, slots=SLOTS, longest=LONGEST, pool_of=12, caching=True
    ), drafter


def _answered(
    engine: Engine, drafter: Heard, conversations: Sequence[Rendered], turn: str
) -> tuple[float, int, list[list[int]]]:
    """Share of drafts that are right of those behind right ones, tokens of prompts that were found, and answers."""
    before, requests = engine.scheduler.stats(), []
    for number, each in enumerate(conversations):
        sampling = SamplingParams(seed=0, max_tokens=len(each.token_ids) - each.prompt_tokens + 8, temperature=0.0)
        requests.append(Request(f"{turn}{number}", tuple(each.token_ids[: each.prompt_tokens]), sampling))
        engine.add(requests[-1])
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
    right = tried = 0
    for request in requests:
        text = [*request.prompt_token_ids, *request.output_token_ids]
        for position in range(len(request.prompt_token_ids), len(text) - 1):
            following = text[position + 1 :]
            said = drafter.said.get((request.request_id, position), [])
            lead = next((i for i, pair in enumerate(zip(said, following, strict=False)) if pair[0] != pair[1]), None)
            shared = min(len(said), len(following))
            right += shared if lead is None else lead
            tried += shared if lead is None else lead + 1
    found = engine.scheduler.stats().prefix_hits_total - before.prefix_hits_total
    return right / tried, found, [request.output_token_ids for request in requests]


def test_a_hit_changes_no_acceptance_and_lost_rows_do(conversations: list[Rendered]) -> None:
    engine, drafter = _engine()
    computed, _, answers = _answered(engine, drafter, conversations, "computed")
    behind_hits, found, again = _answered(engine, drafter, conversations, "found")
    assert found > 0.5 * sum(each.prompt_tokens for each in conversations)
    assert again == answers
    assert computed > 0.2
    assert behind_hits == pytest.approx(computed, rel=0.02)
    engine, drafter = _engine()
    drafter.forgets = True
    _answered(engine, drafter, conversations, "lost")
    drafter.forgets = False
    blind, found_blind, blindly = _answered(engine, drafter, conversations, "found")
    assert (found_blind, blindly) == (found, answers), "which is all that a user sees"
    assert blind < 0.7 * computed
