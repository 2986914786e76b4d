"""What workers measured before, as a plan may use it: bytes of memory terms, and how true expected times are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from modelserve.api.status import SpeedFactors
from modelserve.quality.cache_quality import CacheQuality
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
    cache_quality: tuple[tuple[str, CacheQuality], ...] = ()  # of these very weights, with the accelerator product
    eight_bits_on: str = ""  # the product of a committed plan that took them, whatever was asked of one then

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

    def quality(self, product: str, dtype: KVCacheDtype, layout: KVCacheLayout) -> CacheQuality | None:
        """What a cache of this format costs on such an accelerator; None where nobody measured it."""
        of_format = (found for where, found in self.cache_quality if (where, found.dtype, found.layout) ==
                     (product, dtype, layout))  # fmt: skip
        return next(of_format, None)

    def takes_unasked(self, product: str, dtype: KVCacheDtype, layout: KVCacheLayout) -> bool:
        """Whether a plan may choose such a cache where nobody named one: its quality was measured and holds, or was not
        and the committed plan has it from before."""
        found = self.quality(product, dtype, layout)
        return found.holds if found is not None else product == self.eight_bits_on

    def why_withheld(self, tokens: int, product: str, dtype: KVCacheDtype, layout: KVCacheLayout) -> str:
        """Why a cache that would hold so many tokens of a request is not chosen, and what takes it."""
        found = self.quality(product, dtype, layout)
        state = "nobody has measured that yet" if found is None else f"measured there: {found.figures}"
        return (
            f"an {dtype} cache would hold {tokens:,} tokens of a request, and is chosen unasked only where its quality "
            f"holds for these weights on this accelerator: {state}; kvCache.dtype {dtype} takes it all the same"
        )


def pair_of(model_uri: str, drafter_uri: str) -> str:
    """Names a model with an assistant: ten hex digits of a digest over their addresses."""
    return hashlib.sha256(f"{model_uri} {drafter_uri}".encode()).hexdigest()[:10]


NOTHING_LEARNED = Learned()
