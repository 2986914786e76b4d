"""Sampling parameters of one step as arrays: what the sampler needs of each request that gets a token."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from modelserve_worker.batch import ScheduledBatch, ScheduledRequest
from modelserve_worker.execution.staging import Section, StagingBuffer
from modelserve_worker.request import SamplingParams

_WORD = 1 << 64


@dataclass(frozen=True)
class SlotHistory:
    """Token ids that a slot's penalty state is rebuilt from."""

    slot: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of the S requests that sample, in batch order. Integers are int64 [S], floats float32 [S]."""

    request_ids: tuple[str, ...]
    logprobs: tuple[int | None, ...]  # host: what each request wants reported
    token_rows: Tensor  # which of the step's T rows the logits come from
    slots: Tensor
    seeds: Tensor
    positions: Tensor  # of the sampled token: the key of its random numbers
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    bias_rows: Tensor  # [M] row of S, token and value of every biased logit
    bias_tokens: Tensor
    bias_values: Tensor
    banned_rows: Tensor  # [M] row of S and token of every logit that min_tokens forbids
    banned_tokens: Tensor
    any_random: bool
    any_truncated: bool  # top_k or top_p
    any_min_p: bool
    any_penalty: bool

    @property
    def most_logprobs(self) -> int | None:
        """The largest number of alternatives anyone wants; None when nobody wants log probabilities."""
        return max((n for n in self.logprobs if n is not None), default=None)

    def repeated(self, rows: int) -> SamplingBatch:
        """The first request's parameters `rows` times, without biased or banned tokens: a full batch to measure."""
        first: dict[str, Any] = {
            f.name: value[:1].expand(rows)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor) and value.numel()
        }
        return replace(self, request_ids=self.request_ids * rows, logprobs=self.logprobs[:1] * rows, **first)


@dataclass(frozen=True)
class PackedSampling:
    """Sections of a SamplingBatch on their way to the device."""

    requests: tuple[ScheduledRequest, ...]
    ints: dict[str, Section]
    floats: dict[str, Section]

    def on_device(self, staging: StagingBuffer) -> SamplingBatch:
        """Views of the sent sections; call after `send`."""
        params = [r.sampling for r in self.requests]
        return SamplingBatch(
            request_ids=tuple(r.request_id for r in self.requests),
            logprobs=tuple(p.logprobs for p in params),
            any_random=any(p.temperature > 0 for p in params),
            any_truncated=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
            any_min_p=any(p.temperature > 0 and p.min_p > 0 for p in params),
            any_penalty=any(has_penalty(p) for p in params),
            **{name: staging.ints(section) for name, section in self.ints.items()},
            **{name: staging.floats(section) for name, section in self.floats.items()},
        )


def has_penalty(params: SamplingParams) -> bool:
    """Whether the request's logits depend on the tokens it has seen."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def slot_histories(batch: ScheduledBatch) -> list[SlotHistory]:
    """Slots whose penalty state must be rebuilt before this step samples: new in the slot, and penalised."""
    return [
        SlotHistory(r.slot, r.prompt_token_ids, r.output_token_ids)
        for r in batch.requests
        if r.first_in_slot and has_penalty(r.sampling)
    ]


def pack_sampling(
    batch: ScheduledBatch, staging: StagingBuffer, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> PackedSampling | None:
    """Put the parameters of every request with `samples` into `staging`; None when there is none.

    Biased and stop ids outside the vocabulary can never be sampled and are left out.
    """
    last_rows = np.cumsum([len(r.token_ids) for r in batch.requests]) - 1
    sampled = [(int(row), r) for row, r in zip(last_rows, batch.requests, strict=True) if r.samples]
    if not sampled:
        return None
    requests = tuple(r for _, r in sampled)
    params = [r.sampling for r in requests]
    bias = [
        (row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias if 0 <= token < vocab_size
    ]
    banned = [
        (row, token)
        for row, r in enumerate(requests)
        for token in _banned_tokens(r, eos_token_ids)
        if 0 <= token < vocab_size
    ]
    ints = {
        "token_rows": [row for row, _ in sampled],
        "slots": [r.slot for r in requests],
        "seeds": [_signed(p.seed) for p in params],
        "positions": [r.end for r in requests],
        "top_k": [p.top_k for p in params],
        "bias_rows": [row for row, _, _ in bias],
        "bias_tokens": [token for _, token, _ in bias],
        "banned_rows": [row for row, _ in banned],
        "banned_tokens": [token for _, token in banned],
    }
    floats = {
        "temperature": [p.temperature for p in params],
        "top_p": [p.top_p for p in params],
        "min_p": [p.min_p for p in params],
        "repetition_penalty": [p.repetition_penalty for p in params],
        "presence_penalty": [p.presence_penalty for p in params],
        "frequency_penalty": [p.frequency_penalty for p in params],
        "bias_values": [value for _, _, value in bias],
    }
    return PackedSampling(
        requests,
        {name: staging.put_ints(values) for name, values in ints.items()},
        {name: staging.put_floats(values) for name, values in floats.items()},
    )


def _banned_tokens(request: ScheduledRequest, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    params = request.sampling
    if request.num_output_tokens >= params.min_tokens:
        return ()
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))


def _signed(seed: int) -> int:
    """The seed modulo 2^64 as a signed word."""
    word = seed % _WORD
    return word - _WORD if word >= _WORD // 2 else word
