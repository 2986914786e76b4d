"""Rows of images are found again by their keys: never one image's for another's, whose placeholders are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_checkpoints import load_checkpoint
from paged_logits import Forced, Traffic, replay
from span_reference import prompt_of, random_span, spanned_logits

from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.prefix.token_chain import TokenChain

LENGTH, PAGE = 220, 64


def image(start: int, rows: int, *, seed: int) -> EmbeddedSpan:
    return random_span(start, rows, hidden=64, seed=seed)


@pytest.mark.parametrize("host_bytes", [0, 1 << 24])
def test_only_rows_of_the_same_images_are_read_again(host_bytes: int, checkpoint: Callable[[str], Path]) -> None:
    """An image in the middle of a page, of more than a window, and one across two pages."""
    directory = checkpoint("31B")
    first, second = image(70, 30, seed=1), image(170, 40, seed=2)
    tokens = prompt_of(LENGTH, (first, second), seed=3)
    others = {
        "the same": (first, second),
        "another second": (first, image(170, 40, seed=4)),
        "another first": (image(70, 30, seed=5), second),
        "rows that see as tokens do": (replace(first, mutual=False), second),
        "no image": (),
    }
    requests = [
        Forced(tokens, 215, arrives=40 * i, spans=spans) for i, spans in enumerate([(first, second), *others.values()])
    ]
    traffic = Traffic(tuple(requests), chunk=64, prefix_caching=True, host_bytes=host_bytes)
    done = replay(load_checkpoint(directory), traffic, audited=True)
    hits = {name: min(done.positions[i]) for i, name in enumerate(others, 1)}
    assert hits["the same"] > 200
    assert 64 < hits["another second"] <= 170
    assert max(hits[name] for name in ("another first", "rows that see as tokens do", "no image")) <= 70
    for forced, positions, logits in zip(requests, done.positions, done.logits, strict=True):
        wanted = spanned_logits(directory, tokens, forced.spans)[positions]
        assert float((logits - wanted).abs().max()) <= 1e-4


def chain(*spans: EmbeddedSpan, adapter: int = 0) -> TokenChain:
    request = Request("r", [7] * LENGTH, SamplingParams(seed=0, max_tokens=1), spans=spans, adapter=adapter)
    return TokenChain(request.cache_namespace, request.prompt_token_ids, PAGE, request.spans)


def test_hashes_have_the_keys_of_their_pages_images_and_of_those_before() -> None:
    """Of placeholders alone, all alike."""
    one, other = chain(image(100, 50, seed=1)), chain(image(100, 50, seed=2))
    assert one.digest(1) == other.digest(1) == chain().digest(1)
    for pages in (2, 3):
        assert len({one.digest(pages), other.digest(pages), chain().digest(pages)}) == 3
    assert chain(image(100, 50, seed=1)).digest(3) == one.digest(3)
    rows = image(100, 50, seed=1)
    for changed in (replace(rows, start=101), replace(rows, mutual=False), image(100, 49, seed=1)):
        assert chain(changed).digest(2) != one.digest(2)
    assert chain(adapter=1).digest(0) != chain().digest(0)


def test_a_key_is_of_the_embeddings() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    key = EmbeddedSpan.of(0, rows, mutual=True).key
    assert EmbeddedSpan.of(9, rows.copy(), mutual=False).key == key
    assert EmbeddedSpan.of(0, rows + np.float32(1e-3), mutual=True).key != key
