"""`status` of a ModelServe: conditions, the plan with its arithmetic, and predicted beside measured memory.

Byte figures are integers whose names end in Bytes and are per GPU; concurrency and money are decimal strings.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from modelserve.api.cache_quality import CacheQualities
from modelserve.api.drafter import DrafterPlan
from modelserve.api.media.modalities import AudioPlan, ImagePlan
from modelserve.api.model_adapter import AdaptersPlan
from modelserve.api.schema_types import (
    BY_TYPE,
    UNOBSERVED,
    ApiModel,
    Bytes,
    Condition,
    Count,
    DecimalString,
    Generation,
    GpuCount,
    LabelKey,
    LabelValue,
    Message,
    Product,
    SignedDecimalString,
    Tokens,
)
from modelserve.api.speed import CalibrationSpeed, ExpectedReuse, ExpectedSpeed
from modelserve.engine_args import DEFAULT_MAX_NUM_MIXED_TOKENS
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.sizing.rank_settings import Profile

MAX_CANDIDATES = 16
MAX_TERMS = 128
MAX_SPEED_FACTORS = 32

Verdict = Literal["Chosen", "Fits", "Refused"]
LimitedBy = Literal[
    "Memory",
    "ContextLength",
    "TensorParallel",
    "GPUsPerNode",
    "ComputeCapability",
    "Architecture",
    "Layout",
    "Dtype",
    "Concurrency",
    "Sharing",
    "HostMemory",
    "Cpu",
]
PageCount = Annotated[int, Field(ge=0, le=1 << 40, json_schema_extra={"format": "int64"})]


class NodeSelectorRequirement(ApiModel):
    """One expression over a node label (core/v1)."""

    key: LabelKey = Field(description="Node label.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(description="How it is compared.")
    values: tuple[LabelValue, ...] | None = Field(default=None, max_length=64, description="Values to compare with.")


class NodeSelectorTerm(ApiModel):
    """Expressions that must all hold; terms are alternatives."""

    match_expressions: tuple[NodeSelectorRequirement, ...] = Field(
        min_length=1, max_length=40, description="Expressions that must all hold."
    )


class KVCachePlan(ApiModel):
    """Storage of the key/value cache."""

    dtype: KVCacheDtype = Field(description="Storage type of cache rows.")
    layout: KVCacheLayout = Field(description="Rows of global layers.")


class GpuMemory(ApiModel):
    """Where the usable memory of one GPU goes. On the CPU: where the container's memory goes."""

    weights_bytes: Bytes = Field(description="Weights of this rank.")
    activation_bytes: Bytes = Field(description="Static workspace of one step.")
    overhead_bytes: Bytes = Field(description="Device context, libraries, communication and graphs.")
    kv_pool_bytes: Bytes = Field(description="Pool of key/value pages.")


class RequestBytes(ApiModel):
    """Pool bytes per GPU that one request holds at a context length; lengths above maxModelLen are left out."""

    at8k_bytes: Bytes | None = Field(default=None, description="At 8,192 tokens.")
    at32k_bytes: Bytes | None = Field(default=None, description="At 32,768 tokens.")
    at128k_bytes: Bytes | None = Field(default=None, description="At 131,072 tokens.")
    at_max_bytes: Bytes = Field(description="At maxModelLen tokens.")


class Concurrency(ApiModel):
    """Requests the pool holds at once: pool bytes over bytes of one request, rounded down to two decimals."""

    at8k: DecimalString | None = Field(default=None, description="Of 8,192 tokens each.")
    at32k: DecimalString | None = Field(default=None, description="Of 32,768 tokens each.")
    at128k: DecimalString | None = Field(default=None, description="Of 131,072 tokens each.")
    at_max: DecimalString = Field(description="Of maxModelLen tokens each.")


