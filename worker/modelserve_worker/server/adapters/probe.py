"""Whether an adapter changes anything: prompts scored with it and without, beside what others ask for.

The base is scored twice, the second time in steps that it shares with the adapter, so that the difference between its
two runs is what steps of other shapes come to. An adapter that is no further from the base than that is not told from
it. Requests of the probe take turns with those of clients, as one client of them all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from modelserve.quality.divergence import TokenDivergence, token_divergence
from modelserve_worker.engine_client import EngineBusy, EngineClient
from modelserve_worker.request import FinishReason, PromptLogprobs, Request, SamplingParams
from modelserve_worker.server.adapters.versions import AdapterFault, AdapterState, ProbeResult

PROMPTS, PROMPT_TOKENS, TOP = 8, 48, 20
TEXT_TOKENS = 2 * PROMPT_TOKENS + 8  # that two prompts are made of
CLIENT = "adapter-probe"
_TIMES_NOISE = 1.5
"""Two runs of one computation differ by noise, and a third by as much again: its mean over some hundred places is known
to a tenth. What adds as much of its own as the noise is comes to 1.4 times it."""
_LEAST_SHIFT = 1e-6  # nats: log probabilities are float32


@dataclass(frozen=True)
class AdapterProbe:
    """`prompts`: token ids. Call it with an engine and the digest of an adapter that it holds."""

    prompts: Sequence[Sequence[int]]
    busy_pause_s: float = 0.5  # before an engine is asked again that has no room for more requests
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def __call__(self, engine: EngineClient, digest: str) -> ProbeResult | None:
        """Raises AdapterFault for an adapter that is not told from the base, and EngineDead."""
        if not self.prompts:
            return None
        (first,) = await self._scores(engine, ("",))
        again, adapted = await self._scores(engine, ("", digest))
        strengths = await engine.adapters.strengths(digest)
        noise, places = await asyncio.to_thread(lambda: (self._compare(first, again), self._compare(first, adapted)))
        result = ProbeResult(
            kl=_mean([each.kl for each in places]),
            top1_changed=_mean([float(not each.same) for each in places]),
            prompts=len(self.prompts),
            base_kl=_mean([each.kl for each in noise]),
            strengths=strengths,
        )
        shift, of_base = (_mean([each.shift for each in each_run]) for each_run in (places, noise))
        if shift <= max(_LEAST_SHIFT, _TIMES_NOISE * of_base):
            raise AdapterFault(
                "WithinNoise",
                f"answers are not told from the base's: log probabilities differ by {shift:.2g} nats on average, those "
                f"of two runs of the base by {of_base:.2g}. Train it longer, or look whether it is of this model",
                state=AdapterState.NO_EFFECT,
                probe=result,
            )
        return result

    async def _scores(self, engine: EngineClient, adapters: Sequence[str]) -> list[list[PromptLogprobs]]:
        """Of each adapter, by prompt."""
        while True:
            try:
                return await self._scored(engine, adapters)
            except EngineBusy:
                await asyncio.sleep(self.busy_pause_s)

    async def _scored(self, engine: EngineClient, adapters: Sequence[str]) -> list[list[PromptLogprobs]]:
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=TOP)
        requests = [
            Request(f"adapter-probe-{next(self._numbers)}", prompt, sampling, adapter=adapter, client=CLIENT)
            for adapter in adapters
            for prompt in self.prompts
        ]
        found: dict[str, PromptLogprobs] = {}
        async with aclosing(engine.generate(requests, client=CLIENT)) as steps:
            async for outputs in steps:
                for output in outputs:
                    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        raise AdapterFault("ProbeFailed", f"the probe failed: {output.error}", passing=True)
                    if output.prompt_logprobs is not None:
                        found[output.request_id] = output.prompt_logprobs
        if len(found) < len(requests):
            raise AdapterFault("ProbeFailed", "the probe failed: the engine scored no prompt", passing=True)
        scores = [found[each.request_id] for each in requests]
        count = len(self.prompts)
        return [scores[at : at + count] for at in range(0, len(scores), count)]

    def _compare(self, one: Sequence[PromptLogprobs], other: Sequence[PromptLogprobs]) -> list[TokenDivergence]:
        """Place by place of all prompts."""
        return [
            token_divergence(token, *rows)
            for prompt, *scores in zip(self.prompts, one, other, strict=True)
            for token, *rows in zip(prompt[1:], *(_rows(prompt, each) for each in scores), strict=True)
        ]


def probe_prompts(texts: Sequence[Sequence[int]], first: Sequence[int]) -> list[list[int]]:
    """Two prompts of each text, which `first` begins; at most PROMPTS."""
    made: list[list[int]] = []
    for text in texts[: PROMPTS // 2]:
        size = min(PROMPT_TOKENS, (len(text) - len(first)) // 2)
        made += ([*first, *text[at : at + size]] for at in (len(first), len(first) + size))
    return made


def _rows(prompt: Sequence[int], scores: PromptLogprobs) -> Iterator[Mapping[int, float]]:
    for token, row in zip(prompt[1:], scores.rows(), strict=True):
        yield {**dict(row.top), token: row.logprob}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
