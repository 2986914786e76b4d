"""What the front end holds back sizes steps, as long as it does, and what is likely to be cached does not."""

from __future__ import annotations

import pytest
from scheduled import Driver
from stamped_device import StampedModel

from modelserve.model.architecture import LayerKind
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.held_back import HeldBack
from modelserve_worker.scheduling.scheduler import Scheduler

GEOMETRY = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL)).geometry(
    window=1024, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1
)
LIMITS = SchedulerLimits(4096, 8, 17_000, (), 256, min_num_mixed_tokens=128, crowd_tokens=2000)


def _request(name: str, prompt: int, max_tokens: int = 500) -> Request:
    return Request(name, (5,) * prompt, SamplingParams(seed=0, max_tokens=max_tokens))


def _beside_a_decode(*, pool: int = 100 * GEOMETRY.held_bytes(17_000)) -> Driver:
    target = Driver(Scheduler(LIMITS, GEOMETRY, pool))
    target.add(_request("chat", 20))
    target.answer(target.schedule())
    return target


def _rows(target: Driver) -> int:
    step = target.schedule()
    target.answer(step)
    return int(step.batch.num_tokens)


def test_steps_follow_the_latest_number() -> None:
    target = _beside_a_decode()
    target.add(_request("long", 16_000))
    assert _rows(target) == 256
    target.scheduler.held_back.tell(6000)
    assert _rows(target) == 768, "three times the rows, for three times a crowd"
    target.scheduler.held_back.tell(0)
    assert _rows(target) == 256, "they have left, and no step is as long as for them"
    assert target.scheduler.abort("long") is not None
    target.scheduler.held_back.tell(10_000)
    assert _rows(target) == 1, "without a prompt here nobody's step is longer"
    target.add(_request("short", 500))
    target.scheduler.held_back.tell(0)
    assert _rows(target) == 128, "few rows beside decodes while few tokens wait"


def test_who_waits_for_memory_makes_no_step_longer() -> None:
    pool = GEOMETRY.held_bytes(17_000) + 2 * GEOMETRY.held_bytes(2000)
    target = _beside_a_decode(pool=pool)
    target.add(_request("long", 16_000), _request("next", 16_000))
    target.scheduler.held_back.tell(6000)
    assert _rows(target) == 256, "the next one does not fit, so those behind it would not either"


def test_what_is_likely_to_be_cached_is_not_counted() -> None:
    held_back = HeldBack()
    held_back.tell(10_000)
    assert held_back.rows == 10_000, "nothing is known of what is cached"
    held_back.admitted(1000, 0)
    assert held_back.rows == 10_000
    held_back.admitted(1000, 1000)
    assert held_back.rows == pytest.approx(5000, rel=0.01), "half of 2,000 tokens had to be computed"
    held_back.admitted(200_000, 200_000)
    assert held_back.rows == 0, "of recent prompts all were cached"
    held_back.admitted(70_000, 0)
    assert held_back.rows == 10_000
