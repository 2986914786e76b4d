"""The number that sizing promises is the number that runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from stamped_device import StampedModel

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import SampledTokens
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import Admission, SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

S, G = LayerKind.SLIDING, LayerKind.GLOBAL


@given(
    window=st.integers(1, 12),
    tokens=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    rows=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    length=st.integers(2, 40),
    prompt=st.integers(1, 40),
    fits=st.integers(1, 5),
    slack=st.integers(0, 99),
    overload=st.booleans(),
)
def test_requests_of_known_length_run_together_exactly_when_sizing_says(
    window: int, tokens: tuple[int, int], rows: tuple[int, int], length: int, prompt: int, fits: int, slack: int,
    overload: bool,
) -> None:  # fmt: skip
    """`length` positions each, all of which end in the cache; the answer's last token needs no row."""
    geometry = StampedModel((S, G)).geometry(
        window=window, global_tokens=tokens[0], sliding_tokens=tokens[1], global_row=rows[0], sliding_row=rows[1]
    )
    prompt = min(prompt, length)
    pool = geometry.held_bytes(length) * (100 * fits + slack) // 100
    assert geometry.requests(pool, length) == fits
    count = fits + overload
    scheduler = Scheduler(SchedulerLimits(1000, count, length + 1, ()), geometry, pool)
    for i in range(count):
        sampling = SamplingParams(seed=0, max_tokens=length + 1 - prompt)
        scheduler.add(Request(f"r{i}", (5,) * prompt, sampling))
    together = True
    while batch := scheduler.schedule():
        together &= batch.num_requests == count
        scheduler.update(SampledTokens(batch.step, np.full(batch.drawn.sum(), 5, dtype=np.int32), {}))
    assert not scheduler.has_requests
    assert (together and not scheduler.stats().preemptions_total) == (not overload)


@given(
    window=st.integers(1, 12),
    tokens=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    rows=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    kinds=st.sampled_from([(S, G), (S,), (G,)]),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=5),
)
def test_the_growth_kept_for_many_is_the_sum_of_what_is_kept_for_each(
    window: int, tokens: tuple[int, int], rows: tuple[int, int], kinds: tuple[LayerKind, ...],
    requests: list[tuple[int, int]],
) -> None:  # fmt: skip
    geometry = StampedModel(kinds).geometry(
        window=window, global_tokens=tokens[0], sliding_tokens=tokens[1], global_row=rows[0], sliding_row=rows[1]
    )
    limits = SchedulerLimits(1000, 5, 1000, ())
    admission = Admission(limits, geometry, 10**9)
    queue = [Request("r", (5,) * prompt, SamplingParams(seed=0, max_tokens=most)) for prompt, most in requests]
    known = np.array([request.num_tokens for request in queue], dtype=np.int32)
    most = np.array([limits.most_cached_tokens(request) for request in queue], dtype=np.int32)
    held = np.array([geometry.held_bytes(request.num_tokens) for request in queue], dtype=np.int64)
    expected = sum(
        max(0, admission.committed_bytes(request) - geometry.held_bytes(request.num_tokens)) for request in queue
    )
    assert admission.growth_bytes(known, most, held) == expected
