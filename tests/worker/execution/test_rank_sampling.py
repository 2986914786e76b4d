"""Sampling by ranks that share the vocabulary: the tokens of one rank, and the same collectives on all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from model_checkpoints import make_checkpoint
from rank_logits import on_every_rank
from rank_sampling import BROKEN, BROKEN_ROW, FILTERED, KINDS, REPORTED, ROWS, VOCABULARY, sampled_tokens

from modelserve.sizing.activation import ROWS_PER_SORT, TOP_K_CAPACITY
from modelserve_worker.batch import NOT_A_NUMBER, AdmittedRequest
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampling_slots import SamplingSlots

STEPS = 6
EOS = tuple(range(3))


def _blocks(rows: int) -> list[int]:
    return [min(ROWS_PER_SORT, rows - first) for first in range(0, rows, ROWS_PER_SORT)]


def test_two_ranks_sample_what_one_samples_and_gather_no_more_than_rows_need(tmp_path: Path) -> None:
    """Real processes over a small model; in one step a row of the last rank's share alone holds a NaN."""
    make_checkpoint("31B", tmp_path / "model", seed=6, vocab_size=VOCABULARY)
    ranks = on_every_rank(partial(sampled_tokens, tmp_path / "model", STEPS), size=2, scratch=tmp_path)
    (tokens, alone, scores, scores_alone, shapes), *others = ranks
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], other, strict=True)), "ranks disagree"
    assert tokens.shape == (STEPS, ROWS)
    assert torch.equal(tokens, alone)
    assert torch.equal(scores, scores_alone)
    broken = (tokens == NOT_A_NUMBER).nonzero().tolist()
    assert broken == [[BROKEN, BROKEN_ROW]], "the row that held a NaN, and no other"
    counts = np.bincount(np.arange(ROWS) % len(KINDS), minlength=len(KINDS))
    logits = _blocks(int(counts[list(FILTERED)].sum())) + _blocks(int(counts[list(REPORTED)].sum()))
    per_step = [[ROWS, 64], *([rows, VOCABULARY // 2] for rows in logits)]
    assert shapes.tolist() == per_step * STEPS


@pytest.mark.parametrize(
    ("changes", "filtered", "width", "adjusted"),
    [
        ({"temperature": 0.0}, False, 1, False),
        ({"temperature": 0.0, "top_k": 300, "top_p": 0.5}, False, 1, False),
        ({}, False, 1, False),
        ({"top_k": 400}, False, 1, False),  # the whole vocabulary
        ({"top_k": 7, "top_p": 0.9, "min_p": 0.1}, False, 7, False),
        ({"top_k": TOP_K_CAPACITY}, False, TOP_K_CAPACITY, False),
        ({"top_k": TOP_K_CAPACITY + 1}, True, 0, False),
        ({"top_p": 0.9}, True, 0, False),
        ({"min_p": 0.1}, True, 0, False),
        ({"top_k": 7, "frequency_penalty": 0.1}, False, 7, True),
        ({"top_p": 0.9, "frequency_penalty": 0.1}, True, 0, True),
        ({"logit_bias": ((3, 1.0),)}, False, 1, True),
        ({"logit_bias": ((400, 1.0),)}, False, 1, False),  # of no token
        ({"min_tokens": 5, "stop_token_ids": tuple(range(7, 263))}, False, 1, True),
        ({"min_tokens": 0, "stop_token_ids": (7, 8, 9, 10, 11, 12)}, False, 1, False),
        ({"top_k": 9, "logprobs": 2}, False, 9, False),
    ],
)
def test_a_rows_path_follows_from_its_parameters(changes, filtered, width, adjusted) -> None:
    slots = SamplingSlots(max_num_seqs=3, vocab_size=400, device=torch.device("cpu"))
    params = SamplingParams(seed=1, max_tokens=9, **changes)
    greedy = SamplingParams(seed=1, max_tokens=9, temperature=0.0)
    banned = (*EOS, *params.stop_token_ids)
    slots.admit([AdmittedRequest(2, "a", params, (), (), banned), AdmittedRequest(1, "b", greedy, (), ())])
    alone = slots.paths(np.array([2], dtype=np.int32))
    assert (alone.filtered.tolist(), alone.width, alone.adjusted) == ([filtered], width, adjusted)
    assert alone.penalised.tolist() == ["frequency_penalty" in changes]
    assert alone.reported.tolist() == [changes.get("logprobs", -1)]
    both = slots.paths(np.array([1, 2], dtype=np.int32))
    assert (both.filtered.tolist(), both.width) == ([False, filtered], max(1, width)), (
        "nor does it change another row's"
    )
    slots.admit([AdmittedRequest(2, "c", greedy, (), ())])
    again = slots.paths(np.array([2], dtype=np.int32))
    assert (again.filtered.tolist(), again.width, again.reported.tolist(), again.adjusted) == (
        [False],
        1,
        [-1],
        False,
    ), "what was there is gone"
