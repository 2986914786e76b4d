"""How long the steps of a running worker take: what it says on /v1/plan, and what the operator compares and learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

StepKind = Literal["Decode", "Mixed", "Prefill"]
STEP_KINDS: tuple[StepKind, ...] = ("Decode", "Mixed", "Prefill")
MAX_MEASURED = 16  # entries of one report
Figure = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


class MeasuredSteps(BaseModel):
    """Means over recent steps of one kind and similar size. Fields are camel case in JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    kind: StepKind  # of decodes alone, of both, of prompts alone
    steps: int = Field(ge=1, lt=1 << 31)  # that the means are of
    milliseconds: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]  # from the end of the step before
    requests: Figure  # that decode
    context_tokens: Figure  # in the cache of each of them
    prompt_tokens: Figure  # rows of prompts
    prompt_context: Figure  # keys that one of those rows attends to

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)
