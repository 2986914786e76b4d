"""How many drafts a step verifies: by what they bring and what they cost, for requests whose proposals are right with
given chances."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from architecture_of import architecture_of
from step_times import PerRow

from modelserve.hardware import CATALOGUE
from modelserve.planning.speed.draft_time import DraftSpeed
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import assistant_of
from modelserve.sizing.cuda_graphs import decode_graph_rows
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.speculation import STEP_DRAFTS, Speculation
from modelserve_worker.batch import NOTHING_ASKED, Asked, AskedDrafter, SampledTokens
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.step_costs import MeasuredCosts, PlannedCosts, StepCosts
from modelserve_worker.scheduling.drafting import LOW_FOR_S, Drafting
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.stats import TimedStep

K = 8


class Requests:
    """Decodes whose j-th draft is right with chances[i][j], where those before it are; `drafting` hears all of it."""

    def __init__(self, drafting: Drafting, chances: np.ndarray, *, seed: int = 0, costs: PerRow | None = None) -> None:
        """`costs`: of a drafter that proposes what it is asked for; without, as many as it may."""
        self.drafting, self.chances, self.costs = drafting, chances, costs
        self.asked: list[int] = []
        self.slots = np.arange(len(chances), dtype=np.int32)
        self.random = np.random.default_rng(seed)
        self.proposed = np.zeros((len(chances), drafting.most), dtype=np.int32)
        self.tokens, self.seconds = len(chances), 0.0

    def step(self) -> np.ndarray:
        """Proposals are twos; a token that comes is two where the draft was right, and one where not."""
        room = np.full(len(self.slots), 1000, dtype=np.int32)
        drafts = self.drafting.choose(self.slots, room, context=1000.0)
        asked = self.drafting.ask(self.slots, room - drafts, context=1000.0)
        self.asked.append(asked.drafts)
        most = self.drafting.most if self.costs is None else self.asked[-1]
        right = self.random.random(self.chances.shape) < self.chances
        lead = np.minimum.accumulate(right, axis=1).sum(axis=1)
        accepted = np.minimum(lead, drafts)
        tokens = [[2] * count + [2 if right[i, count : count + 1].any() else 1] for i, count in enumerate(accepted)]
        ids = np.array(list(itertools.chain(*tokens)), dtype=np.int32)
        drafted = np.full((len(self.slots), self.drafting.most), 2, dtype=np.int32)
        proposed = np.full(len(self.slots), most, dtype=np.int32)
        counts = (accepted + 1).astype(np.int32)
        sampled = SampledTokens(0, ids, {}, counts, drafted, proposed)
        if not most:
            sampled = SampledTokens(0, ids, {}, counts)
        self.drafting.answer(self.slots, drafts + 1, counts, sampled, asked=asked)
        self.tokens += len(ids)
        if self.costs is not None:
            step = self.costs.seconds(len(self.slots), int(drafts.sum()), context=1000.0)[-1]
            self.seconds += float(step) + self.asked[-1] * self.costs.draft
        return drafts


class KnownChances(Drafting):
    known: np.ndarray  # [slots, drafts]

    def chances(self, slots: np.ndarray, of: np.ndarray | int = 0) -> np.ndarray:
        return self.known[slots].copy()


def best_by_search(chances: np.ndarray, costs: StepCosts) -> float:
    """Most tokens a second of all ways to draft."""
    yields = np.concatenate((np.zeros((len(chances), 1)), chances.cumprod(axis=1).cumsum(axis=1)), axis=1)
    seconds = costs.seconds(len(chances), chances.size, context=1000.0)
    ways = itertools.product(range(chances.shape[1] + 1), repeat=len(chances))
    return max(sum(1 + yields[i, k] for i, k in enumerate(way)) / seconds[sum(way)] for way in ways)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5])
def test_the_choice_is_the_best_of_all(share: float) -> None:
    random = np.random.default_rng(3)
    for _ in range(25):
        chances = random.random((3, 4))
        drafting = KnownChances(4, 3, PerRow(share))
        drafting.known = chances
        drafting._unasked[:] = 4
        slots = np.arange(3, dtype=np.int32)
        chosen = drafting.choose(slots, np.full(3, 9, dtype=np.int32), context=1000.0)
        yields = sum(1 + chances[i, :k].cumprod().sum() for i, k in enumerate(chosen.tolist()))
        seconds = PerRow(share).seconds(3, 12, context=1000.0)
        assert yields / seconds[chosen.sum()] == pytest.approx(best_by_search(chances, PerRow(share)))


def test_requests_whose_drafts_are_right_take_them_and_others_do_not() -> None:
    chances = np.array([[0.95] * K, [0.02] * K] * 4)
    drafting = Drafting(K, 8, PerRow(0.08))
    requests = Requests(drafting, chances)
    taken = np.mean([requests.step() for _ in range(300)][50:], axis=0)
    assert taken[::2].min() > 6
    assert taken[1::2].max() < 0.3


def test_a_request_that_begins_to_repeat_itself_is_noticed_though_it_takes_no_drafts() -> None:
    drafting = Drafting(K, 1, PerRow(0.1))
    requests = Requests(drafting, np.zeros((1, K)))
    without = [int(requests.step().sum()) for _ in range(200)][100:]
    assert sum(without) <= 2, "at most 2 % of the rows"
    requests.chances = np.ones((1, K))
    assert [int(requests.step().sum()) for _ in range(30)][-1] == K


def asked_for(share: float, draft: float, chances: np.ndarray) -> Requests:
    costs = PerRow(share, draft)
    return Requests(Drafting(K, len(chances), costs, asked=[AskedDrafter(K)]), chances, costs=costs)


@pytest.mark.parametrize(("share", "draft"), [(0.01, 0.02), (0.02, 0.06), (0.2, 0.1)])
@pytest.mark.parametrize("count", [1, 8])
def test_a_drafter_that_is_always_wrong_rests(share: float, draft: float, count: int) -> None:
    """Its drafts would take 16 to 80 % of a step; what is left of them is less than 2 %, once a few have been heard."""
    requests = asked_for(share, draft, np.zeros((count, K)))
    for _ in range(100):
        requests.step()
    requests.seconds, requests.asked, requests.tokens = 0.0, [], 0
    taken = sum(int(requests.step().sum()) for _ in range(1000))
    without = 1000 * float(PerRow(share).seconds(count, 0, context=0.0)[0])
    assert requests.tokens == 1000 * count
    assert requests.seconds <= 1.02 * without
    assert set(requests.asked) == {0, 1}, "now and then it is asked"
    assert taken <= 20 * count


def test_a_drafter_that_rests_is_heard_once_it_is_right() -> None:
    requests = asked_for(0.02, 0.05, np.zeros((4, K)))
    for _ in range(300):
        requests.step()
    requests.chances = np.ones((4, K))
    assert [int(requests.step().sum()) for _ in range(150)][-1] == 4 * K


def test_as_many_drafts_are_asked_for_as_pay() -> None:
    """Where a draft takes long, and the first ones alone are likely, the later ones are not made."""
    chances = np.tile([0.9, 0.9, *[0.3] * (K - 2)], (2, 1))
    requests = asked_for(0.02, 0.1, chances)
    for _ in range(200):
        requests.step()
    assert set(requests.asked[-100:]) <= {2, 3}
    cheap = asked_for(0.02, 0.0, chances)
    for _ in range(200):
        cheap.step()
    assert min(cheap.asked[-100:]) > 2


def test_of_asked_drafts_a_request_takes_what_pays_for_it() -> None:
    """Half of the requests accept: one proposal serves all, and the others verify nothing of it."""
    requests = asked_for(0.05, 0.03, np.array([[0.95] * K, [0.02] * K] * 4))
    taken = np.mean([requests.step() for _ in range(300)][50:], axis=0)
    assert taken[::2].min() > 5
    assert taken[1::2].max() < 0.3


def test_what_was_not_asked_for_is_not_taken() -> None:
    """Behind a step that asked for none there are no drafts, whatever was seen of the one before."""
    drafting = Drafting(4, 2, asked=[AskedDrafter(4)])
    slots, room = np.arange(2, dtype=np.int32), np.full(2, 9, dtype=np.int32)
    assert drafting.choose(slots, room, context=1.0).tolist() == [0, 0]
    assert drafting.ask(slots, room, context=1.0) == Asked(4), "a fixed number"
    assert drafting.choose(slots, room, context=1.0).tolist() == [4, 4], "before they are seen"
    assert drafting.ask(slots, room - 9, context=1.0) == Asked(0), "nobody has room for a draft"
    assert drafting.choose(slots, room, context=1.0).tolist() == [0, 0]
    counts, drafts = np.ones(2, dtype=np.int32), np.ones((2, 4), dtype=np.int32)
    sampled = SampledTokens(0, counts, {}, counts, drafts, np.array([4, 3], dtype=np.int32))
    drafting.answer(slots, counts, counts, sampled, asked=Asked(2))
    assert drafting.choose(slots, room, context=1.0).tolist() == [4, 3], "more than it was asked for: by another one"
    drafting.answer(slots, counts, counts, sampled, asked=Asked(4))
    assert drafting.choose(slots, room, context=1.0).tolist() == [0, 0]


def test_never_more_than_there_is_room_for_or_is_proposed() -> None:
    drafting = Drafting(4, 3)
    drafting._unasked[:] = 4, 2, 4
    room = np.array([9, 9, -1], dtype=np.int32)
    assert drafting.choose(np.arange(3, dtype=np.int32), room, context=1.0).tolist() == [4, 2, 0], "a fixed number"
    drafting.enter(0)
    assert drafting.choose(np.arange(3, dtype=np.int32), room, context=1.0).tolist() == [0, 2, 0]


def test_what_is_counted_is_what_steps_verified() -> None:
    drafting = Drafting(3, 2)
    slots, drafts = np.arange(2, dtype=np.int32), np.array([[5, 6, 7], [5, 6, 7]], dtype=np.int32)
    proposed = np.array([3, 3], dtype=np.int32)
    for drawn, tokens, counts in (
        ([1, 1], [4, 4], [1, 1]),
        ([4, 2], [5, 6, 9, 8], [3, 1]),
        ([4, 1], [5, 6, 7, 9, 5], [4, 1]),
    ):
        sampled = SampledTokens(0, np.array(tokens, np.int32), {}, np.array(counts, np.int32), drafts, proposed)
        drafting.answer(slots, np.array(drawn, np.int32), sampled.counts, sampled, asked=NOTHING_ASKED)
    assert (drafting.drafts_total, drafting.draft_tokens_total) == (3, 7)
    assert drafting.accepted_per_position.tolist() == [2, 2, 1]
    assert drafting.drafts_of(0, 2) == (5, 6)


def test_a_drafter_that_is_nearly_always_wrong_is_told(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    drafting = Drafting(K, 4, PerRow(0.1), now=lambda: now[0])
    requests = Requests(drafting, np.full((4, K), 0.01))
    caplog.set_level(logging.INFO)
    for _ in range(Drafting.least_proposals):
        requests.step()
    assert not drafting.low_acceptance, "it was not long"
    now[0] += LOW_FOR_S
    requests.step()
    assert drafting.low_acceptance
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
    requests.chances = np.full((4, K), 0.8)
    for _ in range(Drafting.least_proposals):
        requests.step()
    now[0] += LOW_FOR_S
    requests.step()
    assert not drafting.low_acceptance
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def planned(variant: str) -> PlannedCosts:
    architecture = architecture_of(variant)
    layout = KVCacheLayout.least(architecture)
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1
    )  # fmt: skip
    speed = RankSpeed(architecture, CATALOGUE["NVIDIA-H200"], geometry, tensor_parallel=1, weight_format=None)
    drafts = DraftSpeed(assistant_of(variant), CATALOGUE["NVIDIA-H200"], geometry, tensor_parallel=1)
    return PlannedCosts(speed, max_num_seqs=64, speculation=Speculation(K), drafts=[drafts])


def test_on_a_gpu_a_dense_model_verifies_more_than_a_mixture() -> None:
    """One request: rows of a dense model cost little beside its weights, and each row of a mixture reads experts."""
    dense, mixture = planned("31B"), planned("26B-A4B")
    for costs in (dense, mixture):
        seconds = costs.seconds(1, K, context=4000.0)
        assert (np.diff(seconds) >= 0).all()
        assert costs.seconds(1, K, context=40_000.0)[0] > seconds[0]
    ratio = [
        costs.seconds(1, K, context=4000.0)[K] / costs.seconds(1, 0, context=4000.0)[0] for costs in (dense, mixture)
    ]
    seconds = dense.seconds(1, K, context=4000.0)
    assert seconds[1] == seconds[K], "all of them fit into the captured step that takes one"
    assert (np.diff(mixture.seconds(1, K, context=4000.0)[1:]) > 0).all(), "where each row chooses its experts"
    assert 1.0 < ratio[0] < 1.1
    assert ratio[1] > 1.5
    assert len(dense.seconds(64, STEP_DRAFTS, context=100.0)) == 1 + STEP_DRAFTS


def test_a_step_has_so_many_drafts_at_most_and_what_has_room_for_its_requests() -> None:
    """However many requests there are, and however sure they are."""
    drafting = Drafting(K, 64, PerRow(0.0001))
    drafting._unasked[:] = K
    drafting._all_tried[:] = drafting._all_right[:] = 1e6
    slots = np.arange(64, dtype=np.int32)
    assert drafting.choose(slots, np.full(64, 99, dtype=np.int32), context=100.0).sum() == STEP_DRAFTS < 64 * K
    costs, speculation = planned("31B"), Speculation(K)
    sizes = [rows for rows, few in decode_graph_rows(64, speculation) if few == 1 + K]
    assert max(sizes) == speculation.step_rows(64) == 64 + STEP_DRAFTS
    assert (speculation.segments(144, 64), speculation.segments(sizes[-1], 64)) == (32, 64)
    seconds = costs.seconds(64, STEP_DRAFTS, context=100.0)
    assert sizes[-2:] == [288, 320]
    assert seconds[1] == seconds[288 - 64] < seconds[-1], "smaller ones have no room for 64 requests"
    assert seconds[1] > 1.1 * seconds[0]


def test_prompts_as_short_as_a_decode_with_drafts_have_room_in_a_step_or_wait() -> None:
    """They are attended to as one, in buffers for the rows of decodes and STEP_DRAFTS more."""
    architecture = architecture_of("E2B")
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.KV, tensor_parallel_size=1
    )
    requests = 64
    limits = SchedulerLimits(2048, requests, 256, ())
    scheduler = Scheduler(limits, geometry, 2 * requests * geometry.held_bytes(256), draft_tokens=K)
    for number in range(requests):
        prompt, sampling = tuple(range(3, 4 + K)), SamplingParams(seed=number, max_tokens=2)
        scheduler.add(Request(str(number), prompt, sampling))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    most = Speculation(K).step_rows(requests)
    assert (first.num_tokens, first.num_requests) == (most // (1 + K) * (1 + K), most // (1 + K))
    rest = requests - first.num_requests
    assert (second.num_tokens, second.num_requests) == (first.num_requests + rest * (1 + K), requests)


@pytest.mark.parametrize(("variant", "least", "most"), [("31B", 5, 8), ("E4B", 4, 8), ("26B-A4B", 1, 4)])
def test_an_assistant_is_asked_for_what_pays_on_the_gpu(variant: str, least: int, most: int) -> None:
    """Of one request whose drafts are right with 0.8, and behind right ones with 0.82."""
    costs = planned(variant)
    drafting = Drafting(K, 1, costs, asked=[AskedDrafter(K)])
    drafting._all_tried[:], drafting._all_right[:] = 1e6, [0.8e6, *[0.82e6] * (K - 1)]
    asked = drafting.ask(np.zeros(1, np.int32), np.full(1, 99, np.int32), context=2000.0).drafts
    assert least <= asked <= most
    many, one = (costs.draft_seconds(0, requests, 1, context=2000.0) for requests in (8, 1))
    assert many[1] > one[1] > 1e-4
    assert many[0] == 0


def test_measured_steps_become_a_constant_and_a_term_per_row() -> None:
    costs = MeasuredCosts()
    assert costs.seconds(1, 1, context=0.0)[1] > costs.seconds(1, 0, context=0.0)[0] > 0
    for decodes, drafts in ((1, 0), (2, 0), (1, 7), (4, 12), (8, 0)) * 20:
        costs.observe([TimedStep(0.01 + 0.002 * (decodes + drafts), decodes, 0.0, 0, 0.0, drafts)])
        costs.observe([TimedStep(9.0, 1, 0.0, 500, 0.0)])  # a prompt's
    assert costs.seconds(3, 2, context=0.0) == pytest.approx([0.016, 0.018, 0.020], rel=0.05)
    costs = MeasuredCosts()
    costs.observe([TimedStep(0.02, 1, 0.0, 0, 0.0)] * 50)
    alone, with_one = costs.seconds(1, 1, context=0.0)
    assert alone == pytest.approx(0.02, rel=0.01)
    assert with_one > alone, "a row is never free"
    assert costs.draft_seconds(0, 1, 1, context=0.0)[1] == pytest.approx(0.001), "while nothing is known"
    for _ in range(400):
        costs.observe([TimedStep(0.02 + 3 * 4 * 0.004, 4, 0.0, 0, 0.0, 0, Asked(3))])
    assert costs.draft_seconds(0, 1, 2, context=0.0) == pytest.approx([0.0, 0.004, 0.008], rel=0.2)


class Drafters(PerRow):
    """Two of them: one makes one draft after the other, `draft` each, the other all at once for `block`."""

    def __init__(self, share: float, draft: float, block: float) -> None:
        super().__init__(share, draft)
        self.block = block

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> np.ndarray:
        counts = np.arange(most + 1.0)
        return self.block * np.minimum(counts, 1) if drafter else self.draft * counts


def rate(costs: Drafters, chances: Sequence[np.ndarray], *, drafters: Sequence[int], steps: int = 1200) -> float:
    """Tokens a second of requests whose drafts by drafter d are right with chances[d] [S, most], `drafters` of which
    are there."""
    most = [K, 15]
    drafting = Drafting(15, len(chances[0]), _Some(costs, drafters), asked=[AskedDrafter(most[d]) for d in drafters])
    random, slots = np.random.default_rng(1), np.arange(len(chances[0]), dtype=np.int32)
    room, tokens, seconds, proposed = np.full(len(slots), 1000, dtype=np.int32), 0, 0.0, np.zeros((len(slots), 15))
    for _ in range(steps):
        drafts = drafting.choose(slots, room, context=1.0)
        asked = drafting.ask(slots, room - drafts, context=1.0) if drafters else NOTHING_ASKED
        accepted = np.minimum(np.minimum.accumulate(proposed, axis=1).sum(axis=1), drafts).astype(np.int32)
        came = [[2] * n + [2 if proposed[i, n : n + 1].any() else 1] for i, n in enumerate(accepted)]
        ids, counts = np.array(list(itertools.chain(*came)), dtype=np.int32), (accepted + 1).astype(np.int32)
        seconds += float(costs.seconds(len(slots), int(drafts.sum()), context=1.0)[-1])
        if asked.drafts:
            of = drafters[asked.drafter]
            seconds += float(costs.draft_seconds(of, len(slots), asked.drafts, context=1.0)[-1])
            proposed = np.zeros_like(proposed)
            right = random.random(chances[of].shape) < chances[of]
            proposed[:, : right.shape[1]] = right
            said = np.full(len(slots), asked.drafts, dtype=np.int32)
            sampled = SampledTokens(0, ids, {}, counts, np.full((len(slots), 15), 2, dtype=np.int32), said)
        else:
            sampled = SampledTokens(0, ids, {}, counts)
        drafting.answer(slots, drafts + 1, counts, sampled, asked=asked)
        tokens += int(counts.sum())
    return tokens / seconds


class _Some(PerRow):
    """Costs of some of the drafters."""

    def __init__(self, costs: Drafters, drafters: Sequence[int]) -> None:
        super().__init__(costs.share)
        self.costs, self.drafters = costs, drafters

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> np.ndarray:
        return self.costs.draft_seconds(self.drafters[drafter], requests, most, context=context)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(("serial", "block"), [(0.85, 0.3), (0.3, 0.85), (0.7, 0.7), (0.02, 0.02)])
def test_the_drafter_that_brings_most_is_asked(requests: int, serial: float, block: float) -> None:
    """Of two: nearly as fast as the better one alone, and as without where neither is right."""
    costs = Drafters(0.03, 0.05, 0.1)
    chances = [np.full((requests, most), chance) for most, chance in ((K, serial), (15, block))]
    none, first, second, both = (rate(costs, chances, drafters=each) for each in ((), (0,), (1,), (0, 1)))
    assert both >= 0.97 * max(none, first, second)
    assert both >= 0.98 * none
