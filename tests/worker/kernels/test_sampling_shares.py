"""Rows sampled by candidates from shares of their logits: bit for bit the tokens of the whole row, and of its sort."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from modelserve.sizing.activation import TOP_K_CAPACITY
from modelserve_worker.batch import NOT_A_NUMBER, AdmittedRequest
from modelserve_worker.kernels.sampling.sampling import (
    Adjustments,
    PlainSampling,
    SampledRows,
    SamplingBackend,
)
from modelserve_worker.kernels.sampling.sampling_triton import TritonSampling
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampling_slots import SamplingSlots

pytestmark = pytest.mark.drawn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAP = 30.0
EOS = (1, 7)
BACKENDS = {"kernels": TritonSampling(chunk=128), "reference": PlainSampling()}
KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 1.7},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(250, 256))},  # bans in two shares
    {"min_tokens": 9, "stop_token_ids": (150, 149)},
    {"top_k": 1},
    {"top_k": 5, "temperature": 0.3},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 64, "top_p": 0.5, "min_p": 0.05},
    {"top_k": TOP_K_CAPACITY, "min_p": 0.01},
    {"top_k": TOP_K_CAPACITY, "top_p": 0.95, "temperature": 1.5},
)


def _rows(
    kinds: Sequence[dict[str, object]],
    vocab_size: int,
    *,
    cap: float | None = CAP,
    masks: np.ndarray | None = None,
    mask_rows: np.ndarray | None = None,
) -> SampledRows:
    """Row i of kinds[i], in slot len(kinds) - 1 - i."""
    count = len(kinds)
    slots = SamplingSlots(max_num_seqs=count, vocab_size=vocab_size, device=DEVICE)
    taken = np.arange(count, dtype=np.int32)[::-1].copy()
    params = [SamplingParams(seed=31 * row, max_tokens=9, **kind) for row, kind in enumerate(kinds)]
    slots.admit(
        [AdmittedRequest(int(s), "", p, (), (), (*EOS, *p.stop_token_ids)) for s, p in zip(taken, params, strict=True)]
    )
    paths = slots.paths(taken)
    assert not paths.filtered.any()
    seen = torch.zeros(count, vocab_size, dtype=torch.int32, device=DEVICE)
    return SampledRows(
        slots=torch.from_numpy(taken).to(DEVICE),
        positions=torch.arange(100, 100 + count, dtype=torch.int32, device=DEVICE),
        output_counts=torch.full((count,), 4, dtype=torch.int32, device=DEVICE),
        columns=slots.device,
        width=paths.width,
        softcap=cap,
        adjustments=Adjustments(seen, slots.lists) if paths.adjusted else None,
        masks=None if masks is None else torch.from_numpy(masks).to(DEVICE),
        mask_rows=None if mask_rows is None else torch.from_numpy(mask_rows).to(DEVICE),
    )


def _whole(backend: SamplingBackend, logits: torch.Tensor, rows: SampledRows) -> list[int]:
    return backend.draw(backend.select(logits, rows, first_token=0), rows).tolist()


def _shared(backend: SamplingBackend, logits: torch.Tensor, rows: SampledRows, edges: list[int]) -> list[int]:
    """Shares selected and merged apart, then drawn from together, as ranks do."""
    merged = []
    for start, stop in itertools.pairwise(edges):
        share = logits[:, start:stop].contiguous()
        merged.append(backend.merge(backend.select(share, rows, first_token=start), rows))
        assert merged[-1].shape == (len(logits), rows.width)
    return backend.draw(torch.stack(merged, dim=1), rows).tolist()


def _edges(vocab_size: int, shares: int) -> list[int]:
    return [vocab_size * each // shares for each in range(shares + 1)]


def _hard_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> torch.Tensor:
    """Every other row has few different values, so that equals lie across all edges; some rows have next to nothing."""
    logits = torch.from_numpy(rng.standard_normal((rows, vocab_size)) * rng.choice([1.0, 6.0, 40.0], (rows, 1)))
    logits[::2] = logits[::2].round()
    nothing = rng.permutation(rows)[:4].tolist()
    logits[nothing[:3]] = -torch.inf
    logits[nothing[1], rng.integers(0, vocab_size)] = 2.0
    logits[nothing[2], rng.integers(0, vocab_size, 9)] = 1.0
    logits[nothing[3], rng.integers(0, vocab_size)] = torch.inf
    return logits.to(DEVICE, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter: inf - inf, not used
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("vocab_size", "shares", "cap"),
    [(512, 2, CAP), (500, 4, None)],  # whole chunks; chunks that are part full, and have less than the largest top-k
)
def test_shares_apart_and_merged_give_the_tokens_of_the_whole(name, vocab_size, shares, cap) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    kinds = [*KINDS, *KINDS[::3]]
    count = len(kinds)
    logits = _hard_logits(rng, count, vocab_size)
    bits = rng.random((count, -(-vocab_size // 32) * 32)) < rng.choice([0.5, 0.05], (count, 1))
    bits[:, 33] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    mask_rows = np.where(rng.random(count) < 0.4, rng.permutation(count), -1).astype(np.int32)
    rows = _rows(kinds, vocab_size, cap=cap, masks=words, mask_rows=mask_rows)
    edges, backend = _edges(vocab_size, shares), BACKENDS[name]
    whole = _whole(backend, logits, rows)
    for row, token in enumerate(whole):
        allowed = bits[mask_rows[row], :vocab_size]
        possible = cap is not None or (logits[row, allowed.nonzero()[0]] > -torch.inf).any()
        assert allowed[token] or mask_rows[row] < 0 or not possible, f"seed {seed}: row {row}"
    if name == "kernels":  # which add noise that the interpreter rounds in its own way
        greedy = [row for row, kind in enumerate(kinds) if kind.get("temperature") == 0]
        reference = _whole(BACKENDS["reference"], logits, rows)
        assert [whole[row] for row in greedy] == [reference[row] for row in greedy], f"seed {seed}"
    broken = rng.permutation(count)[:shares].tolist()
    assert _shared(backend, logits, rows, edges) == whole, f"seed {seed}"
    for share, row in enumerate(broken):
        logits[row, edges[share] if row % 2 else edges[share + 1] - 1] = torch.nan
    after = _shared(backend, logits, rows, edges)
    assert after == [NOT_A_NUMBER if row in broken else token for row, token in enumerate(whole)], f"seed {seed}"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_on_both_sides_of_an_edge_fall_to_the_lowest_ids(name) -> None:
    """Two shares of 120: tokens 119 and 120 are equal, and so is 20, or the share below has none."""
    kinds = [{"temperature": 0.0}, {"top_k": 1}, *[{"top_k": 2}] * 4]
    rows = _rows(kinds, 240, cap=None)
    logits = torch.empty((len(kinds), 240), dtype=torch.bfloat16, device=DEVICE)
    for equals in ([119, 120, 239], [20, 119, 120], [120, 121, 122]):
        logits.fill_(-torch.inf)[:, equals] = 4.0
        tokens = _shared(BACKENDS[name], logits, rows, _edges(240, 2))
        assert tokens[:2] == equals[:1] * 2
        assert set(tokens[2:]) <= set(equals[:2])
    assert _shared(BACKENDS[name], logits.fill_(-torch.inf), rows, _edges(240, 2)) == [0] * len(kinds)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", BACKENDS)
def test_candidates_draw_what_the_whole_row_draws(name) -> None:
    """Bit for bit: neither path changes what a seed says, or what is kept of equals."""
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    kinds = [kind for kind in KINDS if kind.get("temperature") != 0] * 4
    rows, logits = _rows(kinds, 700), _hard_logits(rng, len(kinds), 700)
    backend, places = BACKENDS[name], torch.arange(len(kinds), device=DEVICE)
    whole = backend.draw_filtered(logits, rows, places).tolist()
    assert _whole(backend, logits, rows) == whole, f"seed {seed}"
    assert _shared(backend, logits, rows, _edges(700, 4)) == whole, f"seed {seed}"
    some = torch.from_numpy(rng.permutation(len(kinds))[:5].copy()).to(DEVICE)
    assert backend.draw_filtered(logits, rows.some(some), some).tolist() == [whole[row] for row in some.tolist()]
