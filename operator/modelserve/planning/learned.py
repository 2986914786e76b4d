"""What workers measured before, as a plan may use it: bytes of memory terms, and how true expected times are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from modelserve.api.status import SpeedFactors
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout


class LearnedTerms(Protocol):
    """Looks up the measured terms of a rank; those it does not name keep their predicted bytes."""

    def __call__(
        self,
        product: str,
        *,
        tensor_parallel_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        cache_format: str,  # DTYPE/LAYOUT of the KV cache, as "bfloat16/v_only"
    ) -> Mapping[str, int]:
        """Bytes by term (weights, activation, and the names of `overhead_terms`); empty when nothing is known."""


def no_terms(
    product: str,  # noqa: ARG001 - the arguments are those of every LearnedTerms
    *,
    tensor_parallel_size: int,  # noqa: ARG001
    max_num_batched_tokens: int,  # noqa: ARG001
    max_num_seqs: int,  # noqa: ARG001
    cache_format: str,  # noqa: ARG001
) -> Mapping[str, int]:
    """The empty calibration."""
    return {}


class StepFactors(NamedTuple):
    """Measured over expected time, by kind of step."""

    decode: float = 1.0
    mixed: float = 1.0
    prefill: float = 1.0


AS_EXPECTED = StepFactors()


@dataclass(frozen=True)
class Learned:
    """What is known of one model, in one weight format, under one engine version."""

    terms: LearnedTerms = no_terms
    speed: tuple[SpeedFactors, ...] = ()
    acceptance: Mapping[str, float] = field(default_factory=dict)  # of drafts, by `pair_of`

    def step_factors(
        self, product: str, *, tensor_parallel_size: int, dtype: KVCacheDtype, layout: KVCacheLayout
    ) -> StepFactors:
        """Of a kind of rank that was measured; AS_EXPECTED for every other."""
        for each in self.speed:
            cache = each.kv_cache
            if (each.accelerator, each.tensor_parallel) == (product, tensor_parallel_size) and (
                cache.dtype,
                cache.layout,
            ) == (dtype, layout):
                return StepFactors(float(each.decode), float(each.mixed), float(each.prefill))
        return AS_EXPECTED


def pair_of(model_uri: str, drafter_uri: str) -> str:
    """Names a model with an assistant: ten hex digits of a digest over their addresses."""
    return hashlib.sha256(f"{model_uri} {drafter_uri}".encode()).hexdigest()[:10]


NOTHING_LEARNED = Learned()
