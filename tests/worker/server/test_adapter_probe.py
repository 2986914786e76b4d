"""An adapter is Ready once it is told from its base, whose own noise is no effect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest

from modelserve_worker.engine_client import EngineBusy
from modelserve_worker.request import AdapterStrength, FinishReason, PromptLogprobs, Request, RequestOutput
from modelserve_worker.server.adapters.probe import CLIENT, PROMPTS, AdapterProbe, probe_prompts
from modelserve_worker.server.adapters.versions import AdapterFault, AdapterState

VOCABULARY = 40


class ScoringEngine:
    """Scores by random logits of each prompt, with noise of each run; `moved`: how far an adapter moves them."""

    def __init__(self, *, noise: float, moved: float) -> None:
        self.noise, self.moved = noise, moved
        self.random = np.random.default_rng(1)
        self.busy = 2
        self.asked: list[list[str]] = []
        self.fails = False
        self.measured: tuple[AdapterStrength, ...] = ()

    @property
    def adapters(self) -> ScoringEngine:
        return self

    async def strengths(self, digest: str) -> tuple[AdapterStrength, ...]:
        assert self.asked[-1] == [""] * PROMPTS + [digest] * PROMPTS, "a step has scored prompts of it"
        return self.measured

    async def generate(self, requests: Sequence[Request], *, client: str) -> AsyncGenerator[list[RequestOutput], None]:
        assert client == CLIENT
        if self.busy:
            self.busy -= 1
            raise EngineBusy("too many wait")
        self.asked.append([each.adapter for each in requests])
        for each in requests:
            error = "the step failed" if self.fails else None
            reason = FinishReason.ERROR if error else FinishReason.LENGTH
            yield [RequestOutput(each.request_id, (1,), reason, error=error, prompt_logprobs=self._scores(each))]

    def _scores(self, request: Request) -> PromptLogprobs:
        tokens = np.array(request.prompt_token_ids)
        logits = np.random.default_rng(int(tokens.sum())).standard_normal((len(tokens) - 1, VOCABULARY)) * 3
        logits += self.noise * self.random.standard_normal(logits.shape)
        if request.adapter:
            logits += self.moved * np.random.default_rng(7).standard_normal(logits.shape)
        logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
        top = np.argsort(-logprobs, axis=-1)[:, :20]
        chosen = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
        return PromptLogprobs(
            chosen, np.ones(len(chosen), np.int32), top.astype(np.int32), np.take_along_axis(logprobs, top, -1)
        )


def _probe() -> AdapterProbe:
    texts = [[2, *np.random.default_rng(seed).integers(3, VOCABULARY, 96).tolist()] for seed in range(5)]
    return AdapterProbe(probe_prompts(texts, [2]), busy_pause_s=0.0)


async def _run(**settings: Any) -> Any:
    return await _probe()(ScoringEngine(**settings), "sha256:one")  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "moved"), [(0.0, 1e-3), (0.01, 0.05), (0.05, 1.0)])
async def test_what_changes_answers_passes(noise: float, moved: float) -> None:
    result = await _run(noise=noise, moved=moved)
    assert result.prompts == PROMPTS
    assert result.kl > 2 * result.base_kl
    if moved == 1.0:
        assert result.top1_changed > 0.1
        assert result.kl > 0.1


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.05])
async def test_noise_is_no_effect(noise: float) -> None:
    with pytest.raises(AdapterFault, match="not told from the base's") as fault:
        await _run(noise=noise, moved=0.0)
    assert (fault.value.state, fault.value.reason) == (AdapterState.NO_EFFECT, "WithinNoise")
    assert fault.value.probe is not None
    assert fault.value.probe.kl <= 2 * fault.value.probe.base_kl


async def test_the_base_is_scored_alone_and_in_steps_with_the_adapter() -> None:
    engine = ScoringEngine(noise=0.0, moved=1.0)
    await _probe()(engine, "sha256:one")  # type: ignore[arg-type]
    assert engine.asked == [[""] * PROMPTS, [""] * PROMPTS + ["sha256:one"] * PROMPTS]


async def test_what_was_measured_is_told_by_kind_and_layer() -> None:
    engine = ScoringEngine(noise=0.0, moved=1.0)
    engine.measured = (
        AdapterStrength("qkv", 0, 0.01234), AdapterStrength("qkv", 1, 0.5), AdapterStrength("qkv", 2, 0.02, (1,)),
        AdapterStrength("down", 0, None), AdapterStrength("per_layer_model_projection", None, 3.0),
    )  # fmt: skip
    told = (await _probe()(engine, "sha256:one")).document()  # type: ignore[arg-type,union-attr]
    assert told["strength"] == {"qkv": 0.02, "per_layer_model_projection": 3.0}
    assert told["strengthByLayer"] == {
        "qkv": {"0": 0.0123, "1": 0.5, "2": 0.02}, "down": {"0": None}, "per_layer_model_projection": {"model": 3.0},
    }  # fmt: skip


async def test_a_probe_that_fails_says_so() -> None:
    engine = ScoringEngine(noise=0.0, moved=1.0)
    engine.fails = True
    with pytest.raises(AdapterFault, match="the probe failed: the step failed") as fault:
        await _probe()(engine, "sha256:one")  # type: ignore[arg-type]
    assert fault.value.passing


def test_prompts_are_cut_from_texts_that_are_long_enough() -> None:
    assert probe_prompts([], [2]) == []
    made = probe_prompts([[2, *range(3, 13)]] * 5, [2])
    assert made[:2] == [[2, 3, 4, 5, 6, 7], [2, 8, 9, 10, 11, 12]]
    assert len(made) == PROMPTS
