"""The ModelAdapter resource, a LoRA adapter of a ModelServe, and `spec.adapters`, the room that a ModelServe has for
them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from modelserve.api.model_source import HubRevision, SecretKeyRef
from modelserve.api.schema_types import (
    BY_TYPE,
    MAX_NAME_LENGTH,
    NAME_PATTERN,
    UNOBSERVED,
    ApiModel,
    Bytes,
    Condition,
    Count,
    DnsName,
    Generation,
    cel_rules,
)
from modelserve.api.unknown_fields import parsed_spec
from modelserve.model.adapters.addresses import BUCKET_ADDRESS, CLAIM_ADDRESS, HUB, HUB_ADDRESS, MOST_NAME, SERVED_NAME
from modelserve.model.weight_format import TextLinear
from modelserve.sizing.adapters import MOST_ADAPTERS, MOST_RANK, MOST_SLOTS

ADAPTER_KIND = "ModelAdapter"
ADAPTER_PLURAL = "modeladapters"
ADAPTER_SINGULAR = "modeladapter"
ADAPTER_SHORT_NAMES = ("ma",)

MAX_ADAPTER_NAME_LENGTH = 63
ADAPTER_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
AdapterTarget = Literal[  # as `modelserve adapter` prints them: linears as the engine fuses them
    "qkv",
    "o",
    "gate_up",
    "down",
    "per_layer_input_gate",
    "per_layer_projection",
    "per_layer_model_projection",
    "expert_gate_up",
    "expert_down",
]

ADAPTER_URI_PATTERN = rf"^({HUB_ADDRESS}|{BUCKET_ADDRESS}|{CLAIM_ADDRESS})$"
AdapterUri = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=ADAPTER_URI_PATTERN)]
ServedName = Annotated[str, StringConstraints(min_length=1, max_length=MOST_NAME, pattern=SERVED_NAME)]
VersionId = Annotated[str, StringConstraints(min_length=10, max_length=10, pattern=r"^[0-9a-f]{10}$")]

_SLOTS_OVER_MAX = "adapters.slots must be at most adapters.max"


class AdaptersSpec(ApiModel):
    """Room for LoRA adapters (ModelAdapter objects), which come and go without new pods."""

    model_config = cel_rules(("!has(self.slots) || self.slots <= self.max", _SLOTS_OVER_MAX))

    max: int = Field(
        ge=1,
        le=MOST_ADAPTERS,
        description="Most versions of adapters that a worker keeps in host memory; a rollout has two of one.",
    )
    rank: int | None = Field(
        default=None, ge=1, le=MOST_RANK, description="Largest rank that is taken; left out: 16. It sizes a slot."
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SLOTS,
        description="Adapters in GPU memory at a time, and so in one step; left out: max, at most 8.",
    )
    targets: tuple[AdapterTarget, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=9,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Kinds of linears that adapters may change, which size a slot; left out: all that the model has "
        "but experts (expert_gate_up, expert_down), which take many times what the others do together.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.slots is not None and self.slots > self.max:
            raise ValueError(f"{_SLOTS_OVER_MAX}: {self.slots} > {self.max}")
        if self.targets is not None and len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets names one more than once: {', '.join(self.targets)}")
        return self


class AdaptersPlan(ApiModel):
    """Room for adapters as planned; a setting that was left out is the plan's."""

    max: int = Field(ge=1, le=MOST_ADAPTERS, description="Versions of adapters in host memory.")
    slots: int = Field(ge=1, le=MOST_SLOTS, description="Adapters in GPU memory at a time.")
    rank: int = Field(ge=1, le=MOST_RANK, description="Largest rank.")
    targets: tuple[TextLinear, ...] = Field(max_length=9, description="Linears that adapters may change.")
    slots_bytes: Bytes = Field(description="Of all slots, on one GPU; a part of weightsBytes.")
    host_bytes: Bytes = Field(description="Of all copies in host memory of a worker on GPUs, in its pod's request.")


