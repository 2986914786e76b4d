"""`spec.drafter` of a ModelServe, what proposes tokens that the model verifies; and what a plan makes of it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from modelserve.api.model_source import HubRevision, ModelUri
from modelserve.api.schema_types import ApiModel, Tokens, cel_rules
from modelserve.model.drafters.reading import DrafterKind
from modelserve.sizing.speculation import MOST_DRAFTERS

_TWO_ASSISTANTS = "uri and published name two assistants: leave one of them out"
_NAMED_TWICE = "models names the drafters, each with its revision: leave uri, published and revision out"
_NAMED_TWICE_RULE = (
    "!has(self.models) || (!has(self.uri) && !has(self.revision) && (!has(self.published) || !self.published))"
)
_ALIKE = (
    "two models are one of kind MTP and one of kind DFlash or DSpark: a worker has one assistant and one that drafts "
    "blocks"
)
_ALIKE_RULE = "!has(self.models) || size(self.models) < 2 || self.models.exists_one(each, each.kind == 'MTP')"
_NO_CHOICE = (
    "numSpeculativeTokens has all drafts of one drafter verified, and of two models the one that pays is asked step by "
    "step: leave it out, or name one"
)
_NO_CHOICE_RULE = "!has(self.models) || size(self.models) < 2 || !has(self.numSpeculativeTokens)"
_PROPOSES_RULE = (
    "(!has(self.numSpeculativeTokens) && !has(self.revision)) || has(self.uri) || has(self.models) || "
    "(has(self.published) && self.published) || (has(self.promptLookup) && self.promptLookup)"
)
_NOTHING_PROPOSES = (
    "numSpeculativeTokens and revision are of what proposes tokens: give uri, published, models or promptLookup"
)


class DrafterModel(ApiModel):
    """A drafter beside another."""

    kind: DrafterKind = Field(
        description="MTP: an assistant, which drafts token by token. DFlash (DFlash2, too) or DSpark: a drafter of "
        "blocks. One that turns out to be of another kind is refused."
    )
    uri: ModelUri = Field(description="Address, as drafter.uri.")
    revision: HubRevision | None = Field(default=None, description="Branch, tag or commit of the Hub; left out: main.")


class DrafterSpec(ApiModel):
    """What proposes tokens that the model verifies, many in a step; no answer changes by it. An assistant that cannot
    be had keeps no model from being served: it is served without, and says so.
    """

    model_config = cel_rules(
        ("!has(self.uri) || !has(self.published) || !self.published", _TWO_ASSISTANTS),
        (_PROPOSES_RULE, _NOTHING_PROPOSES),
        (_NAMED_TWICE_RULE, _NAMED_TWICE),
        (_ALIKE_RULE, _ALIKE),
        (_NO_CHOICE_RULE, _NO_CHOICE),
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
    revision: HubRevision | None = Field(
        default=None, description="Branch, tag or commit of an assistant of the Hub; left out: main."
    )
    models: tuple[DrafterModel, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_DRAFTERS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["kind"]},
        description="In place of uri: an MTP assistant and a drafter of blocks together, of which each step asks the "
        "one that pays. One that has no room, or brings nothing beside the other, the plan leaves out, and says so.",
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
        return bool(self.uri or self.published or self.models or self.prompt_lookup)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.uri and self.published:
            raise ValueError(f"{_TWO_ASSISTANTS}; uri is {self.uri}")
        if (self.num_speculative_tokens or self.revision) and not self.asks:
            raise ValueError(_NOTHING_PROPOSES)
        if self.models and (self.uri or self.published or self.revision):
            raise ValueError(_NAMED_TWICE)
        if self.models and len(self.models) > 1:
            if [each.kind for each in self.models].count("MTP") != 1:
                raise ValueError(f"{_ALIKE}; they are {' and '.join(each.kind for each in self.models)}")
            if self.num_speculative_tokens:
                raise ValueError(_NO_CHOICE)
        return self


class PlannedDrafter(ApiModel):
    """One of two drafters."""

    kind: DrafterKind = Field(description="As spec.drafter.models has it.")
    uri: str = Field(max_length=512, description="Its address.")
    revision: str | None = Field(default=None, max_length=128, description="Branch, tag or commit of the Hub.")


class DrafterPlan(ApiModel):
    """What proposes tokens to the workers of a plan."""

    uri: str | None = Field(
        default=None, max_length=512, description="Address of the assistant; absent: prompt lookup alone, or models."
    )
    revision: str | None = Field(
        default=None, max_length=128, description="Branch, tag or commit of an assistant of the Hub."
    )
    models: tuple[PlannedDrafter, ...] | None = Field(
        default=None,
        max_length=MOST_DRAFTERS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["kind"]},
        description="Both drafters, where there are two, in the worker's order.",
    )
    prompt_lookup: bool | None = Field(default=None, description="Whether repetitions are looked up as well.")
    num_speculative_tokens: Tokens | None = Field(
        default=None, description="Tokens that are proposed and verified at a time; absent: up to 8, as many as pay."
    )

    @property
    def named(self) -> tuple[tuple[str, str | None], ...]:
        """Address and revision of each drafter, in the worker's order."""
        if self.models:
            return tuple((each.uri, each.revision) for each in self.models)
        return () if self.uri is None else ((self.uri, self.revision),)
