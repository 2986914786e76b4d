"""Steps on their way to an answer: launched ones, whose tokens come in pinned memory, and those yet to be sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from modelserve_worker.batch import FailedStep, Int32Array, PendingStep, SampledTokens, row_places
from modelserve_worker.drafters.drafter import Proposal
from modelserve_worker.request import PromptLogprobs, TokenLogprobs
from modelserve_worker.step.sampler import SamplerOutput

_NONE = np.zeros(0, dtype=np.int32)


class ScoredPrompt(Protocol):
    """A chunk of a prompt whose scores are on their way; `scores` once the device has passed the step."""

    @property
    def slot(self) -> int: ...

    @property
    def first(self) -> int: ...

    def scores(self) -> PromptLogprobs: ...


@dataclass(frozen=True)
class Drafted:
    """What a step with a drafter tells beside the tokens, of the S requests that draw."""

    drawn: Int32Array  # [S] on the host: tokens of each, of which
    counts: Tensor  # int32 [S] are accepted
    proposal: Proposal | None  # what may follow them; None: nothing was asked for


class LaunchedStep:
    """A step on its way; the device has passed it, whether or not it samples, when the event has."""

    def __init__(
        self,
        step: int,
        sampled: SamplerOutput | None,
        *,
        on_gpu: bool,
        scored: Sequence[ScoredPrompt] = (),
        drafted: Drafted | None = None,
    ) -> None:
        """`drafted`: of a step whose requests may get several tokens."""
        self._step = step
        self._scored = scored
        self._tokens: Tensor | None = None
        self._drafted: Drafted | None = None
        if sampled is not None:
            self._drafted = drafted
            tokens = sampled.tokens
            if drafted is not None:  # in one copy
                told = [tokens.int(), drafted.counts]
                if drafted.proposal is not None:
                    told += [drafted.proposal.counts, drafted.proposal.tokens.flatten()]
                tokens = torch.cat(told)
            self._tokens = to_host(tokens)
        self._logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        if sampled is not None and sampled.logprobs is not None:
            reported = sampled.logprobs
            self._wanted = reported.wanted
            self._logprobs = (
                to_host(reported.chosen),
                to_host(reported.rank),
                to_host(reported.top_tokens),
                to_host(reported.top_logprobs),
            )
        self._event: torch.cuda.Event | None = None
        if on_gpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def constrain(self, masks: Int32Array) -> PendingStep:  # noqa: ARG002
        """It had no constrained rows."""
        raise AssertionError("this step was sampled when it was launched")

    def result(self) -> SampledTokens:
        """Wait for the device. Raises what it failed with."""
        if self._event is not None:
            self._event.synchronize()
        prompts = {chunk.slot: (chunk.first, chunk.scores()) for chunk in self._scored}
        if self._tokens is None:
            return SampledTokens(self._step, _NONE, {}, prompt_logprobs=prompts)
        tokens = self._tokens.numpy().astype(np.int32)
        rows, counts = np.arange(len(tokens)), _NONE
        drafts: Int32Array = _NONE
        proposed: Int32Array = _NONE
        if self._drafted is not None:
            segments, most = len(self._drafted.drawn), int(self._drafted.drawn.sum())
            counts = tokens[most : most + segments]
            if self._drafted.proposal is not None:
                proposed = tokens[most + segments : most + 2 * segments]
                drafts = np.reshape(tokens[most + 2 * segments :], (segments, -1))
            numbers, offsets = row_places(counts)
            rows = (np.cumsum(self._drafted.drawn) - self._drafted.drawn)[numbers] + offsets
            tokens = tokens[rows]
        logprobs = {}
        if self._logprobs is not None:
            wanted = np.flatnonzero((self._wanted[rows] >= 0) & (tokens >= 0)).tolist()
            logprobs = {index: self._reported(int(rows[index])) for index in wanted}
        return SampledTokens(self._step, tokens, logprobs, counts, drafts, proposed, prompts)

    def _reported(self, row: int) -> TokenLogprobs:
        assert self._logprobs is not None
        chosen, rank, top_tokens, top_logprobs = self._logprobs
        count = int(self._wanted[row])
        top = zip(top_tokens[row, :count].tolist(), top_logprobs[row, :count].tolist(), strict=True)
        return TokenLogprobs(float(chosen[row]), int(rank[row]), tuple(top))


class CheckedStep:
    """A step that looks at pages as well; `unsound` says of each, in pinned memory, what it has found."""

    def __init__(self, step: PendingStep, unsound: Tensor) -> None:
        self._step = step
        self._unsound = unsound

    def constrain(self, masks: Int32Array) -> PendingStep:
        step = self._step.constrain(masks)
        return step if isinstance(step, FailedStep) else CheckedStep(step, self._unsound)

    def result(self) -> SampledTokens:
        sampled = self._step.result()  # the device has passed the step
        return replace(sampled, unsound=tuple(np.flatnonzero(self._unsound.numpy()).tolist()))


class UnsampledStep:
    """A step whose logits are on their way and whose sampling waits for the masks of its constrained rows."""

    def __init__(self, sample: Callable[[Int32Array], LaunchedStep]) -> None:
        self._sample = sample

    def constrain(self, masks: Int32Array) -> PendingStep:
        """Launch the sampling; what that fails with is raised by `result` of what it returns, as for every launch."""
        try:
            return self._sample(masks)
        except Exception as error:
            return FailedStep(error)

    def result(self) -> SampledTokens:
        raise AssertionError("a step with constrained rows is sampled before its result is taken")


def to_host(values: Tensor) -> Tensor:
    """Start the copy to pinned memory; on the CPU the tensor itself."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
