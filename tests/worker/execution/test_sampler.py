"""The sampler against naive code: order of the filters, penalties, draws that depend on (seed, position) alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from modelserve_worker.batch import ScheduledBatch, ScheduledRequest, SlidingTable
from modelserve_worker.execution.sampler import Sampler, SamplerOutput
from modelserve_worker.execution.sampling_batch import SlotHistory, pack_sampling, slot_histories
from modelserve_worker.execution.staging import StagingBuffer
from modelserve_worker.kernels.counter_random import gumbel_noise
from modelserve_worker.request import SamplingParams

CPU = torch.device("cpu")
EMPTY = SlidingTable(0, ())
CHI2_P_1E_4 = {7: 29.9, 15: 45.0}  # critical values of chi-square at p = 1e-4 by degrees of freedom


def _request(sampling: SamplingParams, *, slot: int = 0, position: int = 10, outputs: int = 0, name: str = "r"):
    return ScheduledRequest(
        f"{name}{slot}", slot, sampling, position - 1, (5,), (), EMPTY, EMPTY, True, outputs, False
    )  # fmt: skip


def _sample(logits: torch.Tensor, requests, *, sampler: Sampler | None = None, eos=(1,)) -> SamplerOutput:
    staging = StagingBuffer(16, CPU)
    staging.begin()
    packed = pack_sampling(
        ScheduledBatch(0, tuple(requests)), staging, vocab_size=logits.shape[1], eos_token_ids=eos
    )  # fmt: skip
    assert packed is not None
    staging.send()
    sampler = sampler or Sampler(max_num_seqs=8192, vocab_size=logits.shape[1], device=CPU)
    return sampler.sample(logits, packed.on_device(staging))


def _params(**changes) -> SamplingParams:
    return dataclasses.replace(SamplingParams(seed=1, max_tokens=9), **changes)


def _draws(logits: torch.Tensor, count: int, **changes) -> np.ndarray:
    """`count` draws from one row of logits, at consecutive positions of one seed."""
    requests = [_request(_params(**changes), slot=i, position=1 + i) for i in range(count)]
    return np.bincount(_sample(logits.expand(count, -1), requests).tokens.numpy(), minlength=logits.numel())


def _chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * observed.sum()
    assert observed[expected == 0].sum() == 0, "a token outside the permitted set was drawn"
    used = expected > 0
    return float(((observed[used] - expected[used]) ** 2 / expected[used]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature) -> None:
    logits = torch.linspace(-1.5, 1.5, 8)
    observed = _draws(logits, 4000, temperature=temperature)
    assert _chi_square(observed, (logits / temperature).softmax(0).numpy()) < CHI2_P_1E_4[7]


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    """Joint draws of (seed, seed + 1) and (position, position + 1) fill a 4 x 4 table evenly."""
    logits = torch.zeros(4)
    for seed_step, position_step in ((1, 0), (0, 1)):
        pairs = [
            [
                _request(_params(seed=2 * i + j * seed_step), slot=i, position=2 * i + j * position_step)
                for i in range(4000)
            ]
            for j in range(2)
        ]
        first, second = (_sample(logits.expand(4000, -1), side).tokens.numpy() for side in pairs)
        assert _chi_square(np.bincount(first * 4 + second, minlength=16), np.full(16, 1 / 16)) < CHI2_P_1E_4[15]


def test_the_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(4), torch.arange(4), 100_000).double()
    assert noise.isfinite().all()
    # Mean is Euler's constant, variance pi^2 / 6; 400,000 samples give standard errors of 0.002 and 0.006.
    assert abs(float(noise.mean()) - 0.5772157) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    for quantile in (-1.0, 0.0, 2.0, 8.0):
        assert float((noise < quantile).double().mean()) == pytest.approx(math.exp(-math.exp(-quantile)), abs=0.004)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.6}, 4),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.3}, 5),
        ({"top_k": 4, "top_p": 0.5}, 2),
    ],
)
def test_filters_keep_the_right_set_and_renormalise(changes, kept) -> None:
    probabilities = np.array([0.21, 0.19, 0.13, 0.11, 0.1, 0.06, 0.05, 0.05, 0.04, 0.02, 0.02, 0.02])
    order = np.random.default_rng(3).permutation(probabilities.size)
    logits = torch.tensor(np.log(probabilities[order])).float()
    expected = np.zeros_like(probabilities)
    likeliest = np.argsort(-probabilities[order], kind="stable")[:kept]
    expected[likeliest] = probabilities[order][likeliest] / probabilities[order][likeliest].sum()
    assert _chi_square(_draws(logits, 3000, **changes), expected) < CHI2_P_1E_4[7]


def test_ties_at_the_top_k_edge_do_not_widen_it() -> None:
    assert np.count_nonzero(_draws(torch.zeros(16), 2000, top_k=3)) == 3


def test_a_row_is_the_same_in_every_batch() -> None:
    """Other rows, with every filter and penalty on, do not change a row's token, nor does its slot or place."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 500, generator=generator) * 3
    everything = _params(
        top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.7, presence_penalty=1.0, frequency_penalty=0.5, logprobs=3,
        logit_bias=((4, 50.0),), min_tokens=5, temperature=0.7,
    )  # fmt: skip
    plain = [_params(seed=i, temperature=0.0 if i % 3 == 0 else 1.0) for i in range(40)]
    alone = [int(_sample(logits[i : i + 1], [_request(plain[i], position=50 + i)]).tokens) for i in range(40)]
    mixed = [_request(plain[i] if i % 2 else everything, slot=39 - i, position=50 + i) for i in range(40)]
    together = _sample(logits, mixed).tokens.tolist()
    assert [together[i] for i in range(1, 40, 2)] == alone[1::2]


