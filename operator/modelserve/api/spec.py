"""`spec` of a ModelServe: what to serve. A field left out is the operator's to choose."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from modelserve.api.capacity_buffer import CapacityBufferSpec
from modelserve.api.drafter import DrafterSpec
from modelserve.api.gateway import GatewaySpec
from modelserve.api.media.modalities import ModalitiesSpec
from modelserve.api.model_adapter import AdaptersSpec
from modelserve.api.model_source import ModelSource, SecretKeyRef
from modelserve.api.plan_policy import PlanSpec
from modelserve.api.pod import PodOverrides
from modelserve.api.schema_types import (
    ApiModel,
    Count,
    DecimalString,
    DnsName,
    LabelKey,
    LabelValue,
    PathSegments,
    Price,
    Product,
    Quantity,
    Share,
    Tokens,
    cel_rules,
    is_asked,
)
from modelserve.sizing.pages import KVCacheLayout
from modelserve.sizing.rank_settings import Profile

WorkerPolicy = Literal["Proposed", "OnEdit", "Rolling"]
Objective = Literal["Latency", "Throughput", "MaxContext", "Cost"]
ServableKVCacheDtype = Literal["bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"]


_MIN_OVER_MAX = "minModelLen must be at most maxModelLen"


class ContextSpec(ApiModel):
    """Context length, in tokens of prompt and output together."""

    model_config = cel_rules(
        ("!has(self.minModelLen) || !has(self.maxModelLen) || self.minModelLen <= self.maxModelLen", _MIN_OVER_MAX)
    )

    max_model_len: Tokens | None = Field(
        default=None, description="Most tokens of one request; left out: the most that the model and the pool allow."
    )
    min_model_len: Tokens | None = Field(
        default=None,
        description="Fewest tokens that are still worth serving, when a GPU has less memory than planned; "
        "left out: maxModelLen when that is given, else 2,048 or the limit of the model.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_model_len and self.max_model_len and self.min_model_len > self.max_model_len:
            raise ValueError(f"{_MIN_OVER_MAX}: {self.min_model_len} > {self.max_model_len}")
        return self


class WorkloadSpec(ApiModel):
    """The traffic expected of one replica; it steers the choice, it limits nothing."""

    input_tokens: Tokens | None = Field(
        default=None, description="Typical prompt length in tokens; of a session with turns, of its first request."
    )
    output_tokens: Tokens | None = Field(default=None, description="Typical output length in tokens.")
    concurrency: int | None = Field(default=None, ge=1, le=4096, description="Requests in progress at once.")
    turns: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Requests of a session, each of which sends the one before it again, with its answer. With it, "
        "sharedPrefixTokens or sessions, the plan says what the prefix cache is expected to find.",
    )
    turn_tokens: Tokens | None = Field(
        default=None, description="New tokens of each request behind a session's first; left out: 512."
    )
    shared_prefix_tokens: Tokens | None = Field(
        default=None, description="Tokens at the start of the prompts that are the same in all sessions."
    )
    sessions: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Sessions that go on at a time, most of them waiting for their users; left out: concurrency.",
    )
    draft_acceptance: Share | None = Field(
        default=None,
        description="Chance of a draft to be right where those before it are, as a decimal string; left out: what "
        "workers of this model measured, else 0.75. Expected speeds with spec.drafter follow from it.",
    )


class ParallelismSpec(ApiModel):
    """How a replica is spread over the GPUs of its node."""

    tensor: int | None = Field(
        default=None, ge=1, le=64, description="Tensor-parallel size = GPUs of a replica; left out: planned."
    )


_SEQS_OVER_TOKENS = "maxNumSeqs must be at most maxNumBatchedTokens: each request takes at least one token of a step"

_NOTHING_TO_TELL = "kvEventsPort tells what is cached, which prefixCaching false switches off: leave one of them out"


class EngineSpec(ApiModel):
    """Settings of the scheduler."""

    model_config = cel_rules(
        (
            "!has(self.maxNumSeqs) || !has(self.maxNumBatchedTokens) || self.maxNumSeqs <= self.maxNumBatchedTokens",
            _SEQS_OVER_TOKENS,
        ),
        ("!has(self.kvEventsPort) || !has(self.prefixCaching) || self.prefixCaching", _NOTHING_TO_TELL),
    )

    max_num_batched_tokens: int | None = Field(
        default=None, ge=16, le=1 << 17, description="Most tokens of one step: the prefill chunk and all decodes."
    )
    max_num_mixed_tokens: int | None = Field(
        default=None,
        ge=16,
        le=1 << 17,
        description="Most tokens of a step in which requests decode; left out: what about 40 ms compute. "
        "On GPUs half as many while few prompts wait, and up to three times, 1,536 at most, while a crowd does.",
    )
    max_num_seqs: int | None = Field(default=None, ge=1, le=4096, description="Most requests of one step.")
    prefix_caching: bool | None = Field(
        default=None,
        description="Whether requests that begin alike share what was computed, in memory that is free anyway; left "
        "out: as the worker's release does, which is true from 0.2.0 on.",
    )
    kv_events_port: int | None = Field(default=None, ge=8001, le=65535, description="Port for vLLM's KV events.")
    profile: Profile | None = Field(default=None, description="exact: an answer's bits are its request's own; slower.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(f"{_SEQS_OVER_TOKENS}: {self.max_num_seqs} > {self.max_num_batched_tokens}")
        if self.kv_events_port and self.prefix_caching is False:
            raise ValueError(f"{_NOTHING_TO_TELL}; kvEventsPort is {self.kv_events_port}")
        return self


_UTILIZATION_RULE = (
    "!has(self.gpuMemoryUtilization) || "
    "(double(self.gpuMemoryUtilization) > 0.0 && double(self.gpuMemoryUtilization) <= 0.99)"
)
_UTILIZATION = "gpuMemoryUtilization must be above 0 and at most 0.99"


class KVCacheSpec(ApiModel):
    """The key/value cache."""

    model_config = cel_rules(
        (_UTILIZATION_RULE, _UTILIZATION),
    )

    dtype: ServableKVCacheDtype | None = Field(
        default=None,
        description="Storage type of cache rows; left out: bfloat16, or int8 where only that "
        "holds maxModelLen and its quality was measured and holds (status.cacheQuality). "
        "fp8_e4m3 needs compute capability 8.9.",
    )
    layout: KVCacheLayout | None = Field(
        default=None,
        description="Rows of global layers: kv (K and V), v_only (V; K is derived exactly). Left out: v_only "
        "where the model allows it.",
    )
    gpu_memory_utilization: DecimalString | None = Field(
        default=None, description="Share of GPU memory the worker may use, as a decimal string; left out: 0.9."
    )
    host_memory: Quantity | None = Field(
        default=None,
        description="Host memory of each worker on GPUs, of all its GPUs together, for cached prefixes that the pool "
        "gives up (`64Gi`). It is pinned, and a part of the pod's memory request and limit. Left out: none.",
    )

    @model_validator(mode="after")
    def _share(self) -> Self:
        share = self.gpu_memory_utilization
        if share is not None and not Decimal(0) < Decimal(share) <= Decimal("0.99"):
            raise ValueError(f"{_UTILIZATION}: {share}")
        return self


class AcceleratorsSpec(ApiModel):
    """Which accelerators may be used."""

    products: tuple[Product, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Values of the node label nvidia.com/gpu.product that may be used, or CPU. Left out: every GPU "
        "product of the cluster; the CPU is used only where it is named here.",
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, max_length=16, description="Labels a node must have."
    )
    max_per_replica: int | None = Field(
        default=None, ge=1, le=64, description="Most GPUs of one replica; left out: as many as one node has, up to 8."
    )
    cost_per_hour: dict[str, Price] = Field(
        default_factory=dict,
        max_length=16,
        description="Price of one GPU-hour by product, in any one currency, for objective Cost.",
    )


class StorageSpec(ApiModel):
    """Where downloads of hf:// checkpoints are kept."""

    pvc_name: DnsName = Field(description="PersistentVolumeClaim of the same namespace.")
    sub_path: PathSegments | None = Field(default=None, description="Directory inside the claim; left out: its root.")


