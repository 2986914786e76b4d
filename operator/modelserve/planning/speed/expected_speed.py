"""How fast a candidate would be under the expected workload, from the times of its steps (step_time).

A prompt alone is computed in one step of `maxNumBatchedTokens`, or, if longer, in steps of four mixed ones. While
requests decode, prompts ride in mixed steps of M = `maxNumMixedTokens` rows, fewer behind long contexts and more where
many prompts wait (prompt_rows).
In a closed loop of c requests of I prompt and O answer tokens, d of which decode at a time:

    steps per request    n = (O - 1) / d, of which mixed k = I / (M - d), or one where a step takes whole prompts
    time per request     S = k t_mixed + max(0, n - k) t_decode
    who decodes          d = c - k t_mixed / S (Little), at most (O - 1) / k: then prompts wait for each other
    TPOT = S / max(n, k), requests/s = 1 / S, tokens/s = O / S

With drafts a step brings y tokens of each request that decodes (drafted_steps): n = (O - 1) / (d y), and
TPOT is divided by y. Where less than one request decodes on average, the rest of the prompts is computed in whole
steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.evaluation import Fit
from modelserve.planning.learned import AS_EXPECTED, StepFactors
from modelserve.planning.speed.draft_time import draft_speeds
from modelserve.planning.speed.drafted_steps import DraftedStep, DraftedSteps, DraftWay, VerifyingSteps
from modelserve.planning.speed.engine_rates import engine_rates
from modelserve.planning.speed.prompt_rows import PromptCost, rows_alone
from modelserve.planning.speed.step_time import PromptRows, RankSpeed, StepTime, layer_parameters
from modelserve.planning.wishes import Wishes
from modelserve.sizing.speculation import Speculation

MIXED_STEP_SECONDS = 0.045  # of matrix products in a step in which requests decode: what a token may wait for its next
LATENCY_MIXED_STEP_SECONDS = MIXED_STEP_SECONDS / 2  # the same for objective Latency
LEAST_MIXED_TOKENS = 256
SPEEDS = 2048  # of ranks and of loads that are kept: many plans differ in what no time depends on
_ROUNDS = 5  # of the equation for d: more of them change less than the formulas' own error


# What was made of equal arguments is the same object, so that `load_speed` is asked once for equal candidates.
_rank_speed, _draft_speeds = lru_cache(maxsize=SPEEDS)(RankSpeed), lru_cache(maxsize=SPEEDS)(draft_speeds)


@dataclass(frozen=True)
class Load:
    """A closed loop: `requests` are always open, each of so many prompt and answer tokens."""

    requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LoadSpeed:
    """What one replica does of a load once it runs evenly."""

    first_token: StepTime  # of one prompt when nothing else runs
    output_token: StepTime  # mean over an answer, beside the other requests
    requests_per_s: float


@dataclass(frozen=True)
class Speed:
    """Expected rates of one candidate under the expected workload."""

    load: Load
    meets_concurrency: bool  # the pool holds the expected number of requests at the expected length
    at_load: LoadSpeed
    drafted: DraftedSteps | None = None  # where the candidate drafts

    @cached_property
    def drafts(self) -> DraftedStep | None:
        """A step of as many requests as the load has."""
        context = self.load.input_tokens + self.load.output_tokens / 2
        return self.drafted.step(self.load.requests, context=context) if self.drafted is not None else None

    @property
    def output_tokens_per_s(self) -> float:
        """Of one replica, prompts included."""
        return self.at_load.requests_per_s * self.load.output_tokens


def speed(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> Speed:
    """Serve the expected requests on one replica, as many at once as it holds."""
    length = min(wishes.input_tokens + wishes.output_tokens, fit.max_model_len)
    held = fit.geometry.requests(fit.memory.kv_pool_bytes, length)
    most = fit.sequences
    wanted = wishes.concurrency or (1 if wishes.objective == "Latency" else most)
    prompt = max(1, min(wishes.input_tokens, length - 1))
    load = Load(max(1, min(held, wanted, most)), prompt, max(1, length - prompt))
    rank = rank_speed(fit, architecture, wishes)
    drafted = drafted_steps(fit, rank, wishes)
    at_load = load_speed(
        rank,
        load,
        max_num_batched_tokens=wishes.chunk(fit.accelerator),
        max_num_mixed_tokens=mixed_step_tokens(fit, architecture, wishes),
        drafted=drafted,
    )
    meets = held >= (wishes.concurrency or 1) and length == wishes.input_tokens + wishes.output_tokens
    return Speed(load, meets, at_load, drafted)


def drafted_steps(fit: Fit, rank: RankSpeed, wishes: Wishes) -> DraftedSteps | None:
    """Steps with drafts of a candidate; None where it has none, nobody knows how often they are right,
    or, on the CPU, what their rows take."""
    drafts = wishes.drafts.kept(fit.speculation) if wishes.drafts is not None else None
    if drafts is None or not drafts.chances or not fit.speculation.num_tokens or fit.accelerator.is_cpu:
        return None
    speeds = _draft_speeds(fit.speculation, fit.accelerator, fit.geometry, tensor_parallel=fit.tensor_parallel)
    ways = tuple(map(DraftWay, speeds or (None,), drafts.chances))
    return _drafted_steps(rank, ways, fit.sequences, fit.speculation, fixed=drafts.fixed)


@lru_cache(maxsize=SPEEDS)
def _drafted_steps(
    rank: RankSpeed,
    ways: tuple[DraftWay, ...],
    max_num_seqs: int,
    speculation: Speculation,
    *,
    fixed: bool,
) -> DraftedSteps:
    steps = VerifyingSteps(rank, max_num_seqs=max_num_seqs, speculation=speculation)
    return DraftedSteps(steps, ways, fixed=fixed)


def rank_speed(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> RankSpeed:
    """Step times of a candidate, corrected by what was measured."""
    return _rank_speed(
        architecture,
        fit.accelerator,
        fit.geometry,
        tensor_parallel=fit.tensor_parallel,
        weight_format=wishes.weight_format,
        factors=step_factors(fit, wishes),
        exact=wishes.exact,
    )


def step_factors(fit: Fit, wishes: Wishes) -> StepFactors:
    """What was measured of steps like the candidate's; nothing of those under profile exact."""
    if wishes.exact:
        return AS_EXPECTED
    return wishes.learned.step_factors(
        fit.accelerator.product,
        tensor_parallel_size=fit.tensor_parallel,
        dtype=fit.geometry.dtype,
        layout=fit.geometry.layout,
    )


