"""What an 8-bit cache costs these weights: what a worker says on /v1/plan, what the operator keeps, and when it is
little enough to be chosen unasked (decision 0044)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

MOST_KL, LEAST_SAME = 0.01, 0.98  # nats; share of places
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class CacheQuality(BaseModel):
    """One comparison of an 8-bit cache with a 16-bit one, of the same weights over the same texts, token by token.

    `kl` and `same` are means over a text's places, of the text that comes off worst: one that breaks is not hidden by
    others. Fields are camel case in JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    dtype: KVCacheDtype  # of the cache that is judged
    layout: KVCacheLayout
    kl: Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]  # nats, from 16 bits to 8
    same: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]  # both have the same likeliest token
    needles: _Count  # facts far back that the 16-bit cache finds
    found: _Count  # of these, what the 8-bit one finds
    tokens: Annotated[int, Field(ge=1, lt=1 << 31)]  # places compared, of all texts
    context: Annotated[int, Field(ge=1, lt=1 << 31)]  # tokens of the longest text

    @property
    def holds(self) -> bool:
        """Whether the cache may be chosen unasked."""
        return self.kl <= MOST_KL and self.same >= LEAST_SAME and self.found >= self.needles

    @property
    def figures(self) -> str:
        """In words, with the limits."""
        return (
            f"KL {self.kl:.4f} nats of at most {MOST_KL:g}, the same likeliest token in {100 * self.same:.1f} % of at "
            f"least {100 * LEAST_SAME:g}, {self.found} of {self.needles} facts found over {self.context:,} tokens"
        )

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)
