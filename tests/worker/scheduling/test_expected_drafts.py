"""Plans expect of drafts what the worker's choice of them, by the same times, comes to."""

from __future__ import annotations

import numpy as np
import pytest
from architecture_of import architecture_of

from modelserve.hardware import CATALOGUE
from modelserve.planning.speed.draft_time import DraftSpeed
from modelserve.planning.speed.drafted_steps import DraftedSteps, DraftWay, VerifyingSteps
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import assistant_of
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.speculation import AUTO_DRAFTS, Speculation
from modelserve_worker.batch import AskedDrafter
from modelserve_worker.scheduling.costs.step_costs import PlannedCosts
from modelserve_worker.scheduling.drafting import Drafting

SLOTS, CONTEXT = 64, 2000.0


class KnownChance(Drafting):
    known: float

    def chances(self, slots: np.ndarray, of: np.ndarray | int = 0) -> np.ndarray:
        return np.full((len(slots), AUTO_DRAFTS), self.known)


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