class SpeedFactors(ApiModel):
    """Measured over expected time of steps, for one model on one kind of rank; 1 where they agree within a tenth."""

    accelerator: Product = Field(description="Accelerator product.")
    tensor_parallel: GpuCount = Field(description="Tensor-parallel size.")
    kv_cache: KVCachePlan = Field(description="Storage of the key/value cache.")
    decode: DecimalString = Field(description="Of steps that only decode.")
    mixed: DecimalString = Field(description="Of steps with decodes and prompts.")
    prefill: DecimalString = Field(description="Of steps with prompts alone.")


class Candidate(ApiModel):
    """One accelerator and number of GPUs that was considered, with its arithmetic and verdict."""

    accelerator: Product = Field(description="Accelerator product, or CPU.")
    gpus_per_replica: GpuCount = Field(description="GPUs of one replica; 0 on the CPU.")
    tensor_parallel: GpuCount = Field(description="Tensor-parallel size.")
    verdict: Verdict = Field(description="Chosen, Fits (but another is better) or Refused.")
    limited_by: LimitedBy | None = Field(
        default=None, description="What refuses it, or what keeps maxModelLen below the model's own limit."
    )
    shortfall_bytes: Bytes | None = Field(
        default=None,
        description="Bytes missing per GPU, where memory refuses it, or of a node's, where HostMemory does.",
    )
    message: Message | None = Field(default=None, description="The verdict in a sentence.")
    remedy: Message | None = Field(default=None, description="A change that was itself planned and fits.")
    max_model_len: Tokens | None = Field(default=None, description="Most tokens of one request.")
    kv_cache: KVCachePlan | None = Field(default=None, description="Storage of the key/value cache.")
    per_gpu: GpuMemory | None = Field(default=None, description="Where the memory of one GPU goes.")
    concurrency: Concurrency | None = Field(default=None, description="Requests at once.")
    speed: ExpectedSpeed | None = Field(default=None, description="Expected rates.")
    reuse: ExpectedReuse | None = Field(
        default=None,
        description="What the prefix cache is expected to find, where workload says something of sessions.",
    )
    cost_per_hour: DecimalString | None = Field(default=None, description="Price of one replica-hour.")
    cost_per_million_tokens: DecimalString | None = Field(
        default=None, description="Price of a million output tokens at the expected rate."
    )


class EnginePlan(ApiModel):
    """Settings of the engine that sizing depends on."""

    max_num_batched_tokens: Tokens = Field(description="Most tokens of one step.")
    max_num_mixed_tokens: Tokens = Field(
        default=DEFAULT_MAX_NUM_MIXED_TOKENS, description="Most tokens of a step in which requests decode."
    )
    max_num_seqs: Tokens = Field(description="Most requests of one step.")
    min_model_len: Tokens = Field(description="Fewest tokens the worker may fall back to.")
    gpu_memory_utilization: DecimalString = Field(description="Share of accelerator memory the worker may use.")
    profile: Profile | None = Field(default=None, description="exact where it was asked for; else fast.")


