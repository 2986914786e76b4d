"""Logits behind rows that another request computed are those of a request that computed them itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paged_logits import Traffic, expected, geometry_of, model_of, replay, session
from torch import Tensor

from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.scheduling.prefix import block_prefixes

pytestmark = pytest.mark.drawn

TOLERANCE = 1e-4

Checkpoint = Callable[[str], Path]


def largest_difference(directory: Path, traffic: Traffic, logits: list[Tensor], positions: list[list[int]]) -> float:
    worst = 0.0
    for forced, rows, at in zip(traffic.requests, logits, positions, strict=True):
        assert at[-1] == len(forced.token_ids) - 2
        worst = max(worst, float((rows - expected(directory, forced.token_ids)[at]).abs().max()))
    return worst


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_a_hit_says_what_the_reference_says(variant: str, checkpoint: Checkpoint) -> None:
    directory = checkpoint(variant)
    traffic = session(chunk=64)
    done = replay(model_of(directory), traffic)
    assert largest_difference(directory, traffic, done.logits, done.positions) <= TOLERANCE
    computed = [at[0] for at in done.positions]
    # The window is 9 rows: a prefix serves the 64 positions before it and what else its pages hold.
    assert computed[:6] == [0, 199, 229, 199, 189, 136]
    assert computed[6] < 100, "no prefix yet where they part"
    assert computed[7:] == [100, 100], "at the prefix of the second one's prompt"


def test_the_audit_sees_rows_of_other_tokens(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that thinks all prompts alike."""
    alike = block_prefixes.elements
    monkeypatch.setattr(block_prefixes, "elements", lambda *given: np.zeros_like(alike(*given)))
    with pytest.raises(AssertionError, match=r"read \d+ rows and may read positions"):
        replay(model_of(checkpoint("31B")), session(chunk=64))


@pytest.mark.parametrize("variant", ["31B", "E4B"])
def test_a_crowd_in_a_small_pool_shares_moves_and_loses_its_rows_and_says_the_same(
    variant: str, checkpoint: Checkpoint
) -> None:
    """While the first is still prefilled, preempted and evicted; every read is audited."""
    directory = checkpoint(variant)
    geometry = geometry_of(model_of(directory))
    traffic = replace(
        session(gap=2, chunk=24, max_num_seqs=4, steps_in_flight=2),
        pool_bytes=2 * geometry.held_bytes(250),
    )
    done = replay(model_of(directory), traffic)
    assert done.hits > 0
    assert largest_difference(directory, traffic, done.logits, done.positions) <= TOLERANCE
    assert done.largest_disagreement <= TOLERANCE


@pytest.mark.parametrize(("variant", "dtype"), [("31B", KVCacheDtype.FP8_E4M3), ("E4B", KVCacheDtype.INT8)])
def test_with_8_bits_a_hit_is_within_the_distance_of_another_chunking(
    variant: str, dtype: KVCacheDtype, checkpoint: Checkpoint
) -> None:
    """Both readers of a chunk's rows see them as they are stored, so a hit reads what a cold request reads; where a row
    falls between two stored values, another chunking takes the other one as well."""
    model = model_of(checkpoint(variant))
    geometry = geometry_of(model, dtype=dtype)
    cold = [
        replay(model, replace(session(chunk=chunk), prefix_caching=False), geometry=geometry, audited=False)
        for chunk in (64, 17)
    ]
    warm = replay(model, session(chunk=64), geometry=geometry)
    assert warm.hits > 1000
    distance = difference = 0.0
    for i, (rows, at) in enumerate(zip(warm.logits, warm.positions, strict=True)):
        distance = max(distance, *(float((cold[0].logits[i] - other.logits[i]).abs().max()) for other in cold[1:]))
        difference = max(difference, float((rows - cold[0].logits[i][at]).abs().max()))
    assert difference <= max(2 * distance, TOLERANCE)
