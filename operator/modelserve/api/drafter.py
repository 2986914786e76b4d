"""`spec.drafter` of a ModelServe, what proposes tokens that the model verifies; and what a plan makes of it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from modelserve.api.model_source import ModelUri
from modelserve.api.schema_types import ApiModel, Tokens, cel_rules

_TWO_ASSISTANTS = "uri and published name two assistants: leave one of them out"
_PROPOSES_RULE = (
    "(!has(self.numSpeculativeTokens) && !has(self.revision)) || has(self.uri) || "
    "(has(self.published) && self.published) || (has(self.promptLookup) && self.promptLookup)"
)
_NOTHING_PROPOSES = "numSpeculativeTokens and revision are of what proposes tokens: give uri, published or promptLookup"


class DrafterSpec(ApiModel):
    """What proposes tokens that the model verifies, many in a step; no answer changes by it. An assistant that cannot
    be had keeps no model from being served: it is served without, and says so.
    """

    model_config = cel_rules(
        ("!has(self.uri) || !has(self.published) || !self.published", _TWO_ASSISTANTS),
        (_PROPOSES_RULE, _NOTHING_PROPOSES),
    )

    uri: ModelUri | None = Field(
        default=None,
        description="Address of a drafter of this model, an MTP assistant, DFlash or DSpark: hf://OWNER/NAME, fetched "
        "with model.authSecretRef and kept where the model is or in storage, or pvc://CLAIM/PATH.",
    )
    published: bool | None = Field(
        default=None,
        description="True: the assistant that is published with the model, on accelerators where the plan expects it "
        "to pay. Models under hf://google/ have one.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        description="Branch, tag or commit of an assistant of the Hub; left out: main.",
    )
    prompt_lookup: bool | None = Field(
        default=None,
        description="True: propose what followed the same tokens earlier in a request, or in its `prediction`; for "
        "edits, quotations and code, with or without an assistant.",
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="Tokens that are proposed at a time, all of which are verified; left out: up to 8, or a whole "
        "block of a drafter that makes one, of which each request has as many verified as pay.",
    )

    @property
    def asks(self) -> bool:
        """Whether anything is to propose tokens."""
        return bool(self.uri or self.published or self.prompt_lookup)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.uri and self.published:
            raise ValueError(f"{_TWO_ASSISTANTS}; uri is {self.uri}")
        if (self.num_speculative_tokens or self.revision) and not self.asks:
            raise ValueError(_NOTHING_PROPOSES)
        return self


class DrafterPlan(ApiModel):
    """What proposes tokens to the workers of a plan."""

    uri: str | None = Field(
        default=None, max_length=512, description="Address of the assistant; absent: prompt lookup alone."
    )
    revision: str | None = Field(
        default=None, max_length=128, description="Branch, tag or commit of an assistant of the Hub."
    )
    prompt_lookup: bool | None = Field(default=None, description="Whether repetitions are looked up as well.")
    num_speculative_tokens: Tokens | None = Field(
        default=None, description="Tokens that are proposed and verified at a time; absent: up to 8, as many as pay."
    )