class PlanStatus(ApiModel):
    """A plan. Only `candidates` and `message` are present when nothing fits."""

    hash: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{10}$",
        max_length=10,
        description="A digest of all that the engine depends on, as `modelserve plan` prints it.",
    )
    accelerator: Product | None = Field(default=None, description="Accelerator product, or CPU.")
    resource_name: LabelKey | None = Field(
        default=None,
        description="Extended resource that the pod asks for; without a slash it is the DeviceClass of its claim. "
        "Absent on the CPU.",
    )
    gpus_per_replica: GpuCount | None = Field(default=None, description="GPUs of one replica; 0 on the CPU.")
    node_selector_terms: tuple[NodeSelectorTerm, ...] | None = Field(
        default=None, max_length=MAX_TERMS, description="Where the pods may run; terms are alternatives."
    )
    tensor_parallel: GpuCount | None = Field(default=None, description="Tensor-parallel size.")
    max_model_len: Tokens | None = Field(default=None, description="Most tokens of one request.")
    container_memory_bytes: Bytes | None = Field(
        default=None, description="Memory limit of the worker container that the plan divides; on the CPU only."
    )
    kv_cache: KVCachePlan | None = Field(default=None, description="Storage of the key/value cache.")
    host_cache_bytes: Bytes | None = Field(
        default=None, description="Pinned host memory of each worker for cached prefixes, where any was asked for."
    )
    adapters: AdaptersPlan | None = Field(default=None, description="Room for LoRA adapters, where any was asked for.")
    images: ImagePlan | None = Field(default=None, description="Room for images, where any was asked for.")
    audio: AudioPlan | None = Field(default=None, description="Room for sounds, where any was asked for.")
    engine: EnginePlan | None = Field(default=None, description="Settings of the engine that sizing depends on.")
    drafter: DrafterPlan | None = Field(
        default=None, description="What proposes tokens, where anything is asked to, has room and pays."
    )
    per_gpu: GpuMemory | None = Field(default=None, description="Where the memory of one GPU goes.")
    per_request: RequestBytes | None = Field(default=None, description="Bytes one request holds.")
    concurrency: Concurrency | None = Field(default=None, description="Requests at once.")
    target_concurrency: Tokens | None = Field(
        default=None,
        description="Requests, running and waiting, that one replica is planned to answer at once under spec.workload: "
        "an autoscaler's target.",
    )
    message: Message | None = Field(default=None, description="The plan in a sentence, with its reasons.")
    speed_factors: tuple[SpeedFactors, ...] | None = Field(
        default=None,
        max_length=MAX_SPEED_FACTORS,
        description="What workers had measured when the plan was made, as it counted in expected speeds. What is "
        "measured later counts in the next plan, not in this one.",
    )
    draft_acceptance: DecimalString | None = Field(
        default=None, description="The same of drafts: the chance to be right that workers had measured by then."
    )
    draft_acceptances: dict[str, DecimalString] | None = Field(
        default=None, max_length=2, description="The same of each of two drafters, by address."
    )
    candidates: tuple[Candidate, ...] = Field(
        default=(),
        max_length=MAX_CANDIDATES,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["accelerator", "gpusPerReplica"],
        },
        description="What was considered, the best of each product. Of a committed plan those that were not chosen are "
        "shown while a plan made now has its hash.",
    )

    @property
    def fits(self) -> bool:
        """True when a candidate was chosen, and with it every field above `candidates` is set (but CPU-only ones)."""
        return self.accelerator is not None


class CalibrationTerm(ApiModel):
    """One named term of memory, predicted beside measured."""

    name: str = Field(
        min_length=1,
        max_length=32,
        pattern=r"^[a-z][A-Za-z0-9_]*$",
        description="weights, activation, context, other_processes, graphs, nccl, pool; on the CPU process and "
        "headroom for context.",
    )
    predicted_bytes: Bytes = Field(
        description="What the formulas say for this device and these settings, before any calibration."
    )
    measured_bytes: Bytes = Field(description="What the worker found.")
    error_percent: SignedDecimalString | None = Field(
        default=None, description="(measured - predicted) / predicted, in percent; absent where 0 was predicted."
    )

    @classmethod
    def compare(cls, name: str, *, predicted_bytes: int, measured_bytes: int) -> CalibrationTerm:
        """The term with its error, to two decimals."""
        error = Decimal(100 * (measured_bytes - predicted_bytes)) / predicted_bytes if predicted_bytes else None
        return cls(
            name=name,
            predicted_bytes=predicted_bytes,
            measured_bytes=measured_bytes,
            error_percent=None if error is None else f"{error:.2f}",
        )


class CalibrationPages(ApiModel):
    """Pages of one kind that the whole pool holds."""

    kind: Literal["global", "sliding"] = Field(description="Which layers own the pages.")
    page_bytes: Bytes = Field(description="Bytes of one page over all layers of the kind; 0 when none owns a cache.")
    predicted: PageCount = Field(description="Pages in the predicted pool.")
    measured: PageCount = Field(description="Pages in the pool that was allocated.")


