"""What 8-bit caches cost weights, as status shows it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from modelserve.api.schema_types import ApiModel, Count, DecimalString, Product, Tokens
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

MAX_QUALITIES = 32


class MeasuredCacheQuality(ApiModel):
    """What an 8-bit cache costs these weights on one accelerator beside a 16-bit one, as an idle worker measured it."""

    accelerator: Product = Field(description="Accelerator product, or CPU.")
    dtype: KVCacheDtype = Field(description="Storage type of the cache that was judged.")
    layout: KVCacheLayout = Field(description="Its rows of global layers.")
    holds: bool = Field(description="Whether a plan may choose it where spec.kvCache.dtype is left out.")
    divergence_nats: DecimalString = Field(
        description="Mean Kullback-Leibler divergence of a token, of the text where it is largest."
    )
    same_token_percent: DecimalString = Field(
        description="Places with the same likeliest token, of the text where they are fewest."
    )
    needles: Count = Field(description="Facts far back in a long text that the 16-bit cache finds.")
    needles_found: Count = Field(description="Those of them that the 8-bit cache finds, too.")
    tokens: Tokens = Field(description="Places that were compared.")
    context_tokens: Tokens = Field(description="Tokens of the longest text.")


CacheQualities = Annotated[
    tuple[MeasuredCacheQuality, ...],
    Field(max_length=MAX_QUALITIES, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
]