@lru_cache(maxsize=SPEEDS)
def load_speed(
    rank: RankSpeed,
    load: Load,
    *,
    max_num_batched_tokens: int,
    max_num_mixed_tokens: int,
    drafted: DraftedSteps | None = None,
) -> LoadSpeed:
    """The formulas above."""

    def decode_step(decodes: float) -> DraftedStep:
        if drafted is None:
            return DraftedStep(rank.step(decodes=decodes, context=context), 1.0, 0)
        return drafted.step(decodes, context=context)

    def mixed_seconds(decodes: float, rows: float, decode: DraftedStep) -> float:
        """Of a mixed step, which measured factors do not make shorter than `decode`. Each request's cache is read once,
        however many rows it has."""
        if not decode.drafts:
            mixed = rank.step(decodes=decodes, context=context, prompts=prompt.of_mean(rows))
        else:
            mixed = rank.step(decodes=decodes * (1.0 + decode.drafts), prompts=prompt.of_mean(rows))
            beside = rank.drafted_attention_seconds(decodes * (1.0 + decode.drafts))
            mixed = mixed._replace(cache=decode.time.cache, attention=mixed.attention + beside)
        return max(mixed.seconds + decode.time.drafts, decode.time.seconds)

    tokens, answer = load.input_tokens, max(1, load.output_tokens - 1)
    prompt = PromptRows.chunk(0, tokens, window=rank.window, ends=True)
    prices = PromptCost.of_steps(rank.doubling_context, max_num_batched_tokens)
    whole = rows_alone(tokens, max_num_batched_tokens=max_num_batched_tokens, max_num_mixed_tokens=max_num_mixed_tokens)
    alone = _alone(rank, prompt, steps=math.ceil(prices.steps(tokens, whole)))
    context = tokens + load.output_tokens / 2
    if load.requests == 1:
        step = decode_step(1)
        token = step.time.times(1 / step.tokens)
        return LoadSpeed(alone, token, 1 / (alone.seconds + (load.output_tokens - 1) * token.seconds))

    most = min(max_num_mixed_tokens, max_num_batched_tokens)  # an even load has no crowd and no lull (mixed_steps.py)
    decodes = float(load.requests - 1)
    for _ in range(_ROUNDS):
        decode = decode_step(decodes)
        following = max(1.0, answer / decode.tokens)  # steps of an answer
        arriving = max(1.0, decodes / following)  # prompts of the requests that take the place of those that end
        rows = max(most - decodes, most / 2)
        rows = min(tokens / prices.steps(tokens, rows), arriving * tokens)
        mixed = mixed_seconds(decodes, rows, decode)
        mixed_steps, steps = tokens / rows, following / decodes
        seconds = mixed_steps * mixed + max(0.0, steps - mixed_steps) * decode.time.seconds
        between = seconds / max(steps, mixed_steps)
        found = min(load.requests - mixed_steps * mixed / seconds, following / mixed_steps)
        decodes = (decodes + found) / 2
        if found < 1:  # one decodes at most, its steps take a part of a prompt along, and the rest has whole steps
            decodes, rows = 1.0, min(max_num_mixed_tokens - 1, tokens / following)
            decode = decode_step(decodes)
            between = mixed_seconds(decodes, rows, decode)
            seconds = following * between + alone.seconds * (1 - rows * following / tokens)
            break
    token = decode.time._replace(prompts=between - decode.time.seconds)
    return LoadSpeed(alone, token.times(1 / decode.tokens), 1 / seconds)


def _alone(rank: RankSpeed, prompt: PromptRows, *, steps: int) -> StepTime:
    """One prompt in so many equal steps."""
    return rank.step(prompts=prompt.of_mean(prompt.rows / steps)).times(steps)


def mixed_step_tokens(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> int:
    """Most tokens of a step in which requests decode: as asked, else the power of two that MIXED_STEP_SECONDS compute.

    Smaller steps read the weights more often for the same prompts, larger ones make running requests wait: objective
    Latency has half of them.
    """
    chunk = wishes.chunk(fit.accelerator)
    if wishes.max_num_mixed_tokens:
        return min(wishes.max_num_mixed_tokens, chunk)
    device = fit.accelerator
    rate = device.flops * engine_rates(device.compute_capability).linear * fit.tensor_parallel
    seconds = LATENCY_MIXED_STEP_SECONDS if wishes.objective == "Latency" else MIXED_STEP_SECONDS
    tokens = int(seconds * rate / (2 * layer_parameters(architecture)))
    return min(chunk, max(LEAST_MIXED_TOKENS, 1 << max(0, tokens.bit_length() - 1)))
