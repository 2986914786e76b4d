"""The sampling kernels and their plain reference against a naive draw in float64: ties, NaNs, mixed batches, edges.

Rows are random at every run; a failure names the seed. Where the naive draw is closer than rounding can tell (the two
best scores, or the edge of top-p), the row is not compared, and too many of these fail the test.
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from modelserve_worker.batch import NOT_A_NUMBER, AdmittedRequest
from modelserve_worker.kernels.sampling.counter_random import gumbel_noise
from modelserve_worker.kernels.sampling.sampling import PlainSampling
from modelserve_worker.kernels.sampling.sampling_triton import TritonSampling
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampler import Sampler
from modelserve_worker.step.token_masks import TokenMaskBuffer

pytestmark = pytest.mark.drawn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAP = 30.0
EOS = (1, 7)
FILTERS = {"top_k": (0, 0, 1, 2, 40, 64, 128, 129, 300), "top_p": (1.0, 0.95, 0.5, 1e-6), "min_p": (0.0, 0.0, 0.05)}
CLOSE = 1e-4
DRAWS = 100_000 if DEVICE.type == "cuda" else 64  # compared one by one


@dataclass(frozen=True)
class Case:
    sampling: SamplingParams
    position: int
    outputs: int
    prompt: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()


def _random_case(rng: np.random.Generator) -> Case:
    """Any mix of filters, penalties, biases and bans."""
    top_k, top_p, min_p = (rng.choice(values).item() for values in FILTERS.values())
    if rng.random() < 0.2:
        top_k, top_p, min_p = 0, 1.0, 0.0
    special = rng.random()
    sampling = SamplingParams(
        seed=int(rng.integers(0, 1 << 63)),
        max_tokens=9,
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]).item(),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]).item() if special > 0.5 else 1.0,
        presence_penalty=rng.choice([0.0, 0.7, -1.5]).item() if special > 0.5 else 0.0,
        frequency_penalty=rng.choice([0.0, 0.3]).item() if special > 0.5 else 0.0,
        min_tokens=4 if 0.1 < special < 0.3 else 0,
        stop_token_ids=tuple(range(20, 20 + rng.integers(0, 12))),
        logit_bias=_random_biases(rng) if rng.random() < 0.2 else (),
    )
    seen = (tuple(rng.integers(0, 100, count).tolist()) for count in (30, 20))
    return Case(sampling, int(rng.integers(1, 1 << 18)), int(rng.integers(0, 8)), *seen)


def _random_biases(rng: np.random.Generator) -> tuple[tuple[int, float], ...]:
    """One of them of a token that `min_tokens` may forbid, too, and one given twice."""
    tokens = (*rng.integers(0, 600, int(rng.choice([1, 5, 40]))).tolist(), 20, EOS[0])
    return tuple((token, float(rng.normal(0.0, 20.0))) for token in (*tokens, tokens[0]))


def _logits(rng: np.random.Generator, rows: int, vocab_size: int) -> torch.Tensor:
    """Every other row has few different values, so that every edge is a tie."""
    logits = torch.from_numpy(rng.standard_normal((rows, vocab_size)) * rng.choice([1.0, 6.0, 40.0], (rows, 1)))
    logits[::2] = logits[::2].round()
    return logits.to(DEVICE, torch.bfloat16)


def _sampler(
    cases: list[Case], vocab_size: int, *, kernels: bool, chunk: int = 512, cap: float | None = CAP
) -> Sampler:
    backend = TritonSampling(chunk=chunk) if kernels else PlainSampling()
    sampler = Sampler(
        max_num_seqs=len(cases) + 3, vocab_size=vocab_size, softcap=cap, parallel=TensorParallel(),
        device=DEVICE, backend=backend,
    )  # fmt: skip
    sampler.admit(
        [
            AdmittedRequest(_slot(row, cases), "", c.sampling, c.prompt, c.earlier, (*EOS, *c.sampling.stop_token_ids))
            for row, c in enumerate(cases)
        ]
    )
    return sampler


def _slot(row: int, cases: list[Case]) -> int:
    return len(cases) + 2 - row


def _tokens(
    sampler: Sampler, logits: torch.Tensor, cases: list[Case], allowed: dict[int, np.ndarray] | None = None
) -> list[int]:
    """`allowed`: by row, bool [vocab]."""
    masks = None
    if allowed:
        words = [np.packbits(np.resize(row, -(-len(row) // 32) * 32), bitorder="little") for row in allowed.values()]
        buffer = TokenMaskBuffer(max_num_seqs=len(cases), vocab_size=logits.shape[1], device=DEVICE)
        rows = np.array(list(allowed), dtype=np.int32)
        masks = buffer.send(rows, np.stack(words).view(np.int32), rows=len(cases))
    slots = np.array([_slot(row, cases) for row in range(len(cases))], dtype=np.int32)
    counts = np.array([c.outputs for c in cases], dtype=np.int32)
    return sampler.sample(
        logits,
        slots=torch.tensor(slots, device=DEVICE),
        positions=torch.tensor([c.position for c in cases], dtype=torch.int32, device=DEVICE),
        output_counts=torch.tensor(counts, device=DEVICE),
        host_slots=slots,
        masks=masks,
    ).tokens.tolist()


def _naive(logits: torch.Tensor, case: Case, allowed: np.ndarray | None = None) -> int | None:
    """The token of one row, in float64 and by sorting; None where rounding may decide otherwise."""
    params = case.sampling
    values = CAP * np.tanh(logits.double().cpu().numpy() / CAP)
    if allowed is not None:
        values[~allowed] = -np.inf
    for token, bias in params.logit_bias:
        values[token] += bias
    if case.outputs < params.min_tokens:
        values[list({*EOS, *params.stop_token_ids})] = -np.inf
    counts = np.bincount(np.array(case.earlier, dtype=np.int64), minlength=values.size)
    seen = counts > 0
    seen[list(case.prompt)] = True
    penalty = params.repetition_penalty
    values = np.where(seen, np.where(values > 0, values / penalty, values * penalty), values)
    values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    order = np.lexsort((np.arange(values.size), -values))
    if params.temperature == 0:
        close = values.size > 1 and 0 < values[order[0]] - values[order[1]] < CLOSE
        return None if close else int(order[0])
    values = values / params.temperature
    kept = order[: params.top_k or None]
    edge = values[order[params.top_k - 1 : params.top_k + 1]] if params.top_k else values[:1]
    if edge.size > 1 and 0 < edge[0] - edge[1] < CLOSE:
        return None
    kept = kept[np.isfinite(values[kept])]
    weights = np.exp(values[kept] - values[kept[0]])
    if params.min_p > 0:
        if np.abs(weights - params.min_p).min() < CLOSE * params.min_p:
            return None
        kept, weights = kept[weights >= params.min_p], weights[weights >= params.min_p]
    before = (np.cumsum(weights) - weights) / weights.sum()
    if params.top_p < 1:
        if kept.size > 1 and np.abs(before[1:] - params.top_p).min() < CLOSE:
            return None
        kept = kept[(before < params.top_p) | (np.arange(kept.size) == 0)]
    seed = torch.tensor([params.seed])
    noise = gumbel_noise(seed, torch.tensor([case.position]), torch.arange(values.size))[0].double().numpy()
    scores = np.sort((values + noise)[kept])
    if kept.size > 1 and scores[-1] - scores[-2] < CLOSE:
        return None
    return int(kept[np.argmax((values + noise)[kept])])


@pytest.mark.parametrize("vocab_size", [1000, 5000])
def test_mixed_batches_draw_what_naive_code_draws(vocab_size) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    cases = [_random_case(rng) for _ in range(24)]
    logits = _logits(rng, len(cases), vocab_size)
    broken = int(rng.integers(0, len(cases)))
    logits[broken, int(rng.integers(0, vocab_size))] = torch.nan
    fast = _tokens(_sampler(cases, vocab_size, kernels=True), logits, cases)
    plain = _tokens(_sampler(cases, vocab_size, kernels=False), logits, cases)
    naive = [NOT_A_NUMBER if row == broken else _naive(logits[row], case) for row, case in enumerate(cases)]
    decided = [row for row, token in enumerate(naive) if token is not None]
    assert len(decided) > len(cases) * 2 // 3, f"seed {seed}: {len(decided)} rows are comparable"
    for name, tokens in (("kernels", fast), ("reference", plain)):
        wrong = [(row, tokens[row], naive[row], cases[row]) for row in decided if tokens[row] != naive[row]]
        assert not wrong, f"seed {seed}: {name}: row, token, naive token, case: {wrong}"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter: inf - inf, not used
def test_masked_rows_draw_what_is_allowed_and_their_neighbours_as_ever() -> None:
    vocab_size = 700  # its last word of a mask is part full
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    cases = [_random_case(rng) for _ in range(24)]
    logits = _logits(rng, len(cases), vocab_size)
    allowed = {}
    for row in rng.permutation(len(cases))[:12].tolist():
        allowed[row] = rng.random(vocab_size) < rng.choice([0.5, 0.01])
        allowed[row][rng.integers(0, vocab_size, 13)] = True  # more than `min_tokens` can forbid at once
    naive = [_naive(logits[row], case, allowed.get(row)) for row, case in enumerate(cases)]
    decided = [row for row, token in enumerate(naive) if token is not None]
    assert len(decided) > len(cases) // 2, f"seed {seed}: {len(decided)} rows are comparable"
    for kernels in (True, False):
        free, tokens = (
            _tokens(_sampler(cases, vocab_size, kernels=kernels), logits, cases, some) for some in (None, allowed)
        )
        assert all(allowed[row][tokens[row]] for row in allowed), f"seed {seed}, kernels {kernels}"
        assert [tokens[row] == free[row] for row in range(24) if row not in allowed] == [True] * 12, f"seed {seed}"
        wrong = [(row, tokens[row], naive[row], cases[row]) for row in decided if tokens[row] != naive[row]]
        assert not wrong, f"seed {seed}, kernels {kernels}: row, token, naive token, case: {wrong}"


def test_neither_chunks_nor_capacity_change_a_token() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    # The least and the most that one kernel takes, and both unfiltered rows.
    kinds = [{"top_k": 2}, {"top_k": 64, "top_p": 0.95}, {"top_k": 128, "top_p": 0.5}, {}, {"temperature": 0.0}]
    cases = [Case(SamplingParams(seed=i, max_tokens=9, **kind), 5, 0) for i, kind in enumerate(kinds)]
    logits = _logits(rng, len(cases), 2048 + 17)
    found = {
        chunk: _tokens(_sampler(cases, logits.shape[1], kernels=True, chunk=chunk), logits, cases)
        for chunk in (128, 256, 1024, 4096)
    }
    assert len({tuple(tokens) for tokens in found.values()}) == 1, f"seed {seed}: {found}"


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"temperature": 0.0}, 1),
        ({"top_k": 1}, 1),
        ({"top_k": 3, "top_p": 0.9}, 3),
        ({"top_k": 4, "top_p": 0.5}, 2),  # two of four equals are exactly one half: the third is not needed
    ],
)
def test_ties_over_chunk_edges_go_to_the_lowest_ids(sampling, allowed) -> None:
    """All logits are equal, or all but four beside an edge are far below: only the lowest of the equals are drawn."""
    cases = [Case(SamplingParams(seed=seed, max_tokens=9, **sampling), 5, 0) for seed in range(8)]
    equal = torch.zeros(len(cases), 700, dtype=torch.bfloat16, device=DEVICE)
    edge = torch.full_like(equal, -torch.inf)
    edge[:, [127, 128, 129, 500]] = 2.0
    sampler = _sampler(cases, 700, kernels=True, chunk=128)
    plain = _sampler(cases, 700, kernels=False)
    for logits, lowest in ((equal, [0, 1, 2]), (edge, [127, 128, 129])):
        tokens = _tokens(sampler, logits, cases)
        assert tokens == _tokens(plain, logits, cases)
        assert set(tokens) <= set(lowest[:allowed])
        assert len(set(tokens)) > 1 or allowed == 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter: inf - inf, not used
@pytest.mark.parametrize("cap", [CAP, None])
def test_zeros_of_either_sign_are_equal_and_infinities_have_their_places(cap) -> None:
    cases = [Case(SamplingParams(seed=3, max_tokens=9, temperature=0.0), 5, 0)] * 3
    cases += [Case(SamplingParams(seed=3, max_tokens=9, top_k=2, top_p=0.9), 5, 0)] * 2
    logits = torch.full((5, 300), -torch.inf, dtype=torch.bfloat16, device=DEVICE)
    logits[0, [5, 9]] = torch.tensor([-0.0, 0.0], dtype=torch.bfloat16, device=DEVICE)
    logits[1, [200, 100]] = torch.tensor([torch.inf, 60.0], dtype=torch.bfloat16, device=DEVICE)
    logits[3, 250] = torch.inf
    fast = _tokens(_sampler(cases, 300, kernels=True, chunk=128, cap=cap), logits, cases)
    assert fast == _tokens(_sampler(cases, 300, kernels=False, cap=cap), logits, cases)
    assert fast[:4] == [5, 200, 0, 250]


def test_a_nan_in_any_chunk_marks_its_row_alone() -> None:
    kinds = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_k": 300}]
    cases = [Case(SamplingParams(seed=i, max_tokens=9, **kinds[i % 4]), 5, 0) for i in range(8)]
    logits = _logits(np.random.default_rng(1), 8, 600)
    sampler = _sampler(cases, 600, kernels=True, chunk=128)
    whole = _tokens(sampler, logits, cases)
    for row, place in enumerate((0, 127, 128, 599)):
        logits[row, place] = torch.nan
    assert _tokens(sampler, logits, cases) == [NOT_A_NUMBER] * 4 + whole[4:]
    assert min(whole) >= 0


def test_draws_of_the_kernels_follow_the_filtered_softmax() -> None:
    """Chi-square of 160 draws from the 4 tokens that top-k leaves: 21.1 is exceeded once in 10,000 times by chance."""
    logits = torch.linspace(-1.0, 1.0, 24, device=DEVICE)[
        torch.randperm(24, generator=torch.Generator().manual_seed(1))
    ]
    cases = [Case(SamplingParams(seed=2, max_tokens=9, top_k=4, temperature=0.8), i, 0) for i in range(160)]
    sampler = _sampler(cases, 24, kernels=True, chunk=128)
    observed = np.bincount(_tokens(sampler, logits.expand(160, -1).contiguous(), cases), minlength=24)
    capped = CAP * np.tanh(logits.double().cpu().numpy() / CAP) / 0.8
    expected = np.where(np.argsort(np.argsort(-capped)) < 4, np.exp(capped), 0.0)
    expected *= 160 / expected.sum()
    used = expected > 0
    assert observed[~used].sum() == 0
    assert ((observed[used] - expected[used]) ** 2 / expected[used]).sum() < 21.1


def test_what_is_filtered_without_a_sort_is_what_a_sort_leaves() -> None:
    """Token by token, the kernels beside the reference, of rows whose filters no few candidates decide. Where both are
    rounded alike, as on a GPU, they never differ; the interpreter rounds noise in its own way, once in a thousand."""
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    differ = 0
    for _ in range(DRAWS // 32):
        cases = [_random_case(rng) for _ in range(32)]
        cases = [Case(_filtered(rng, case.sampling), *(getattr(case, n) for n in REST)) for case in cases]
        logits = _logits(rng, len(cases), int(rng.choice([257, 600, 1025])))
        logits[int(rng.integers(0, 32))] = 0.5  # all equal
        fast, plain = (
            _tokens(_sampler(cases, logits.shape[1], kernels=kernels, chunk=128), logits, cases)
            for kernels in (True, False)
        )
        differ += sum(mine != other for mine, other in zip(fast, plain, strict=True))
    assert differ <= (0 if DEVICE.type == "cuda" else 2), f"seed {seed}: {differ} of {DRAWS} differ"


REST = ("position", "outputs", "prompt", "earlier")


def _filtered(rng: np.random.Generator, sampling: SamplingParams) -> SamplingParams:
    """With a filter of all of the vocabulary."""
    top_k, top_p, min_p = [(0, 0.9, 0.0), (0, 0.3, 0.02), (0, 1.0, 0.1), (200, 1.0, 0.0), (150, 0.8, 0.01)][
        int(rng.integers(0, 5))
    ]
    return dataclasses.replace(
        sampling, temperature=rng.choice([0.5, 1.0, 3.0]).item(), top_k=top_k, top_p=top_p, min_p=min_p
    )


@pytest.mark.parametrize("most", [0, 1, 20])
def test_log_probabilities_are_those_of_the_softmax_and_the_likeliest_are_in_order(most: int) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    for vocab_size, cap in ((600, CAP), (127, None), (30, CAP)):
        logits = _logits(rng, 9, vocab_size)
        logits[4, rng.integers(0, vocab_size, vocab_size // 2)] = -torch.inf
        tokens = torch.from_numpy(rng.integers(0, vocab_size, 5)).to(DEVICE)
        places = torch.from_numpy(rng.permutation(9)[:5].copy()).to(DEVICE)
        values = logits[places].double()
        values = values if cap is None else cap * (values / cap).tanh()
        expected = values.log_softmax(dim=-1)
        of = expected.gather(1, tokens[:, None])[:, 0]
        for backend in (TritonSampling(chunk=128), PlainSampling()):
            found = backend.logprobs(logits, tokens, places, most=most, softcap=cap)
            torch.testing.assert_close(found.chosen.double(), of, atol=2e-5, rtol=1e-5)
            rounded = values.float()
            above = (rounded > rounded.gather(1, tokens[:, None])).sum(dim=-1) + 1
            assert (found.rank - above).abs().max() <= 0, f"seed {seed}"
            order = [sorted(range(vocab_size), key=lambda t, row=row: (-row[t], t))[:most] for row in rounded.tolist()]
            assert found.top_tokens.tolist() == order, f"seed {seed}"
            torch.testing.assert_close(
                found.top_logprobs.double(), expected.gather(1, found.top_tokens), atol=2e-5, rtol=1e-5
            )