_REPLACED_RULE = "!has(self.maxSurge) || self.maxSurge > 0 || (has(self.allowDowntime) && self.allowDowntime)"
_NEVER_REPLACED = (
    "maxSurge 0 with allowDowntime false replaces nothing, ever: set maxSurge to 1 or more, or allowDowntime to true"
)


class RolloutSpec(ApiModel):
    """How a new revision replaces the old one."""

    model_config = cel_rules((_REPLACED_RULE, _NEVER_REPLACED))

    max_surge: int = Field(default=1, ge=0, le=64, description="Pods of the new revision above replicas.")
    allow_downtime: bool = Field(
        default=False, description="True: the old revision may stop first when both do not fit the cluster together."
    )
    # Without a default of the schema: 0.1.0 refuses every object that has a field which it does not know.
    on_eviction: Literal["Allow", "SurgeFirst"] | None = Field(
        default=None,
        description="Of workers on a node that is drained or about to be removed. Allow, or left out: one at a time "
        "is evicted, also the only one. SurgeFirst: none is; another gets ready elsewhere first, then it goes.",
    )
    drain_seconds: int = Field(
        default=60, ge=0, le=3600, description="Seconds a stopping pod may take to finish its requests."
    )
    worker_policy: WorkerPolicy | None = Field(
        default=None,
        description="When another worker image of the operator takes over, where spec.image is left out. Proposed: "
        "once it is approved. OnEdit: with the next edit that makes new pods. Rolling: by itself, with the same plan, "
        "as many ModelServes at a time as the operator's budget says. Left out: as the operator is set.",
    )

    @model_validator(mode="after")
    def _replaces(self, info: ValidationInfo) -> Self:
        if is_asked(info) and self.max_surge == 0 and not self.allow_downtime:
            raise ValueError(_NEVER_REPLACED)
        return self


