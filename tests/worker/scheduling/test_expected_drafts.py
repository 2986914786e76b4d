"""Plans expect of drafts what the worker's choice of them, by the same times, comes to."""

from __future__ import annotations

import numpy as np
import pytest
from architecture_of import architecture_of

from modelserve.hardware import CATALOGUE
from modelserve.planning.speed.draft_time import DraftSpeed, draft_speeds
from modelserve.planning.speed.drafted_steps import DraftedSteps, DraftWay, VerifyingSteps
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import assistant_of, published_assistant
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.speculation import AUTO_DRAFTS, Speculation
from modelserve_worker.batch import AskedDrafter
from modelserve_worker.scheduling.costs.step_costs import PlannedCosts
from modelserve_worker.scheduling.drafting import Drafting

SLOTS, CONTEXT = 64, 2000.0


class KnownChance(Drafting):
    known: float | tuple[float, ...]  # or by drafter

    def chances(self, slots: np.ndarray, of: np.ndarray | int = 0) -> np.ndarray:
        known = np.broadcast_to(np.atleast_1d(self.known)[of], len(slots))
        return np.repeat(known[:, None], self.most, axis=1)


@pytest.mark.parametrize("variant", ["31B", "26B-A4B", "E4B"])
@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.75, 0.95])
def test_a_plan_expects_the_rate_that_the_choice_reaches(variant: str, requests: int, chance: float) -> None:
    architecture, device, assistant = architecture_of(variant), CATALOGUE["NVIDIA-H200"], assistant_of(variant)
    layout = KVCacheLayout.least(architecture)
    geometry = cache_geometry(architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    speed = RankSpeed(architecture, device, geometry, tensor_parallel=1, weight_format=None)
    of_draft = DraftSpeed(assistant, device, geometry, tensor_parallel=1)
    speculation = Speculation(AUTO_DRAFTS, assistant)

    costs = PlannedCosts(speed, max_num_seqs=SLOTS, speculation=speculation, drafts=[of_draft])
    drafting = KnownChance(AUTO_DRAFTS, SLOTS, costs, asked=[AskedDrafter(AUTO_DRAFTS)])
    drafting.known = chance
    slots, room = np.arange(requests, dtype=np.int32), np.full(requests, 100, dtype=np.int32)
    drafting._since_probe_s[:] = 0.0
    asked = drafting.ask(slots, room, context=CONTEXT).drafts
    drafting._coming[slots] = asked
    verified = int(drafting.choose(slots, room, context=CONTEXT).sum())
    chances = np.sort(np.tile(chance ** np.arange(1, AUTO_DRAFTS + 1), requests))[::-1]
    seconds = costs.seconds(requests, AUTO_DRAFTS * requests, context=CONTEXT)[verified]
    reached = (requests + chances[:verified].sum()) / (
        seconds + costs.draft_seconds(0, requests, asked, context=CONTEXT)[asked] if verified else seconds
    )

    verifying = VerifyingSteps(speed, max_num_seqs=SLOTS, speculation=speculation)
    expected = DraftedSteps(verifying, (DraftWay(of_draft, (chance,) * AUTO_DRAFTS),), fixed=False).step(
        requests, context=CONTEXT
    )
    assert requests * expected.tokens / expected.time.seconds == pytest.approx(reached, rel=0.05), (
        "the same k for all, or nearly"
    )
    assert (expected.drafts == 0) == (verified == 0)


@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize("chances", [(0.75, 0.75), (0.8, 0.86), (0.8, 0.4), (0.02, 0.02)])
def test_a_plan_expects_the_drafter_that_the_worker_asks(requests: int, chances: tuple[float, float]) -> None:
    """Of an assistant and a drafter of blocks, by the same times: the same one for the same load, or as good a one."""
    architecture, device = architecture_of("31B"), CATALOGUE["NVIDIA-H200"]
    block = published_assistant("hf://z-lab/gemma-4-31B-it-DFlash")
    assert block is not None
    speculation = Speculation(AUTO_DRAFTS)
    for drafter in (assistant_of("31B"), block.assistant):
        speculation = speculation.with_drafter(drafter, as_many_as_pay=True)
    most, layout = speculation.num_tokens, KVCacheLayout.least(architecture)
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1, draft=speculation.draft_cache
    )
    speed = RankSpeed(architecture, device, geometry, tensor_parallel=1, weight_format=None)
    drafts = draft_speeds(speculation, device, geometry, tensor_parallel=1)
    costs = PlannedCosts(speed, max_num_seqs=SLOTS, speculation=speculation, drafts=drafts)
    drafting = KnownChance(most, SLOTS, costs, asked=[AskedDrafter(most), AskedDrafter(most, at_once=True)])
    drafting.known = chances
    drafting._all_tried[:] = 1000.0  # each was heard
    slots, room = np.arange(requests, dtype=np.int32), np.full(requests, 100, dtype=np.int32)
    drafting._since_probe_s[:] = 0.0
    asked = drafting.ask(slots, room, context=CONTEXT)
    steps = DraftedSteps(
        VerifyingSteps(speed, max_num_seqs=SLOTS, speculation=speculation),
        [DraftWay(proposing, (chance,) * most) for proposing, chance in zip(drafts, chances, strict=True)],
        fixed=False,
    )
    expected, every = steps.step(requests, context=CONTEXT), steps.every(requests, context=CONTEXT)
    assert bool(asked.drafts) == bool(expected.drafts)
    if asked.drafts:
        rates = [max(s.tokens / s.time.seconds for s in every if s.drafter == d and s.drafts) for d in (0, 1)]
        assert rates[asked.drafter] >= 0.98 * max(rates)
