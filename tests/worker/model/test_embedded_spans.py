"""Prompts with rows of embeddings say what transformers says, however they are cut and whatever is beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from model_checkpoints import VARIANTS, WINDOW, load_checkpoint, random_tokens, read_architecture
from paged_logits import Forced, Traffic, geometry_of, replay
from span_reference import prompt_of, random_span, spanned_logits
from torch import Tensor

from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.kernels.operations import PLAIN_EXACT

pytestmark = pytest.mark.drawn

TOLERANCE = 1e-4
LENGTH = 100
TRAINED = Path(__file__).parents[2] / "models"

Checkpoint = Callable[[str], Path]


@cache
def spans_of(directory: Path) -> tuple[EmbeddedSpan, ...]:
    """Less than a window, more than three, rows that see what tokens see, and one alone."""
    hidden = read_architecture(directory).hidden_size
    places = ((3, WINDOW - 2, True), (20, 3 * WINDOW + 1, True), (50, 14, False), (70, 1, True))
    return tuple(
        random_span(start, rows, hidden=hidden, seed=i, mutual=mutual) for i, (start, rows, mutual) in enumerate(places)
    )


@cache
def expected(directory: Path, *, vocab_size: int = 256) -> tuple[tuple[int, ...], Tensor]:
    tokens = prompt_of(LENGTH, spans_of(directory), seed=5, vocab_size=vocab_size)
    return tokens, spanned_logits(directory, tokens, spans_of(directory))[: LENGTH - 1]


def spanned(directory: Path, **changes: int) -> Forced:
    return replace(Forced(expected(directory)[0], LENGTH - 4, spans=spans_of(directory)), **changes)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [28, 33, 512])
def test_one_prompt_in_chunks(variant: str, chunk: int, checkpoint: Checkpoint) -> None:
    """The longest span fills the shortest chunk."""
    directory = checkpoint(variant)
    done = replay(load_checkpoint(directory), Traffic((spanned(directory),), chunk=chunk))
    assert float((done.logits[0] - expected(directory)[1]).abs().max()) <= TOLERANCE


def test_the_comparison_notices_what_it_must(checkpoint: Checkpoint) -> None:
    """Other embeddings, and rows that see no further than tokens do."""
    directory = checkpoint("31B")
    tokens, logits = expected(directory)
    for spans in (
        tuple(replace(span, mutual=False) for span in spans_of(directory)),
        (replace(spans_of(directory)[0], embeddings=spans_of(directory)[0].embeddings + 0.1), *spans_of(directory)[1:]),
    ):
        done = replay(load_checkpoint(directory), Traffic((Forced(tokens, LENGTH - 1, spans=spans),)))
        assert float((done.logits[0] - logits).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["gemma4-tiny-keqv", "gemma4-tiny-ple"])
def test_trained_checkpoints(name: str) -> None:
    directory = TRAINED / name
    tokens, logits = expected(directory, vocab_size=200)
    traffic = Traffic((Forced(tokens, LENGTH - 4, spans=spans_of(directory)),), chunk=40)
    done = replay(load_checkpoint(directory), traffic)
    assert float((done.logits[0] - logits).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("variant", ["E4B", "26B-A4B", "31B"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_text_beside_it_has_the_bits_that_it_has_beside_text(
    variant: str, steps_in_flight: int, checkpoint: Checkpoint
) -> None:
    """In the same steps: the same request, but of tokens, is cut where its spans would be."""
    directory = checkpoint(variant)
    model, with_spans = load_checkpoint(directory), spanned(directory, arrives=1)
    others = tuple(
        Forced(tuple(random_tokens(length, seed=length)), length // 2, arrives=i)
        for i, length in enumerate((40, 7, 90))
    )
    done = [
        replay(model, Traffic((*others, one), chunk=64, steps_in_flight=steps_in_flight), audited=True)
        for one in (
            with_spans,
            replace(with_spans, spans=tuple(replace(s, embeddings=0 * s.embeddings) for s in with_spans.spans)),
        )
    ]
    for first, second in zip(done[0].logits[:-1], done[1].logits[:-1], strict=True):
        assert torch.equal(first, second)
    assert float((done[0].logits[-1] - expected(directory)[1]).abs().max()) <= TOLERANCE


def test_preempted_and_recomputed(checkpoint: Checkpoint) -> None:
    """An older request takes the last page; the spans are computed again, from the same embeddings."""
    directory = checkpoint("31B")
    model, spans = load_checkpoint(directory), spans_of(directory)[:2]
    old = Forced(tuple(random_tokens(140, seed=1)), 60)
    young = Forced(prompt_of(140, spans, seed=6), 52, arrives=1, spans=spans)
    geometry = geometry_of(model)
    pool = 2 * (geometry.held_bytes(140) - geometry.global_page.page_bytes)
    done = replay(model, Traffic((old, young), chunk=40, pool_bytes=pool), audited=True)
    assert done.preemptions > 0
    wanted = spanned_logits(directory, young.token_ids, spans)[:139]
    assert float((done.logits[1] - wanted).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_exact_rows_do_not_know_their_chunks_or_company(variant: str, checkpoint: Checkpoint) -> None:
    directory = checkpoint(variant)
    model = load_checkpoint(directory, operations=PLAIN_EXACT)
    other = Forced(tuple(random_tokens(61, seed=2)), 50)
    alone = replay(model, Traffic((spanned(directory),))).logits[0]
    assert float((alone - expected(directory)[1]).abs().max()) <= TOLERANCE
    for chunk in (28, 45):
        beside = replay(model, Traffic((other, spanned(directory, arrives=1)), chunk=chunk)).logits[1]
        assert torch.equal(beside, alone)