class ModelReference(ApiModel):
    """A ModelServe."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_LENGTH, pattern=NAME_PATTERN)] = Field(
        description="Name of the ModelServe."
    )
    namespace: DnsName | None = Field(
        default=None,
        description="Its namespace, which must have a ReferenceGrant for this one; left out: that of the adapter.",
    )


class AdapterRollout(ApiModel):
    """How a new version takes over."""

    weight: int = Field(
        default=100,
        ge=0,
        le=100,
        description="Percent of requests that the new version answers while both are served. At 100 the old one goes "
        "once the new one is Ready on all workers; below, both stay until it is raised, or uri is set back.",
    )


_NAME_RULE = (
    "has(self.servedName) == has(oldSelf.servedName) && "
    "(!has(self.servedName) || self.servedName == oldSelf.servedName)"
)
_REFERENCE_IS_FIXED = "modelRef cannot be changed: make another ModelAdapter"
_NAME_IS_FIXED = "servedName cannot be changed: make another ModelAdapter"
_REVISION_OF_HUB = "revision is of an hf:// address"


class ModelAdapterSpec(ApiModel):
    """A LoRA adapter, and the ModelServe that serves it."""

    model_config = cel_rules(
        ("self.modelRef == oldSelf.modelRef", _REFERENCE_IS_FIXED),
        (_NAME_RULE, _NAME_IS_FIXED),
        ("!has(self.revision) || self.uri.startsWith('hf://')", _REVISION_OF_HUB),
    )

    model_ref: ModelReference = Field(description="Who serves it.")
    uri: AdapterUri = Field(
        description="Directory with adapter_config.json and adapter_model.safetensors: hf://OWNER/NAME[/DIRECTORY], "
        "s3://BUCKET/PATH, or pvc://CLAIM/PATH of a claim that the ModelServe's workers mount. Another address is a "
        "new version.",
    )
    revision: HubRevision | None = Field(
        default=None,
        description="Branch, tag or commit of an hf:// address; left out: main. Another one is a new version; what a "
        "branch becomes later is not looked for.",
    )
    secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret of the adapter's own namespace with the access token for hf://; the installation has to "
        "let the operator read it.",
    )
    served_name: ServedName | None = Field(
        default=None, description="`model` of requests that ask for it; left out: the object's name."
    )
    pin: bool = Field(default=False, description="Whether it keeps its place in GPU memory while others come and go.")
    rollout: AdapterRollout = Field(default=AdapterRollout(), description="How a new version takes over.")

    @model_validator(mode="after")
    def _of_the_hub(self) -> Self:
        if self.revision is not None and not self.uri.startswith(HUB):
            raise ValueError(f"{_REVISION_OF_HUB}; uri is {self.uri}")
        return self

    @classmethod
    def parse(cls, spec: object) -> tuple[Self, tuple[str, ...]]:
        """See `parsed_spec`."""
        return parsed_spec(cls, spec)


class AdapterVersion(ApiModel):
    """One version: what an address and a revision stand for."""

    id: VersionId = Field(description="Digest of address and revision.")
    uri: AdapterUri = Field(description="Its address.")
    revision: HubRevision | None = Field(default=None, description="Its revision.")
    weight: int = Field(default=100, ge=0, le=100, description="Percent of the adapter's requests that it answers.")
    digest: Annotated[str, StringConstraints(max_length=128)] | None = Field(
        default=None, description="Of its files, as the workers found them."
    )
    ready_workers: Count = Field(default=0, description="Workers on which it is Ready.")


class AdapterProbe(ApiModel):
    """How its answers differ from the base's, measured by the worker on which they differ least."""

    kl: Annotated[str, StringConstraints(max_length=24, pattern=r"^[0-9]+(\.[0-9]+)?(e-?[0-9]+)?$")] = Field(
        description="Mean KL divergence from the base's next-token probabilities, in nats."
    )
    top1_changed: Annotated[str, StringConstraints(max_length=24, pattern=r"^[0-9]+(\.[0-9]+)?(e-?[0-9]+)?$")] = Field(
        description="Share of positions at which another token is the likeliest."
    )
    prompts: Count = Field(description="Prompts of the probe.")
    strength: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        default=None,
        description="How large its terms are beside the products that they are added to, by kind of linear: the median "
        "over layers.",
    )


class AdapterWorkers(ApiModel):
    """Workers of the ModelServe, as far as the adapter goes."""

    ready: Count = Field(description="Workers that serve the version that the spec names.")
    total: Count = Field(description="Workers that should.")


class WorkerProblem(ApiModel):
    """Why one worker does not serve it."""

    worker: DnsName = Field(description="Name of the pod.")
    reason: Annotated[str, StringConstraints(max_length=64)] = Field(description="In one word.")
    message: Annotated[str, StringConstraints(max_length=1024)] = Field(description="In words.")


MOST_PROBLEMS = 8


class ModelAdapterStatus(ApiModel):
    """What became of it. The operator's alone."""

    observed_generation: Generation | None = Field(default=None, description="Generation of the spec this is about.")
    conditions: tuple[Condition, ...] = Field(
        default=(UNOBSERVED,),
        max_length=16,
        json_schema_extra=BY_TYPE,
        description="Ready, Accepted, Reconciling and Stalled.",
    )
    served_name: ServedName | None = Field(default=None, description="`model` of requests that ask for it.")
    active_version: AdapterVersion | None = Field(
        default=None, description="The version that serves; a broken new one leaves it where it is."
    )
    next_version: AdapterVersion | None = Field(
        default=None, description="The version of the spec, while it is not the active one."
    )
    previous_version: AdapterVersion | None = Field(default=None, description="What the active one took over from.")
    digest: Annotated[str, StringConstraints(max_length=128)] | None = Field(
        default=None, description="Of the active version's files."
    )
    rank: Count | None = Field(default=None, description="Largest rank in the active version's files.")
    size_bytes: Bytes | None = Field(default=None, description="What the active version takes on a worker.")
    probe: AdapterProbe | None = Field(default=None, description="What it changes.")
    workers: AdapterWorkers | None = Field(default=None, description="Where it is served.")
    problems: tuple[WorkerProblem, ...] = Field(
        default=(), max_length=MOST_PROBLEMS, description=f"Of workers that do not serve it, {MOST_PROBLEMS} at most."
    )
    ready_on: Annotated[str, StringConstraints(max_length=24)] | None = Field(
        default=None, description="Workers that serve it, of how many."
    )
