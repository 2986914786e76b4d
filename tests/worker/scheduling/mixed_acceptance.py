"""Requests whose drafts are right unequally often, some of them another way from the middle of their answers on: what
the switch between two drafters brings of them, and what the best choice does that is the same for all, always."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from architecture_of import architecture_of
from numpy.typing import NDArray

from modelserve.hardware import CATALOGUE
from modelserve.planning.speed.draft_time import draft_speeds
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import assistant_of, published_assistant
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.speculation import STEP_DRAFTS, Speculation
from modelserve_worker.batch import AskedDrafter, SampledTokens
from modelserve_worker.scheduling.costs.step_costs import PlannedCosts
from modelserve_worker.scheduling.drafting import Drafting

Chances = NDArray[np.float64]
CONTEXT = 2000.0
DFLASH = "hf://z-lab/gemma-4-31B-it-DFlash"


def planned_costs(slots: int) -> tuple[PlannedCosts, int]:
    """Of 31B on an H200 with its assistant and z-lab's DFlash, and the tokens of a proposal."""
    architecture, device, block = architecture_of("31B"), CATALOGUE["NVIDIA-H200"], published_assistant(DFLASH)
    assert block is not None
    speculation = Speculation(8)
    for drafter in (assistant_of("31B"), block.assistant):
        speculation = speculation.with_drafter(drafter, as_many_as_pay=True)
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.least(architecture), tensor_parallel_size=1,
        draft=speculation.draft_cache,
    )  # fmt: skip
    speed = RankSpeed(architecture, device, geometry, tensor_parallel=1, weight_format=None)
    drafts = draft_speeds(speculation, device, geometry, tensor_parallel=1)
    return PlannedCosts(speed, max_num_seqs=slots, speculation=speculation, drafts=drafts), speculation.num_tokens


@dataclass
class Traffic:
    """`chances[p][d]` [S, most]: of drafter d's drafts of each request in phase p of its answer, right where those
    before them are. Answers have `length` tokens, phases are equal parts of them; who ends is followed by a request of
    the same kind. Requests begin at different places of their answers."""

    chances: Sequence[Sequence[Chances]]
    length: int = 512

    def phases(self, done: NDArray[np.int64]) -> NDArray[np.int64]:
        count = len(self.chances)
        return (done % self.length) * count // self.length

    def of(self, done: NDArray[np.int64], drafter: int) -> Chances:
        """[S, most] by tokens that each answer has."""
        by_phase = np.stack([phase[drafter] for phase in self.chances])
        found: Chances = by_phase[self.phases(done), np.arange(len(done))]
        return found


def fixed_rates(traffic: Traffic, costs: PlannedCosts, most: int) -> dict[str, float]:
    """Tokens a second of no drafts, and of each drafter where all that it is asked for is verified of every request, by
    the number that is best for it. A step has STEP_DRAFTS drafts at most: of so many requests they suffice for."""
    requests = len(traffic.chances[0][0])
    seconds = costs.seconds(requests, min(requests * most, STEP_DRAFTS), context=CONTEXT)
    rates = {"none": requests / seconds[0]}
    for drafter in (0, 1):
        drafting = costs.draft_seconds(drafter, requests, most, context=CONTEXT)
        found = [0.0]
        for count in range(1, most + 1):
            drafted = min(requests, STEP_DRAFTS // count)
            step = seconds[drafted * count] + drafting[count]
            # Phases weigh by the steps that they take.
            steps = [1.0 / (1.0 + phase[drafter][:, :count].cumprod(axis=1).sum(axis=1) * drafted / requests)
                     for phase in traffic.chances]  # fmt: skip
            found.append(float((len(steps) / np.sum(steps, axis=0)).sum() / step))
        rates[f"drafter {drafter}"] = max(found)
    return rates


def switched_rate(traffic: Traffic, costs: PlannedCosts, most: int, *, steps: int, skipped: int = 200) -> float:
    """Tokens a second of `Drafting` over the same times, from step `skipped` on."""
    requests = len(traffic.chances[0][0])
    drafting = Drafting(most, requests, costs, asked=[AskedDrafter(most), AskedDrafter(most, at_once=True)])
    random, slots = np.random.default_rng(1), np.arange(requests, dtype=np.int32)
    room, proposed = np.full(requests, 1000, dtype=np.int32), np.zeros((requests, most))
    done = random.integers(0, traffic.length, requests)
    tokens, seconds = 0, 0.0
    for number in range(steps):
        drafts = drafting.choose(slots, room, context=CONTEXT)
        asked = drafting.ask(slots, room - drafts, context=CONTEXT)
        accepted = np.minimum(np.minimum.accumulate(proposed, axis=1).sum(axis=1), drafts).astype(np.int32)
        came = [[2] * n + [2 if proposed[i, n : n + 1].any() else 1] for i, n in enumerate(accepted)]
        counts = (accepted + 1).astype(np.int32)
        took = float(costs.seconds(requests, int(drafts.sum()), context=CONTEXT)[-1])
        proposed = np.zeros_like(proposed)
        made, said = np.zeros((0, most), dtype=np.int32), np.zeros(0, dtype=np.int32)
        if asked.drafts:
            took += float(costs.draft_seconds(asked.drafter, requests, asked.drafts, context=CONTEXT)[-1])
            proposed[:, : asked.drafts] = (random.random((requests, most)) < traffic.of(done, asked.drafter))[
                :, : asked.drafts
            ]
            made, said = np.full((requests, most), 2, np.int32), np.full(requests, asked.drafts, np.int32)
        ids = np.array(list(itertools.chain(*came)), dtype=np.int32)
        sampled = SampledTokens(0, ids, {}, counts, made, said) if asked.drafts else SampledTokens(0, ids, {}, counts)
        drafting.answer(slots, drafts + 1, counts, sampled, asked=asked)
        before, done = done, done + counts
        for slot in np.flatnonzero(before // traffic.length != done // traffic.length).tolist():
            drafting.enter(slot)  # another request of the same kind
            proposed[slot] = 0
        if number >= skipped:
            tokens += int(counts.sum())
            seconds += took
    return tokens / seconds