class Calibration(ApiModel):
    """Predicted beside measured: memory of one GPU, over the ready workers the worst, and times of steps."""

    terms: tuple[CalibrationTerm, ...] = Field(
        default=(),
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        description="Every term by name.",
    )
    pages: tuple[CalibrationPages, ...] = Field(
        default=(),
        max_length=2,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["kind"]},
        description="Pages of each kind.",
    )
    predicted: GpuMemory | None = Field(default=None, description="What the plan said.")
    measured: GpuMemory | None = Field(default=None, description="What a worker reports.")
    error_percent: SignedDecimalString | None = Field(
        default=None, description="(measured - predicted) / predicted of kvPoolBytes, in percent."
    )
    speed: tuple[CalibrationSpeed, ...] | None = Field(
        default=None,
        max_length=3,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["kind"]},
        description="Times of steps by kind, as they were when one last moved by more than a tenth.",
    )


# One field to server-side apply: its owner is kept once, not for each of some hundred fields inside, which would double
# the object and what every write of it costs the API server.
_WHOLE: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}
Commit = Annotated[str, StringConstraints(max_length=40, pattern=r"^[0-9a-f]{40}$")]


class ModelServeStatus(ApiModel):
    """What the operator found and did; written by the operator only."""

    observed_generation: Generation | None = Field(
        default=None, description="metadata.generation that this status was computed from."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(UNOBSERVED,),
        max_length=16,
        json_schema_extra=BY_TYPE,
        description="Ready: this generation's plan is fully rolled out; absent for previews. Available: some revision "
        "serves. Accepted, Planned, CapacityAvailable, WeightsLoaded, WorkersReady: the steps on the way. Reconciling "
        "and Stalled exist while true.",
    )
    phase: str | None = Field(
        default=None,
        max_length=32,
        pattern=r"^[A-Z][A-Za-z]*$",
        description="One word for people; scripts use conditions.",
    )
    url: str | None = Field(default=None, max_length=512, description="Base address of the OpenAI API in the cluster.")
    desired_replicas: Count | None = Field(
        default=None, description="Workers that the last accepted spec asked for; they stay wanted under a refused one."
    )
    replicas: Count | None = Field(
        default=None, description="Worker pods of every revision, as the selector counts them."
    )
    ready_replicas: Count | None = Field(
        default=None, description="Pods that take requests, by the Service's endpoints."
    )
    selector: str | None = Field(default=None, max_length=1024, description="Label selector of the pods, for /scale.")
    max_model_len: Tokens | None = Field(
        default=None,
        description="Most tokens of one request, the smallest over the ready workers; of a preview, what is planned.",
    )
    plan: PlanStatus | None = Field(
        default=None,
        json_schema_extra=_WHOLE,
        description="The committed plan, the one that runs while none is, or why there is none.",
    )
    revision: str | None = Field(
        default=None, max_length=253, description="ControllerRevision and Deployment of the committed plan."
    )
    model_commit: Commit | None = Field(
        default=None, description="Commit of the Hub that the committed revision serves, where model.revision is none."
    )
    drafter_commit: Commit | None = Field(
        default=None, description="The same of its drafter, where spec.drafter.revision is none."
    )
    drafter_commits: dict[str, Commit] | None = Field(
        default=None, max_length=2, description="The same of two drafters, by address."
    )
    proposed_plan: PlanStatus | None = Field(
        default=None, json_schema_extra=_WHOLE, description="A newer plan that waits for approval."
    )
    proposed_revision: str | None = Field(
        default=None, max_length=253, description="What would run it; another image or placement is another revision."
    )
    waits: Literal["Plan", "Worker"] | None = Field(
        default=None,
        description="What of the proposal is another one: Plan, or Worker where only image and release of it are.",
    )
    calibration: Calibration | None = Field(
        default=None, json_schema_extra=_WHOLE, description="Predicted beside measured memory and speed."
    )
    cache_quality: CacheQualities | None = Field(
        default=None, description="What 8-bit caches cost these weights: one is chosen unasked only where it holds."
    )
