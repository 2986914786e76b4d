"""Compares an int8 cache with the 16-bit one that a worker has, once, while nobody asks for anything. Torch-free.

Every text is computed twice through the engine's own steps and pages, the second time with each row rounded as an int8
cache keeps it before anything reads it: so there is no second cache, and no memory but what a request takes. It is done
in slices, as requests that give way: whoever comes waits for a slice at most, and the text is begun anew when the
worker has been idle again. Log probabilities of the tokens that stand there are compared, the TOP likeliest of each
place (modelserve.quality.divergence).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from modelserve.errors import InvalidInput
from modelserve.quality.cache_quality import CacheQuality
from modelserve.quality.divergence import TokenDivergence, token_divergence
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.quality.texts import FACT_TOKENS, TrialText
from modelserve_worker.request import CacheTrial, PromptLogprobs, Request, RequestOutput, SamplingParams

SLICE_TOKENS = 256  # a few tens of milliseconds of the largest model on a GPU, half a step's worth on a CPU
TOP = 20
IDLE_SECONDS = 10  # before the first text is begun, and again whenever somebody has asked for something

log = logging.getLogger(__name__)


class TrialEngine(Protocol):
    """What of the engine a measurement needs."""

    cache_quality: CacheQuality | None

    @property
    def idle(self) -> bool: ...

    async def run_trial(self, request: Request) -> RequestOutput | None: ...


class _Text(NamedTuple):
    """Of one text: the divergence of each compared place, facts that the 16-bit cache finds, those that both find."""

    places: list[TokenDivergence]
    needles: int
    found: int

    @property
    def kl(self) -> float:
        return sum(each.kl for each in self.places) / len(self.places)

    @property
    def same(self) -> float:
        return sum(each.same for each in self.places) / len(self.places)


async def measure_cache_quality(
    engine: TrialEngine,
    texts: Sequence[TrialText],
    *,
    layout: KVCacheLayout,
    dtype: KVCacheDtype = KVCacheDtype.INT8,
    slice_tokens: int = SLICE_TOKENS,
    idle_seconds: float = IDLE_SECONDS,
) -> None:
    """Leave what was found in `engine.cache_quality`. A fault ends the measurement alone, and is logged."""
    try:
        await _idle(engine, idle_seconds)
        compared = []
        for number, text in enumerate(texts):
            pair = []
            for rounded in (None, dtype):
                name, trial = f"cache-trial-{number}-{rounded or 'as-kept'}", CacheTrial(slice_tokens, rounded)
                pair.append(await _scores(engine, text, name, trial, idle_seconds=idle_seconds))
            compared.append(await asyncio.to_thread(_compared, text, *pair))
    except EngineDead:
        return
    except (InvalidInput, ValueError, KeyError) as error:
        log.warning("what an %s cache costs is not known: %s", dtype, error)
        return
    if not compared:
        log.warning("what an %s cache costs is not known: the tokenizer has nothing for any text", dtype)
        return
    engine.cache_quality = CacheQuality(
        dtype=dtype,
        layout=layout,
        kl=max(text.kl for text in compared),
        same=min(text.same for text in compared),
        needles=sum(text.needles for text in compared),
        found=sum(text.found for text in compared),
        tokens=sum(len(text.places) for text in compared),
        context=max(len(text.tokens) for text in texts),
    )
    verdict = "holds" if engine.cache_quality.holds else "does not hold"
    log.info("the quality of an %s cache %s: %s", dtype, verdict, engine.cache_quality.figures)


async def _scores(
    engine: TrialEngine, text: TrialText, name: str, trial: CacheTrial, *, idle_seconds: float
) -> PromptLogprobs:
    """Of the text's tokens but the first, once the worker has stayed idle for all of it."""
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=TOP)
    attempt = 0
    while True:
        request = Request(f"{name}-{attempt}", text.tokens, sampling, trial=trial)
        output = await engine.run_trial(request)
        if output is not None and output.prompt_logprobs is not None:
            return output.prompt_logprobs
        await _idle(engine, idle_seconds)
        attempt += 1


async def _idle(engine: TrialEngine, seconds: float) -> None:
    """Until it has looked idle ten times in a row."""
    looks = 0
    while looks < 10:
        await asyncio.sleep(seconds / 10)
        looks = looks + 1 if engine.idle else 0


def _compared(text: TrialText, kept: PromptLogprobs, rounded: PromptLogprobs) -> _Text:
    """Row i of both scores is of token i + 1."""
    rows = zip(_rows(kept, text, text.compared), _rows(rounded, text, text.compared), strict=True)
    places = [
        token_divergence(token, *pair) for token, pair in zip(text.tokens[text.compared :], rows, strict=True)
    ]  # fmt: skip
    asked = [slice(at - 1, at - 1 + FACT_TOKENS) for at in text.facts]
    needles = [where for where in asked if bool((kept.ranks[where] == 1).all())]
    return _Text(places, len(needles), sum(bool((rounded.ranks[where] == 1).all()) for where in needles))


def _rows(scores: PromptLogprobs, text: TrialText, first: int) -> Iterator[Mapping[int, float]]:
    """Log probabilities by token of each place from `first` on, that of the token that stands there among them."""
    for token, row in zip(text.tokens[first:], scores[first - 1 :].rows(), strict=True):
        yield {**dict(row.top), token: row.logprob}
