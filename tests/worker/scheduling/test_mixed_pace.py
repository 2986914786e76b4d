"""Steps of prompts beside decodes where nothing is planned: by measured time, on a clock that tests set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled import Driver, Step
from stamped_device import StampedModel

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import SampledTokens
from modelserve_worker.engine.step_clock import StepClock
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.mixed_pace import FEWEST_ROWS, MixedPace
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.stats import TimedStep
from modelserve_worker.step_seconds import StepSeconds

GEOMETRY = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL)).geometry(
    window=1024, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1
)
TARGET, PROMPT, MOST, ALONE = 0.25, 8000, 512, 2048
# As two cores compute a small model: a row takes twice as long behind 2,500 tokens, and a step 12 ms whatever is in it.
CORES = StepSeconds(constant=0.012, row=0.4e-3, key=2e-6, pair=0.16e-6)


@dataclass
class DearMask:
    """A constraint that allows everything, once its mask is `there`."""

    there: bool = True
    dear: bool = True
    complete: bool = False
    error: Exception | None = None

    def ready(self) -> bool:
        return self.there

    def consume(self, token_id: int) -> None: ...

    def propose(self, token_id: int) -> bool:
        return True

    def roll_back(self, count: int) -> None: ...

    def mask(self, row: np.ndarray) -> None: ...


@dataclass
class Machine:
    """Runs a scheduler's steps on a clock; each takes what `CORES` take, times `slower`, which tests set by step."""

    pace: MixedPace | None
    slower: Callable[[int], float] = lambda step: 1.0
    steps: list[tuple[Step, float]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        limits = SchedulerLimits(ALONE, 32, 20_000, (), MOST)
        self.driver = Driver(Scheduler(limits, GEOMETRY, 100 * GEOMETRY.held_bytes(17_000), mixed_pace=self.pace))
        self.clock = StepClock(lambda: self.now)

    def step(self) -> None:
        step = self.driver.schedule()
        self.clock.launching(step.batch)
        chunks = [(end.end - end.start, end.start) for end in step.shares.values() if end.end - end.start > 1]
        decodes = [end.start for end in step.shares.values() if end.end - end.start == 1]
        seconds = CORES.constant + sum(CORES.chunk(rows, start + rows / 2) for rows, start in chunks)
        seconds += sum(CORES.decodes(1, at) - CORES.constant for at in decodes)
        seconds *= self.slower(len(self.steps))
        self.now += seconds
        timed = self.clock.ended(step.batch, failed=False)
        if self.pace is not None:
            self.pace.observe(timed)
        samples = sum(share.samples for share in step.shares.values())
        self.driver.scheduler.update(SampledTokens(step.batch.step, np.full(samples, 7, dtype=np.int32), {}))
        self.steps.append((step, seconds))

    def until_first_token(self, name: str) -> tuple[float, list[float]]:
        """How long a request waits for its first token, and what each step till then took."""
        began, first = self.now, len(self.steps)
        while not any(name in step.shares and step[name].samples for step, _ in self.steps[first:]):
            self.step()
        return self.now - began, [seconds for _, seconds in self.steps[first:]]


def pace(start: StepSeconds = CORES) -> MixedPace:
    return MixedPace(start, target=TARGET, most_rows=MOST)


def request(name: str, prompt: int, max_tokens: int = 1) -> Request:
    return Request(name, (5,) * prompt, SamplingParams(seed=0, max_tokens=max_tokens))


def streaming(machine: Machine, streams: int = 1) -> Machine:
    """With requests that decode."""
    machine.driver.add(*(request(f"stream{i}", 10, 4000) for i in range(streams)))
    for _ in range(10):
        machine.step()
    return machine


def beside(machine: Machine, streams: int = 1) -> tuple[float, list[float]]:
    streaming(machine, streams).driver.add(request("long", PROMPT))
    return machine.until_first_token("long")


def lengths(machine: Machine, name: str = "long") -> list[int]:
    return [step.lengths[name] for step, _ in machine.steps if name in step.lengths]


def test_whoever_decodes_waits_for_measured_time_and_the_prompt_hardly_longer() -> None:
    by_number, steps_of_512 = beside(Machine(None))
    assert max(steps_of_512) > 0.8, "what a number of rows that suits a GPU does here"
    waited, steps = beside(machine := Machine(pace()))
    assert max(steps) <= TARGET + 0.05
    assert waited <= 1.25 * by_number
    rows = lengths(machine)
    assert rows[:-1] == sorted(rows[:-1], reverse=True), "rows become fewer along the prompt, never more"
    assert rows[0] > 2 * rows[-2]


def test_a_prompt_beside_nobody_has_the_steps_that_it_had() -> None:
    taken = []
    for machine in (Machine(None), Machine(pace(), slower=lambda step: 9.0)):
        machine.driver.add(request("long", PROMPT))
        machine.until_first_token("long")
        taken.append(lengths(machine))
    assert taken == [[ALONE, ALONE, ALONE, PROMPT - 3 * ALONE]] * 2


@pytest.mark.parametrize("factor", [0.3, 3.0, 10.0])
def test_a_machine_that_is_quicker_or_slower_than_at_the_start_is_followed_within_three_steps(factor: float) -> None:
    machine = Machine(pace(), slower=lambda step: factor)
    waited, steps = beside(machine)
    alone, reading = machine.steps[9][1], factor * CORES.key * PROMPT
    assert max(steps[3:]) <= 1.1 * (max(TARGET, 5 * reading) + alone)
    assert waited <= 2 * factor * beside(Machine(None))[0], "no prompt pays more than twice for it"


def test_steps_that_were_interrupted_change_nothing() -> None:
    """Every fifth one takes ten times as long."""
    quiet, noisy = Machine(pace()), Machine(pace(), slower=lambda step: 10.0 if step % 5 == 4 else 1.0)
    for machine in (quiet, noisy):
        beside(machine)
    assert lengths(noisy) == pytest.approx(lengths(quiet), rel=0.05, abs=16)


def test_rows_shrink_with_a_load_that_comes_in_the_middle_and_grow_when_it_goes() -> None:
    machine = Machine(pace(), slower=lambda step: 5.0 if 20 <= step < 40 else 1.0)
    _, steps = beside(machine)
    assert max(steps[: 20 - 10]) <= TARGET + 0.05
    loaded, after = machine.steps[23:40], machine.steps[44:]
    assert max(seconds for _, seconds in loaded) <= TARGET + 0.15
    assert min(seconds for _, seconds in after[:-1]) >= 0.5 * TARGET, "no longer small once it is quick again"


def test_a_start_that_was_measured_wrongly_is_put_right_by_the_steps() -> None:
    """A neighbour took the processor while the start looked at long contexts, or while it looked at all."""
    for wrong in (
        StepSeconds(0.012, 0.4e-3, 2e-6, 8 * 0.16e-6),
        StepSeconds(0.1, 4e-3, 2e-5, 1.6e-6),
        StepSeconds(0.0, 1e-4, 0.0, 0.0),
    ):
        waited, steps = beside(Machine(pace(wrong)))
        assert max(steps[3:]) <= 1.5 * TARGET
        assert waited <= 1.6 * beside(Machine(None))[0]


def test_many_that_decode_leave_a_prompt_as_long_as_they_take_themselves() -> None:
    """Thirty streams behind long contexts take more than the target: the prompt doubles their step, and goes on."""
    slow = StepSeconds(constant=0.3, row=4e-3, key=2e-6, pair=0.16e-6)
    decodes = slow.decodes(30, 0)
    rows = pace(slow).prices.rows(0, pace(slow).cost(0, decodes=30, context=0.0))
    assert slow.chunk(rows, rows / 2) == pytest.approx(decodes, rel=0.2)


def test_short_prompts_beside_a_long_one_are_in_the_same_measure() -> None:
    machine = streaming(Machine(pace()))
    machine.driver.add(request("long", PROMPT))
    for number in range(12):
        machine.driver.add(request(f"chat{number}", 40, 30))
        machine.step()
    assert max(seconds for _, seconds in machine.steps[10:]) <= TARGET + 0.15
    assert min(lengths(machine)) >= FEWEST_ROWS


def test_one_that_only_waits_for_its_mask_is_not_held_up_by_a_whole_step() -> None:
    """A constrained stream sits a step out while its mask is computed; the step beside it is no larger for that."""

    machine, stream, mask = Machine(None), request("stream", 10, 100), DearMask()
    stream.constraint = mask
    machine.driver.add(stream)
    machine.step()
    machine.driver.add(request("long", PROMPT))
    machine.step()
    mask.there = False
    machine.step()
    assert [step.lengths for step, _ in machine.steps[1:]] == [{"stream": 1, "long": MOST - 1}, {"long": MOST - 1}]


@given(
    constant=st.floats(0, 1), row=st.floats(1e-6, 0.1), key=st.floats(0, 1e-4), pair=st.floats(0, 1e-4),
    start=st.integers(0, 200_000), seed=st.integers(0, 1000),
)  # fmt: skip
def test_whatever_was_measured_there_is_a_least_and_what_takes_longer_is_no_more(
    constant: float, row: float, key: float, pair: float, start: int, seed: int
) -> None:
    random, shape = Random(seed), StepSeconds(constant, row, key, pair)
    for _ in range(3):
        here, slower = pace(shape), pace(shape)
        for _ in range(9):
            took, rows = random.choice([0.0, 1e-6, 0.1, 1e6]), random.choice([8, 100, 500])
            here.observe([TimedStep(took, 1, 5.0, rows, 10.0)])
            slower.observe([TimedStep(2 * took, 1, 5.0, rows, 10.0)])
        cost, less, further = (
            each.cost(at, decodes=1, context=0.0) for each, at in ((here, start), (slower, start), (here, start + 5000))
        )
        assert cost >= less >= here.prices.cost(start, FEWEST_ROWS)
        if key == 0:
            assert here.prices.rows(start + 5000, further) <= here.prices.rows(start, cost) * (1 + 1e-9)


@given(
    constant=st.floats(0, 1), row=st.floats(1e-4, 0.1), key=st.floats(0, 1e-4), pair=st.floats(1e-9, 1e-6),
)  # fmt: skip
def test_four_steps_say_what_all_take(constant: float, row: float, key: float, pair: float) -> None:
    true = StepSeconds(constant, row, key, pair)

    def seconds(rows: int, start: int) -> float:
        return constant + rows * row + start * key + rows * (start + rows / 2) * pair

    found = StepSeconds.fitted(seconds, rows=(8, 64), context=4096)
    for rows, start in ((1, 0), (16, 100), (200, 8000)):
        expected = true.constant + true.chunk(rows, start + rows / 2)
        assert found.constant + found.chunk(rows, start + rows / 2) == pytest.approx(expected, rel=0.35)


def test_noise_never_makes_a_time_negative_or_a_row_free() -> None:
    random = Random(3)
    for context in (0, 4096):
        for _ in range(200):
            found = StepSeconds.fitted(lambda rows, start: random.random(), rows=(8, 64), context=context)
            assert min(found.constant, found.key, found.pair) >= 0
            assert found.row > 0
