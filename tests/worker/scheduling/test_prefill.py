"""Prefills side by side: short prompts pass long ones, and long ones keep their pace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled import Driver
from stamped_device import StampedModel

from modelserve.model.architecture import LayerKind
from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.prefill import share_prefill_tokens, trim_to_captured
from modelserve_worker.scheduling.scheduler import Scheduler

GEOMETRY = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL)).geometry(
    window=1024, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1
)


def driver(budget: int, pool: int = 100 * GEOMETRY.held_bytes(17_000), seqs: int = 16) -> Driver:
    return Driver(Scheduler(SchedulerLimits(budget, seqs, 17_000, ()), GEOMETRY, pool))


def request(name: str, prompt: int, max_tokens: int = 4) -> Request:
    return Request(name, (5,) * prompt, SamplingParams(seed=0, max_tokens=max_tokens))


def shared(remaining: list[int], budget: int) -> list[int]:
    """Where every token costs the same."""
    left = np.array(remaining, dtype=np.int32)
    shares: list[int] = share_prefill_tokens(left, np.zeros_like(left), budget, PromptCost(), budget).tolist()
    return shares


@given(remaining=st.lists(st.integers(1, 60), min_size=1, max_size=6), budget=st.integers(1, 99))
def test_shares_use_the_budget_and_favour_the_oldest_and_the_shortest(remaining: list[int], budget: int) -> None:
    shares = shared(remaining, budget)
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    assert sum(shares) == min(budget, sum(remaining)), "nothing is wasted"
    assert shares[0] >= min(remaining[0], (budget + 1) // 2), "the oldest has its half"
    for i, left in enumerate(remaining):
        before = sum(other for j, other in enumerate(remaining) if other < left or (other == left and j < i))
        assert shares[i] >= min(left, budget // 2 - before), "the other half goes to the shortest first"


def test_no_prefills_have_no_shares() -> None:
    assert shared([], 7) == []


def test_equal_prompts_are_computed_one_after_the_other() -> None:
    assert shared([16_384] * 4, 2048) == [2048, 0, 0, 0]


PREFILLS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 200_000)), min_size=1, max_size=6)  # left, computed


@given(
    prefills=PREFILLS,
    budget=st.integers(1, 3000),
    doubling=st.integers(100, 1_000_000),
    full=st.integers(0, 9000),
)
def test_a_step_costs_what_it_may_and_nothing_that_it_could_pay_is_left(
    prefills: list[tuple[int, int]], budget: int, doubling: int, full: int
) -> None:
    prices = PromptCost(doubling, full)
    remaining, computed = (np.array(each, dtype=np.int32) for each in zip(*prefills, strict=True))
    shares = share_prefill_tokens(remaining, computed, budget, prices, prices.allowed(budget))
    assert (shares >= 0).all()
    assert (shares <= remaining).all()
    assert shares[0] >= 1, "the oldest always goes on"
    assert shares.sum() <= budget
    costs = [prices.cost(start, rows) for start, rows in zip(computed.tolist(), shares.tolist(), strict=True)]
    last_row = prices.cost(int(computed[0]), 1)
    assert sum(costs) <= prices.allowed(budget) + last_row, "but for the oldest's half, which is rounded up"
    whole = prices.cost(int(computed[0]), min(int(remaining[0]), budget))
    assert costs[0] >= min(prices.allowed(budget) / 2, whole) * (1 - 1e-6), "the oldest has its half"
    if shares.sum() < budget:
        left = prices.allowed(budget) - sum(costs)
        more = [
            prices.cost(int(start + share), 1)
            for start, share, of in zip(computed, shares, remaining, strict=True)
            if share < of
        ]
        assert not more or left <= max(more) + 1e-3, "not even one more token of the costliest was left unpaid"


@given(doubling=st.integers(100, 1_000_000), full=st.integers(1, 9000), rows=st.integers(1, 9000))
def test_up_to_the_full_context_rows_are_limited_by_their_number_alone(doubling: int, full: int, rows: int) -> None:
    prices = PromptCost(doubling, full)
    rows = min(rows, full)
    for start in (0, (full - rows) // 2, full - rows):
        assert prices.rows(start, prices.allowed(rows)) >= rows * (1 - 1e-9)
    assert prices.rows(full, prices.allowed(rows)) <= rows


@given(start=st.integers(0, 200_000), cost=st.floats(0.1, 10_000), doubling=st.integers(100, 1_000_000))
def test_rows_of_a_cost_cost_it(start: int, cost: float, doubling: int) -> None:
    prices = PromptCost(doubling)
    assert prices.cost(start, prices.rows(start, cost)) == pytest.approx(cost)


def test_the_steps_of_a_prompt_are_those_that_its_shares_make() -> None:
    prices, rows, tokens = PromptCost(75_000, 8192), 2048, 126_000
    computed = steps = 0
    while computed < tokens:
        left, done = np.array([tokens - computed], dtype=np.int32), np.array([computed], dtype=np.int32)
        computed += int(share_prefill_tokens(left, done, rows, prices, prices.allowed(rows))[0])
        steps += 1
    assert steps == pytest.approx(prices.steps(tokens, rows), abs=1)
    assert steps > tokens / rows * 1.3


@pytest.mark.parametrize(
    ("shares", "remaining", "decodes", "trimmed"),
    [
        ([400], [9000], 0, [256]),
        ([400], [9000], 20, [236]),
        ([100, 380], [100, 9000], 0, [100, 156]),  # who ends in it keeps what it has
        ([400], [400], 0, [400]),
        ([300, 60], [9000, 60], 0, [196, 60]),
        ([50], [9000], 0, [50]),  # below the smallest
        ([100, 200, 200], [100, 200, 9000], 0, [100, 200, 200]),  # 500 to 256 would take all that the last one has
        ([512], [9000], 0, [512]),
        ([1], [9000], 100, [1]),  # a token at least
    ],
)
def test_a_step_is_trimmed_to_a_captured_one(
    shares: list[int], remaining: list[int], decodes: int, trimmed: list[int]
) -> None:
    found = np.array(shares, dtype=np.int32)
    trim_to_captured(found, np.array(remaining, dtype=np.int32), decodes, (64, 128, 256, 512))
    assert found.tolist() == trimmed


def test_without_captured_steps_nothing_is_trimmed() -> None:
    found = np.array([400], dtype=np.int32)
    trim_to_captured(found, np.array([9000], dtype=np.int32), 0, ())
    assert found.tolist() == [400]


@pytest.mark.parametrize(("budget", "chat"), [(8192, 1000), (2048, 300), (512, 300), (64, 100)])
@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_beside_four_long_prompts_a_short_one_has_its_first_token_within_five_steps(
    budget: int, chat: int, steps_before: int
) -> None:
    """It arrives with a step in flight, which counts as the first of the five."""
    target = driver(budget)
    target.add(*(request(f"long{i}", 16_384) for i in range(4)), request("decodes", 1, max_tokens=100))
    pending = target.schedule()
    for _ in range(steps_before):
        step = target.schedule()
        target.answer(pending)
        pending = step
    target.add(request("chat", chat))
    for number in range(1, 6):
        step = target.schedule()
        outputs = target.answer(pending)
        if "chat" in outputs:
            assert number <= 5
            break
        pending = step
    else:
        pytest.fail("no token in five steps")
    mixed = min(budget, target.scheduler.limits.max_num_mixed_tokens)
    assert step.batch.num_tokens == mixed, "the long prompts use the rest"
    assert sum(tokens for name, tokens in step.lengths.items() if "long" in name) >= (mixed - 2) // 2


@pytest.mark.parametrize(("budget", "mixed"), [(8192, 512), (2048, 64), (256, 512)])
def test_a_prompt_fills_the_step_alone_and_a_mixed_step_beside_a_decode(budget: int, mixed: int) -> None:
    limits = SchedulerLimits(budget, 16, 17_000, (), mixed)
    target = Driver(Scheduler(limits, GEOMETRY, 100 * GEOMETRY.held_bytes(17_000)))
    target.add(request("long", 16_384), request("chat", 300, max_tokens=100))
    answered: dict[str, object] = {}
    while "chat" not in answered:
        step = target.schedule()
        alone = min(budget, 4 * mixed)
        assert step.batch.num_tokens == alone, "nobody decodes yet, and the long one needs several steps"
        answered = target.answer(step)
    assert target.schedule().lengths == {"chat": 1, "long": min(budget, mixed) - 1}


def test_however_many_decode_a_prefill_has_half_of_a_mixed_step() -> None:
    limits, left = SchedulerLimits(2048, 1024, 17_000, (), 512), np.array([2048])
    assert [limits.prefill_tokens(decodes, left, 2048) for decodes in (0, 1, 256, 257, 1000, 1900, 2047)] == [
        2048, 511, 256, 256, 256, 148, 1,
    ]  # fmt: skip


def test_a_prompt_that_fits_has_the_whole_step_and_a_longer_one_the_steps_of_long_ones() -> None:
    limits, left = SchedulerLimits(8192, 64, 17_000, (), 512), np.array([1, 1])
    assert [limits.prefill_tokens(0, left, longest) for longest in (1, 8192, 8193)] == [8192, 8192, 2048]


def test_many_waiting_prompts_have_longer_steps_and_few_have_shorter_ones() -> None:
    def limits(mixed: int, crowd: float = 15_000) -> SchedulerLimits:
        return SchedulerLimits(
            8192, 64, 131_072, (), mixed, 82_700, min_num_mixed_tokens=mixed // 2, crowd_tokens=crowd
        )

    rows = [
        limits(512).prefill_tokens(1, np.array(left), 126_000) + 1
        for left in ([126_000], [8192] * 7, [4000] * 8, [6000] * 8, [126_000] * 8, [200] * 32, [2000], [200] * 10)
    ]
    assert rows == [512, 512, 768, 1280, 1536, 512, 256, 256]
    many = np.array([8192] * 64)
    assert limits(128).prefill_tokens(1, many, 8192) + 1 == 384, "three times a mixed step"
    assert limits(4096).prefill_tokens(1, many, 8192) + 1 == 4096, "never less than a mixed step"
    unknown = SchedulerLimits(8192, 64, 17_000, (), 512)
    assert [unknown.prefill_tokens(1, left, 8192) + 1 for left in (many, np.array([200]))] == [512, 512]


def test_what_is_held_back_counts_as_what_waits_here() -> None:
    limits = SchedulerLimits(8192, 64, 131_072, (), 512, min_num_mixed_tokens=256, crowd_tokens=15_000)
    left = np.array([200])
    assert [limits.prefill_tokens(1, left, 200, held_back=n) + 1 for n in (0, 1000, 5000, 30_000, 10**6)] == [
        256, 256, 512, 1024, 1536,
    ]  # fmt: skip
    assert limits.prefill_tokens(0, left, 200, held_back=10**6) == 8192, "beside nobody it changes nothing"


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """Each step brings a prompt that would fill it; the long one needs twice the steps that it needs alone."""
    budget, long = 64, 1600
    target = driver(budget, seqs=32)
    target.add(request("long", long, max_tokens=1))
    answered: dict[str, int] = {}
    for number in range(1, 1000):
        target.add(request(f"short{number}", 32, max_tokens=1))
        step = target.schedule()
        for name in target.answer(step):
            answered[name] = number
        if "long" in answered:
            break
    assert answered["long"] == 2 * long // budget
    assert all(answered[f"short{i}"] == i for i in range(1, answered["long"])), "and nobody short waited for it"


def test_every_long_prompt_ends_while_short_ones_keep_coming() -> None:
    """Elders first: each ends at the latest when the tokens of it and its elders have gone through half the steps."""
    budget, long = 64, 800
    target = driver(budget, seqs=32)
    target.add(*(request(f"long{i}", long, max_tokens=1) for i in range(3)))
    ended: dict[str, int] = {}
    for number in range(1, 1000):
        target.add(request(f"short{number}", 20, max_tokens=1))
        for name in target.answer(target.schedule()):
            ended[name] = number
        if "long2" in ended:
            break
    for i in range(3):
        assert ended[f"long{i}"] <= (i + 1) * 2 * long // budget + i


def test_nobody_passes_a_request_that_does_not_fit_and_it_gets_in() -> None:
    target = driver(256, pool=GEOMETRY.held_bytes(4000) + GEOMETRY.held_bytes(2060))
    target.add(request("first", 2000, max_tokens=50), request("second", 2000, max_tokens=61))
    target.add(request("big", 4000, max_tokens=1), request("small", 10, max_tokens=1))
    first_steps: dict[str, int] = {}
    ended: dict[str, int] = {}
    number = 0
    while target.scheduler.has_requests:
        number += 1
        step = target.schedule()
        for name in step.lengths:
            first_steps.setdefault(name, number)
        for name, output in target.answer(step).items():
            if output.finish_reason:
                ended[name] = number
    assert first_steps["big"] == ended["first"] + 1, "as soon as the bytes are back"
    assert first_steps["small"] >= first_steps["big"]
    assert set(ended) == {"first", "second", "big", "small"}
