"""Rows of an image are computed in one step: who makes room for them, who never waits, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from scheduled import Driver, Step
from stamped_device import StampedModel

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.ranks.messages import decode_batch, encode_batch
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

HIDDEN = 4
GEOMETRY = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL)).geometry(
    window=16, global_tokens=8, sliding_tokens=4, global_row=2, sliding_row=3
)


def span(start: int, rows: int, *, mutual: bool = True) -> EmbeddedSpan:
    return EmbeddedSpan.of(start, np.full((rows, HIDDEN), start, dtype=np.float32), mutual=mutual)


def request(name: str, prompt: int, *spans: EmbeddedSpan, answer: int = 40) -> Request:
    return Request(name, [3] * prompt, SamplingParams(seed=0, max_tokens=answer, ignore_eos=True), spans=spans)


def driver(most: int, *, mixed: int = 16, seqs: int = 8) -> Driver:
    limits = SchedulerLimits(most, seqs, 4096, (), max_num_mixed_tokens=mixed, hidden_size=HIDDEN)
    return Driver(Scheduler(limits, GEOMETRY, 1 << 20))


def chunks(steps: list[Step], name: str) -> list[tuple[int, int]]:
    return [(step[name].start, step[name].end) for step in steps if name in step.shares]


def run(scheduled: Driver, steps: int) -> list[Step]:
    done = []
    for _ in range(steps):
        done.append(scheduled.schedule())
        scheduled.answer(done[-1])
    return done


def test_a_chunk_ends_before_a_span_that_it_has_no_room_for() -> None:
    scheduled = driver(32)
    scheduled.add(request("a", 60, span(20, 30), span(52, 3, mutual=False)))
    first, second, third = run(scheduled, 3)
    assert [(s["a"].start, s["a"].end) for s in (first, second, third)] == [(0, 20), (20, 52), (52, 60)]
    parts = second.batch.spans
    assert [column.tolist() for column in parts] == [[0], [0], [20], [30], [49]]
    assert third.batch.spans.visible.tolist() == [-1], "its rows see what rows of tokens see"
    assert not third.batch.spans.mutual


def test_rows_that_see_no_others_may_be_cut() -> None:
    scheduled = driver(32)
    scheduled.add(request("a", 60, span(20, 30, mutual=False)))
    assert chunks(run(scheduled, 2), "a") == [(0, 32), (32, 60)]


def test_the_oldest_prompt_takes_the_room_from_younger_ones_and_no_decode_waits() -> None:
    scheduled = driver(64)
    scheduled.add(request("decodes", 4, answer=400))
    run(scheduled, 1)
    scheduled.add(request("old", 60, span(10, 40)), *(request(f"young{i}", 200) for i in range(3)))
    steps = run(scheduled, 8)
    assert all("decodes" in step.shares for step in steps)
    spanned = next(step for step in steps if len(step.batch.spans.segments))
    assert (spanned["old"].start, spanned["old"].end) == (10, 50)
    assert spanned.batch.num_tokens == 41, "it takes what others had, and makes the step no longer than that"
    assert chunks(steps, "old")[-3][0] > 0
    assert sum(end - start for start, end in chunks(steps, "young0")) > 0, "younger ones go on behind it"


def test_decodes_sit_out_one_step_for_a_span_of_a_whole_one_and_never_two() -> None:
    scheduled = driver(16, mixed=16)
    names = [f"d{i}" for i in range(4)]
    scheduled.add(*(request(name, 2, answer=400) for name in names))
    run(scheduled, 1)
    scheduled.add(request("image", 35, span(1, 16), span(17, 16)))
    steps = run(scheduled, 12)
    assert (1, 17) in chunks(steps, "image")
    assert (17, 33) in chunks(steps, "image")
    for name in names:
        missed = [i for i, step in enumerate(steps) if name not in step.shares]
        assert missed, "a step has no room for both"
        assert all(after - before > 1 for before, after in pairwise(missed))


def test_short_chunks_of_embeddings_stand_behind_segments_of_few_rows() -> None:
    """With drafts a segment of a few rows is attended to as a decode, where no row sees what is behind it."""
    limits = SchedulerLimits(64, 8, 4096, (), hidden_size=HIDDEN)
    scheduler = Scheduler(limits, GEOMETRY, 1 << 20, draft_tokens=2)
    scheduler.add(request("image", 3, span(0, 2)))
    scheduler.add(request("text", 3))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.slots.tolist() == [1, 0]
    assert (batch.decodes(3), batch.spans.segments.tolist()) == (1, [1])
    other = decode_batch(encode_batch(batch))
    assert [column.tolist() for column in other.spans] == [column.tolist() for column in batch.spans]
    (told,) = (each for each in other.admitted if each.request_id == "image")
    assert np.array_equal(told.spans[0].embeddings, np.zeros((2, HIDDEN), dtype=np.float32))


@pytest.mark.parametrize("seed", range(12))
def test_any_traffic_ends_and_cuts_no_span(seed: int) -> None:
    random = Random(seed)
    most = random.choice([8, 20, 64])
    scheduled = driver(most, mixed=random.choice([8, 16]), seqs=random.choice([2, 8]))
    requests: dict[str, Request] = {}
    for number in range(12):
        spans, at = [], random.randrange(6)
        for _ in range(random.randrange(4)):
            spans.append(span(at, random.randint(1, most), mutual=random.random() < 0.7))
            at = spans[-1].end + random.randrange(5)
        one = request(f"r{number}", at + random.randint(1, 20), *spans, answer=random.randint(1, 30))
        requests[one.request_id] = one
    waiting, steps = list(requests.values()), 0
    while waiting or scheduled.scheduler.has_requests:
        if waiting and random.random() < 0.5:
            scheduled.add(waiting.pop())
        step = scheduled.poll()
        if step is None:
            continue
        for name, share in step.shares.items():
            for each in requests[name].spans:
                assert not each.mutual or not each.start < share.end < each.end
        assert step.batch.num_tokens <= most
        scheduled.answer(step)
        steps += 1
        assert steps < 3000, "somebody waits for ever"


@pytest.mark.parametrize(("made", "message"), [
    (request("r", 99, span(4, 33)), r"has 33 rows that see each other .* a step has 32 \(maxNumBatchedTokens\); send"),
    (request("r", 9, span(4, 5)), r"before the prompt's last token, at 8"),
    (request("r", 30, span(9, 3), span(11, 3)), r"behind the span before it, which ends at 12"),
    (request("r", 30, EmbeddedSpan.of(3, np.zeros((2, 5), np.float32), mutual=True)), r"shape \[2, 5\].*\[rows, 4\]"),
    (request("r", 30, EmbeddedSpan.of(3, np.zeros((2, 4), np.float64), mutual=True)), r"embeddings of float64"),
    (request("r", 30, EmbeddedSpan(3, np.zeros((2, 4), np.float32), b"", mutual=True)), r"a key of 0 bytes"),
    (Request("r", [3] * 9, SamplingParams(seed=0, max_tokens=1), adapter="f00d"), r"'f00d' is not loaded; load it"),
])  # fmt: skip
def test_what_could_never_run_is_refused_and_hurts_nobody(made: Request, message: str) -> None:
    scheduled = driver(32)
    scheduled.add(request("other", 40, span(4, 32)))
    with pytest.raises(InvalidInput, match=message):
        scheduled.add(made)
    assert chunks(run(scheduled, 3), "other") == [(0, 4), (4, 36), (36, 40)]