_TENSOR_RULE = (
    "!has(self.parallelism) || !has(self.parallelism.tensor) || !has(self.accelerators) || "
    "!has(self.accelerators.maxPerReplica) || self.parallelism.tensor <= self.accelerators.maxPerReplica"
)
_TENSOR_OVER_MAX = "parallelism.tensor must be at most accelerators.maxPerReplica"
_HOST_MEMORY_RULE = (
    "!has(self.kvCache) || !has(self.kvCache.hostMemory) || !has(self.engine) || "
    "!has(self.engine.prefixCaching) || self.engine.prefixCaching"
)
_HOST_MEMORY_UNUSED = (
    "kvCache.hostMemory holds cached prefixes, which engine.prefixCaching false switches off: leave one of them out"
)


class ModelServeSpec(ApiModel):
    """What to serve, and limits on how. Only model.uri is required."""

    model_config = cel_rules(
        (_TENSOR_RULE, _TENSOR_OVER_MAX),
        (_HOST_MEMORY_RULE, _HOST_MEMORY_UNUSED),
    )

    model: ModelSource = Field(description="The checkpoint to serve.")
    drafter: DrafterSpec | None = Field(
        default=None, description="What proposes tokens that the model verifies, many in a step; left out: nothing."
    )
    replicas: Count = Field(
        default=1, description="Pods; each is a whole model on one node. Leave it out when an autoscaler owns it."
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$",
        description="Worker image; left out: the operator's own release.",
    )
    api_key_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret with the key that clients must send as a bearer token; left out: no key is asked for.",
    )
    context: ContextSpec | None = Field(default=None, description="Context length.")
    workload: WorkloadSpec | None = Field(default=None, description="Expected traffic of one replica.")
    objective: Objective | None = Field(default=None, description="What the plan optimises; left out: Throughput.")
    parallelism: ParallelismSpec | None = Field(default=None, description="Spread over GPUs.")
    engine: EngineSpec | None = Field(default=None, description="Scheduler settings.")
    kv_cache: KVCacheSpec | None = Field(default=None, description="Key/value cache settings.")
    adapters: AdaptersSpec | None = Field(
        default=None, description="Room for LoRA adapters, ModelAdapter objects; left out: none are served."
    )
    modalities: ModalitiesSpec | None = Field(
        default=None, description="What requests may hold beside text; left out: nothing."
    )
    accelerators: AcceleratorsSpec | None = Field(default=None, description="Accelerators that may be used.")
    storage: StorageSpec | None = Field(default=None, description="Cache of hf:// downloads.")
    plan: PlanSpec = Field(default=PlanSpec(), description="What happens with a plan.")
    rollout: RolloutSpec = Field(default=RolloutSpec(), description="How a new revision replaces the old one.")
    revision_history_limit: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Revisions that are kept, beside those that run, to go back to; left out: 5.",
    )
    gateway: GatewaySpec | None = Field(
        default=None, description="A route of the Gateway API to the workers; left out: none."
    )
    capacity_buffer: CapacityBufferSpec | None = Field(
        default=None, description="Room for more workers that an autoscaler keeps ready; left out: none."
    )
    pod: PodOverrides = Field(default=PodOverrides(), description="Additions to the worker pods.")

    @model_validator(mode="after")
    def _gpus(self) -> Self:
        tensor = self.parallelism.tensor if self.parallelism else None
        limit = self.accelerators.max_per_replica if self.accelerators else None
        if tensor and limit and tensor > limit:
            raise ValueError(f"{_TENSOR_OVER_MAX}: {tensor} > {limit}")
        host = self.kv_cache.host_memory if self.kv_cache else None
        if host is not None and self.engine and self.engine.prefix_caching is False:
            raise ValueError(f"{_HOST_MEMORY_UNUSED}; hostMemory is {host}")
        return self
