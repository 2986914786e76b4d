"""Layers that share another's cache compute the last row of each request only, and nothing else comes out of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checkpoints import WINDOW, random_tokens
from paged_logits import Forced, Traffic, geometry_of, replay, scarce, sequences
from test_paged_logits import TOLERANCE, expected, model_of

from modelserve_worker.layers.mlp import GatedMLP

SHARING = ("E4B", "E2B")

Checkpoint = Callable[[str], Path]


def check(directory: Path, traffic: Traffic) -> None:
    done = replay(model_of(directory), traffic, narrowed=True)
    assert done.largest_disagreement <= TOLERANCE
    for forced, positions, rows in zip(traffic.requests, done.positions, done.logits, strict=True):
        wanted = expected(directory, forced.token_ids)[positions]
        assert positions[-1] == len(forced.token_ids) - 2, "every sampled position was computed"
        assert float((rows - wanted).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("variant", SHARING)
@pytest.mark.parametrize("chunk", [2, 31, WINDOW - 1, WINDOW, WINDOW + 1, 97, 512])
def test_one_prompt_in_chunks(variant: str, chunk: int, checkpoint: Checkpoint) -> None:
    """The last row of every chunk, which reads a whole window, and the decodes after the prompt."""
    ids = tuple(random_tokens(200, seed=4))
    check(checkpoint(variant), Traffic((Forced(ids, len(ids) - 40),), chunk=chunk))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_company_chunk_and_pool(data: st.DataObject, checkpoint: Checkpoint) -> None:
    """Mixed steps, unequal lengths, preemption, two steps in flight; rows are stamped and reads checked."""
    directory = checkpoint(data.draw(st.sampled_from(SHARING), label="variant"))
    forced = st.sampled_from(sequences()).flatmap(
        lambda ids: st.builds(Forced, st.just(ids), st.integers(1, len(ids) - 1), st.integers(0, 12))
    )
    requests = tuple(data.draw(st.lists(forced, min_size=1, max_size=6), label="requests"))
    least = max(geometry_of(model_of(directory)).held_bytes(len(r.token_ids)) for r in requests)
    traffic = Traffic(
        requests,
        chunk=data.draw(st.integers(2, 80), label="chunk"),
        max_num_seqs=data.draw(st.integers(1, 6), label="max_num_seqs"),
        steps_in_flight=data.draw(st.integers(1, 2), label="steps in flight"),
        pool_bytes=least + data.draw(st.integers(0, 2 * least), label="spare bytes") // 128 * 128,
    )
    check(directory, traffic)


@pytest.mark.parametrize("variant", SHARING)
def test_preempted_and_recomputed(variant: str, checkpoint: Checkpoint) -> None:
    check(checkpoint(variant), scarce(model_of(checkpoint(variant))))


@pytest.mark.parametrize("variant", ["E4B", "31B"])
def test_layers_without_a_cache_see_a_row_per_request(variant: str, checkpoint: Checkpoint, monkeypatch) -> None:
    """And those with one see all rows, as do all layers of a model whose layers own theirs."""
    model = model_of(checkpoint(variant))
    seen: list[int] = []
    forward = GatedMLP.forward
    monkeypatch.setattr(GatedMLP, "forward", lambda mlp, x: seen.append(len(x)) or forward(mlp, x))
    ids = tuple(random_tokens(100, seed=2))
    replay(model, Traffic((Forced(ids, 99), Forced(ids, 99)), chunk=200), narrowed=variant == "E4B", audited=False)
    layers, owners = model.architecture.num_hidden_layers, model.architecture.first_shared_layer
    assert seen == [198] * owners + [2] * (layers - owners)
