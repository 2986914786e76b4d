"""How often a worker's drafts are right: what it says on /v1/plan, and what the operator tells and learns."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Chance = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class MeasuredDrafts(BaseModel):
    """Of a worker that drafts, or was to. Fields are camel case in JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    problem: Annotated[str, StringConstraints(max_length=2048)] | None = None  # why there is no drafter, though asked
    low_acceptance: bool = False  # for minutes hardly any was right
    acceptance: Chance | None = None  # of recent drafts to be right where those before them were
    acceptances: tuple[Chance | None, ...] | None = None  # the same of each of several drafters, in the worker's order

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)
