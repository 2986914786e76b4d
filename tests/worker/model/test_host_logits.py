"""Rows that have come back from host memory are those that went there: logits, and every read audited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from model_checkpoints import random_tokens
from paged_logits import Forced, Traffic, geometry_of, replay
from test_prefix_logits import TOLERANCE, largest_difference, model_of

from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.scheduling.tiers.pool_target import PoolTarget

Checkpoint = Callable[[str], Path]


PROMPT = 330


def evicting(model: Gemma4ForCausalLM, dtype: KVCacheDtype = KVCacheDtype.FLOAT32) -> Traffic:
    """Two sessions by turns, in a pool that has room for one of them, before host memory for both: the same prompt, one
    that parts 11 tokens before its end, and the next turn."""
    requests: list[Forced] = []
    texts = [tuple(random_tokens(PROMPT + 12, seed=seed)) for seed in (1, 2)]
    for turn in range(3):
        for number, text in enumerate(texts):
            ids = (
                text,
                text[: PROMPT - 11] + tuple(random_tokens(20, seed=9)),
                text + tuple(random_tokens(20, seed=8)),
            )
            arrives = 60 * len(requests)
            requests.append(Forced(ids[turn], PROMPT + (0, 5, 22)[turn], kept_from=0, arrives=arrives + number))
    pool = int(1.2 * geometry_of(model, dtype=dtype).held_bytes(370)) // 128 * 128
    return Traffic(tuple(requests), chunk=64, prefix_caching=True, pool_bytes=pool, host_bytes=20 * pool)


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_rows_from_host_memory_say_what_the_reference_says(variant: str, checkpoint: Checkpoint) -> None:
    """Full and partial global pages, windows of sliding ones, and layers that share what others have stored."""
    directory = checkpoint(variant)
    traffic = evicting(model_of(directory))
    done = replay(model_of(directory), traffic)
    assert done.host_hits > 1000
    assert largest_difference(directory, traffic, done.logits, done.positions) <= TOLERANCE


@pytest.mark.parametrize(("variant", "dtype"), [("31B", KVCacheDtype.FP8_E4M3), ("E4B", KVCacheDtype.INT8)])
def test_with_8_bits_they_are_the_same_bytes(variant: str, dtype: KVCacheDtype, checkpoint: Checkpoint) -> None:
    """A hit from host memory says, bit for bit, what the same hit in a pool that loses nothing says."""
    model = model_of(checkpoint(variant))
    geometry = geometry_of(model, dtype=dtype)
    small = evicting(model, dtype)
    roomy = replay(model, replace(small, pool_bytes=50 * small.pool_bytes, host_bytes=0), geometry=geometry)
    done = replay(model, small, geometry=geometry)
    assert done.host_hits > 1000
    assert done.positions == roomy.positions
    assert all(mine.equal(theirs) for mine, theirs in zip(done.logits, roomy.logits, strict=True))


def test_the_audit_sees_pages_that_come_back_in_another_order(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = PoolTarget.receive

    def mixed(target: PoolTarget, source: object) -> object:
        arrival = honest(target, source)  # type: ignore[arg-type]
        if arrival is not None:
            arrival.path.reverse()
        return arrival

    monkeypatch.setattr(PoolTarget, "receive", mixed)
    with pytest.raises(AssertionError, match=r"read \d+ rows and may read positions"):
        replay(model_of(checkpoint("31B")), evicting(model_of(checkpoint("31B"))))