def test_huge_and_negative_seeds_are_taken() -> None:
    requests = [_request(_params(seed=seed), slot=i) for i, seed in enumerate((2**64 - 1, -1, 2**63, 0))]
    tokens = _sample(torch.zeros(4, 1000), requests).tokens.tolist()
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3


def test_temperatures_below_the_limit_are_greedy() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.999999]])
    for temperature in (0.0, 1e-30, 1e-6):
        tokens = {int(_sample(logits, [_request(_params(temperature=temperature, seed=s))]).tokens) for s in range(20)}
        assert tokens == {1}


def _naive_penalties(logits, prompt, outputs, params) -> list[float]:
    adjusted = logits.tolist()
    for token, value in enumerate(adjusted):
        if token in prompt or token in outputs:
            adjusted[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        adjusted[token] -= params.frequency_penalty * outputs.count(token)
        adjusted[token] -= params.presence_penalty * (token in outputs)
    return adjusted


@pytest.mark.parametrize("seed", range(10))
def test_penalties_match_naive_code_over_a_run(seed) -> None:
    """Greedy decoding under all three penalties; halfway, the request is preempted and comes back in another slot."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 30, generator=generator) * 2
    params = _params(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    prompt, outputs = [3, 3, 7, 29], []
    sampler = Sampler(max_num_seqs=4, vocab_size=30, device=CPU)
    sampler.rebuild(SlotHistory(2, (1, 2, 3), (4, 4)))  # whoever was in the slot before
    for i in range(40):
        if i in (0, 20):
            slot = 2 if i == 0 else 0
            request = dataclasses.replace(
                _request(params, slot=slot),
                first_in_slot=True,
                prompt_token_ids=tuple(prompt),
                output_token_ids=tuple(outputs),
            )
            for history in slot_histories(ScheduledBatch(0, (request,))):
                sampler.rebuild(history)
        naive = _naive_penalties(logits[0], prompt, outputs, params)
        token = int(_sample(logits, [_request(params, slot=slot)], sampler=sampler).tokens)
        assert naive[token] == pytest.approx(max(naive), abs=1e-5)
        outputs.append(token)
    assert len(set(outputs)) > 5


def test_min_tokens_bans_eos_and_stop_ids_until_reached() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]])
    params = _params(temperature=0.0, min_tokens=2, stop_token_ids=(2, 999))
    assert int(_sample(logits, [_request(params, outputs=1)]).tokens) == 3
    assert int(_sample(logits, [_request(params, outputs=2)]).tokens) == 1
    ignoring = dataclasses.replace(params, ignore_eos=True)
    assert int(_sample(logits, [_request(ignoring, outputs=1)]).tokens) == 1


def test_logit_bias_moves_the_argmax_and_leaves_logprobs_raw() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    params = _params(temperature=0.0, logit_bias=((3, 10.0), (1, -100.0), (4, 1.0)), logprobs=2)
    output = _sample(logits, [_request(params)])
    assert output.logprobs is not None
    raw = logits[0].log_softmax(0)
    assert output.tokens.tolist() == [3]
    assert output.logprobs.rank.tolist() == [4]
    assert output.logprobs.chosen[0] == raw[3]
    assert output.logprobs.top_tokens.tolist() == [[1, 2]]
    assert torch.equal(output.logprobs.top_logprobs[0], raw[[1, 2]])


def test_nan_logits_are_reported_and_do_not_reach_other_rows() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = torch.nan
    logits[1, 6] = 9.0
    greedy = _params(temperature=0.0)
    assert _sample(logits, [_request(greedy), _request(greedy, slot=1)]).tokens.tolist() == [-1, 6]
