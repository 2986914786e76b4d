"""Once the last cache has its rows of a step, each request's last row goes on alone, and nothing else comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checkpoints import WINDOW, make_checkpoint, random_tokens
from paged_logits import Forced, Traffic, geometry_of, replay, scarce, sequences
from test_paged_logits import TOLERANCE, expected, model_of

from modelserve.model.architecture import LayerKind
from modelserve_worker.layers.mlp import GatedMLP

pytestmark = pytest.mark.drawn

# The last layer with a cache of its own is global, of K and V or of V alone, before layers that share it or none.
VARIANTS = ("E4B", "E2B", "31B", "26B-A4B")

Checkpoint = Callable[[str], Path]


def check(directory: Path, traffic: Traffic) -> None:
    done = replay(model_of(directory), traffic, narrowed=True)
    assert done.largest_disagreement <= TOLERANCE
    for forced, positions, rows in zip(traffic.requests, done.positions, done.logits, strict=True):
        wanted = expected(directory, forced.token_ids)[positions]
        assert positions[-1] == len(forced.token_ids) - 2, "every sampled position was computed"
        assert float((rows - wanted).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [2, 31, WINDOW - 1, WINDOW, WINDOW + 1, 97, 512])
def test_one_prompt_in_chunks(variant: str, chunk: int, checkpoint: Checkpoint) -> None:
    """The last row of every chunk, which reads a whole window, and the decodes after the prompt."""
    ids = tuple(random_tokens(200, seed=4))
    check(checkpoint(variant), Traffic((Forced(ids, len(ids) - 40),), chunk=chunk))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_company_chunk_and_pool(data: st.DataObject, checkpoint: Checkpoint) -> None:
    """Mixed steps, unequal lengths, preemption, two steps in flight; rows are stamped and reads checked."""
    directory = checkpoint(data.draw(st.sampled_from(VARIANTS), label="variant"))
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


def test_the_last_cache_may_be_a_sliding_layer_s(tmp_path: Path) -> None:
    """Its rows and those of layers before, which others share, are in pages before one row of each request is read."""
    make_checkpoint("E4B", tmp_path, seed=8, num_kv_shared_layers=3)
    assert model_of(tmp_path).architecture.kind(4) is LayerKind.SLIDING
    for chunk in (2, 31, WINDOW + 1, 512):
        check(tmp_path, Traffic((Forced(tuple(random_tokens(150, seed=4)), 110),), chunk=chunk))


@pytest.mark.parametrize("variant", VARIANTS)
def test_preempted_and_recomputed(variant: str, checkpoint: Checkpoint) -> None:
    check(checkpoint(variant), scarce(model_of(checkpoint(variant))))


@pytest.mark.parametrize("variant", ["E4B", "31B"])
@pytest.mark.parametrize("narrowed", [True, False])
def test_a_row_per_request_goes_on_from_the_last_cache(variant: str, narrowed: bool, checkpoint: Checkpoint) -> None:
    """And layers before see all rows, as do all layers where prompts are scored."""
    model = model_of(checkpoint(variant))
    seen: list[int] = []
    for mlp in (each for each in model.modules() if isinstance(each, GatedMLP)):
        mlp.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    ids = tuple(random_tokens(100, seed=2))
    replay(model, Traffic((Forced(ids, 99), Forced(ids, 99)), chunk=200), narrowed=narrowed, audited=False)
    layers, whole = model.architecture.num_hidden_layers, model.architecture.first_shared_layer - 1
    assert seen == ([198] * whole + [2] * (layers - whole) if narrowed else [198] * layers)
