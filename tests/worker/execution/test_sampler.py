"""The sampler against naive code: order of the filters, penalties, draws that depend on (seed, position) alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from modelserve.sizing.activation import ROWS_PER_SORT
from modelserve_worker.batch import NOT_A_NUMBER, AdmittedRequest
from modelserve_worker.kernels.sampling.counter_random import gumbel_noise
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampler import Sampler, SamplerOutput

CPU = torch.device("cpu")
CHI2_P_1E_4 = {7: 29.9, 15: 45.0}  # critical values of chi-square at p = 1e-4 by degrees of freedom


@dataclass(frozen=True)
class Row:
    """A request that samples: its slot, the position of its token, how many it has sampled."""

    sampling: SamplingParams
    slot: int = 0
    position: int = 10
    outputs: int = 0
    prompt: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()


def _sampler(vocab_size: int, *, slots: int = 64, softcap: float | None = None) -> Sampler:
    return Sampler(
        max_num_seqs=slots, vocab_size=vocab_size, softcap=softcap, parallel=TensorParallel(),
        device=CPU,
    )  # fmt: skip


def _admit(sampler: Sampler, rows: list[Row]) -> None:
    sampler.admit([AdmittedRequest(r.slot, f"r{r.slot}", r.sampling, r.prompt, r.earlier, r.banned) for r in rows])


def _step(sampler: Sampler, logits: torch.Tensor, rows: list[Row]) -> SamplerOutput:
    slots = np.array([r.slot for r in rows], dtype=np.int32)
    counts = np.array([r.outputs for r in rows], dtype=np.int32)
    before = logits.clone()
    output = sampler.sample(
        logits,
        slots=torch.tensor(slots),
        positions=torch.tensor([r.position for r in rows], dtype=torch.int32),
        output_counts=torch.tensor(counts),
        host_slots=slots,
    )
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits are left as they were"
    return output


def _sample(logits: torch.Tensor, rows: list[Row], **options) -> SamplerOutput:
    sampler = _sampler(logits.shape[1], slots=max(r.slot for r in rows) + 1, **options)
    _admit(sampler, rows)
    return _step(sampler, logits, rows)


def _params(**changes) -> SamplingParams:
    return dataclasses.replace(SamplingParams(seed=1, max_tokens=9), **changes)


def _draws(logits: torch.Tensor, count: int, **changes) -> np.ndarray:
    """`count` draws from one row of logits, at consecutive positions of one seed."""
    requests = [Row(_params(**changes), slot=i, position=1 + i) for i in range(count)]
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
            [Row(_params(seed=2 * i + j * seed_step), slot=i, position=2 * i + j * position_step) for i in range(4000)]
            for j in range(2)
        ]
        first, second = (_sample(logits.expand(4000, -1), side).tokens.numpy() for side in pairs)
        assert _chi_square(np.bincount(first * 4 + second, minlength=16), np.full(16, 1 / 16)) < CHI2_P_1E_4[15]


def test_the_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(4), torch.arange(4), torch.arange(100_000)).double()
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
    alone = [int(_sample(logits[i : i + 1], [Row(plain[i], position=50 + i)]).tokens) for i in range(40)]
    mixed = [Row(plain[i] if i % 2 else everything, slot=39 - i, position=50 + i) for i in range(40)]
    together = _sample(logits, mixed).tokens.tolist()
    assert [together[i] for i in range(1, 40, 2)] == alone[1::2]


def test_huge_and_negative_seeds_are_taken() -> None:
    requests = [Row(_params(seed=seed), slot=i) for i, seed in enumerate((2**64 - 1, -1, 2**63, 0))]
    tokens = _sample(torch.zeros(4, 1000), requests).tokens.tolist()
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3


def test_temperatures_below_the_limit_are_greedy() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.999999]])
    for temperature in (0.0, 1e-30, 1e-6):
        tokens = {int(_sample(logits, [Row(_params(temperature=temperature, seed=s))]).tokens) for s in range(20)}
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
    sampler = _sampler(30, slots=4)
    _admit(sampler, [Row(params, slot=2, prompt=(1, 2, 3), earlier=(4, 4))])  # whoever was in the slot before
    for i in range(40):
        if i in (0, 20):
            slot = 2 if i == 0 else 0
            _admit(sampler, [Row(params, slot=slot, prompt=tuple(prompt), earlier=tuple(outputs))])
        naive = _naive_penalties(logits[0], prompt, outputs, params)
        token = int(_step(sampler, logits, [Row(params, slot=slot)]).tokens)
        assert naive[token] == pytest.approx(max(naive), abs=1e-5)
        outputs.append(token)
    assert len(set(outputs)) > 5


def test_banned_tokens_are_not_drawn_until_there_are_min_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]])
    params = _params(temperature=0.0, min_tokens=2, stop_token_ids=(0,))
    assert int(_sample(logits, [Row(params, outputs=1, banned=(1, 2, 999))]).tokens) == 3
    assert int(_sample(logits, [Row(params, outputs=2, banned=(1, 2, 999))]).tokens) == 1
    assert int(_sample(logits, [Row(params, outputs=1, banned=(2,))]).tokens) == 1
    assert int(_sample(logits, [Row(params, outputs=1)]).tokens) == 1, "what stops is not the sampler's to decide"


def test_logit_bias_moves_the_argmax_and_leaves_logprobs_raw() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    params = _params(temperature=0.0, logit_bias=((3, 10.0), (1, -100.0), (4, 1.0)), logprobs=2)
    output = _sample(logits, [Row(params)])
    assert output.logprobs is not None
    raw = logits[0].log_softmax(0)
    assert output.tokens.tolist() == [3]
    assert output.logprobs.rank.tolist() == [4]
    assert output.logprobs.chosen[0] == raw[3]
    assert output.logprobs.top_tokens.tolist() == [[1, 2]]
    assert torch.equal(output.logprobs.top_logprobs[0], raw[[1, 2]])


def test_of_equally_likely_tokens_the_lower_ids_are_named_whoever_asks_beside() -> None:
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(5)).mul(2).round().div(2)  # as few as bfloat16
    order = [sorted(range(512), key=lambda token: (-row[token], token)) for row in logits.tolist()]
    for counts in ((1, 1, 1), (1, 2, 20), (7, 20, 1)):
        rows = [Row(_params(temperature=0.0, logprobs=count), slot=slot) for slot, count in enumerate(counts)]
        reported = _sample(logits, rows).logprobs
        assert reported is not None
        for named, likely, count in zip(reported.top_tokens.tolist(), order, counts, strict=True):
            assert named[:count] == likely[:count]


def test_only_rows_that_ask_have_logprobs() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 4.0], [1.0, 0.0, 0.0]])
    rows = [Row(_params(temperature=0.0, logprobs=n), slot=i) for i, n in enumerate((None, 2, 0))]
    reported = _sample(logits, rows, softcap=5.0).logprobs
    assert reported is not None
    capped = (5.0 * (logits / 5.0).tanh()).log_softmax(-1)
    assert reported.wanted.tolist() == [-1, 2, 0]
    assert reported.rank.tolist() == [0, 1, 1]
    assert reported.chosen[1:].tolist() == pytest.approx([float(capped[1, 2]), float(capped[2, 0])])
    assert reported.top_tokens[1].tolist() == [2, 0]
    assert _sample(logits[:1], rows[:1]).logprobs is None


def test_nan_logits_are_reported_and_do_not_reach_other_rows() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = torch.nan
    logits[1, 6] = 9.0
    params = _params(temperature=0.0, logprobs=1, repetition_penalty=1.1)
    output = _sample(logits, [Row(params), Row(params, slot=1)])
    assert output.tokens.tolist() == [NOT_A_NUMBER, 6]
    assert output.logprobs is not None
    assert output.logprobs.chosen[1] == logits[1].log_softmax(0)[6]


def test_the_softcap_comes_before_everything_else() -> None:
    """Equal after the cap: the lower id wins. And a bias is added to the capped logit."""
    logits = torch.tensor([[1000.0, 3000.0, -5.0]])
    assert int(_sample(logits, [Row(_params(temperature=0.0))], softcap=30.0).tokens) == 0
    assert int(_sample(logits, [Row(_params(temperature=0.0))]).tokens) == 1
    biased = _params(temperature=0.0, logit_bias=((2, 20.0), (2, 16.0)))
    assert int(_sample(logits, [Row(biased)], softcap=30.0).tokens) == 2, "a bias given twice counts twice"


def test_ties_go_to_the_lowest_token_id() -> None:
    logits = torch.full((1, 5000), -1.0)
    logits[0, [4999, 1234, 77]] = 2.0
    assert int(_sample(logits, [Row(_params(temperature=0.0))]).tokens) == 77
    drawn = {int(_sample(logits, [Row(_params(top_k=2), position=i)]).tokens) for i in range(30)}
    assert drawn == {77, 1234}


def test_a_slot_that_is_taken_again_has_the_new_parameters_only() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]])
    sampler = _sampler(4, slots=2)
    loaded = _params(temperature=0.0, logit_bias=((3, 50.0),), min_tokens=9, repetition_penalty=3.0, logprobs=1)
    _admit(sampler, [Row(loaded, prompt=(1,)), Row(loaded, slot=1)])
    assert _step(sampler, logits.expand(2, -1), [Row(loaded), Row(loaded, slot=1)]).tokens.tolist() == [3, 3]
    _admit(sampler, [Row(_params(temperature=0.0))])
    output = _step(sampler, logits.expand(2, -1), [Row(loaded), Row(loaded, slot=1)])
    assert output.tokens.tolist() == [1, 3]
    assert output.logprobs is not None
    assert output.logprobs.wanted.tolist() == [-1, 1]


def test_a_batch_of_several_passes_is_the_sum_of_its_rows() -> None:
    count = 2 * ROWS_PER_SORT + 3
    logits = torch.randn(count, 50, generator=torch.Generator().manual_seed(4))
    rows = [Row(_params(seed=i, top_p=0.8), slot=count - 1 - i) for i in range(count)]
    alone = [int(_sample(logits[i : i + 1], [rows[i]]).tokens) for i in range(count)]
    assert _sample(logits, rows).tokens.tolist() == alone


def test_a_reset_forgets_what_slots_have_seen() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9, 3.0]])
    sampler, row = _sampler(4, slots=1), Row(_params(temperature=0.0, presence_penalty=1.0))
    _admit(sampler, [row])
    assert [int(_step(sampler, logits, [row]).tokens) for _ in range(2)] == [1, 2]
    sampler.reset()
    assert int(_step(sampler, logits, [row]).tokens) == 1
