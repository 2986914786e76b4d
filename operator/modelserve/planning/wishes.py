"""What a spec asks of a plan, with the defaults of everything it leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property

from modelserve.api.pod import ResourceRequirements
from modelserve.api.schema_types import MAX_BYTES, quantity_value
from modelserve.api.spec import ModelServeSpec, Objective
from modelserve.errors import InvalidInput
from modelserve.hardware import IMAGE_ARCHITECTURES, Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve.model.model_facts import AssistantFacts
from modelserve.model.weight_format import TextLinear, WeightFormat
from modelserve.planning.drafts import WantedDrafts, wanted_drafts
from modelserve.planning.learned import NOTHING_LEARNED, Learned
from modelserve.planning.media.audio import audio_input
from modelserve.planning.media.images import image_input
from modelserve.sizing.adapters import DEFAULT_RANK, DEFAULT_TARGETS, AdapterLimits, in_order, slot_bytes
from modelserve.sizing.media.audio_input import AudioInput, audio_host_bytes
from modelserve.sizing.media.image_input import ImageInput, decode_processes, image_host_bytes
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

DEFAULT_UTILIZATION = Decimal("0.9")
DEFAULT_MIN_MODEL_LEN = 2048  # a context shorter than this is not worth serving unless it is asked for
DEFAULT_CONTAINER_MEMORY_BYTES = 4 << 30
MAX_GPUS_PER_REPLICA = 8
GPU_COUNTS = (1, 2, 4, 8)
LARGE_GPU_BYTES = 70 << 30
CHUNK_CPU, CHUNK_SMALL_GPU, CHUNK_LARGE_GPU = 512, 2048, 8192
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_ADAPTER_SLOTS = 8
DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS, DEFAULT_TURN_TOKENS = 2048, 256, 512
_LIMIT, _REQUEST = "spec.pod.resources.limits.memory", "spec.pod.resources.requests.memory"
_HOST = "spec.kvCache.hostMemory"
NO_FACTS: Mapping[str, AssistantFacts] = {}


@dataclass(frozen=True)
class Wishes:
    """None means that the planner chooses. Lengths are tokens; memory is bytes."""

    tensor_parallel: int | None = None
    max_per_replica: int = MAX_GPUS_PER_REPLICA
    max_model_len: int | None = None
    min_model_len: int | None = None
    kv_dtype: KVCacheDtype | None = None
    kv_layout: KVCacheLayout | None = None
    utilization: Decimal = DEFAULT_UTILIZATION
    max_num_batched_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    max_num_seqs: int | None = None
    container_memory_bytes: int = DEFAULT_CONTAINER_MEMORY_BYTES
    objective: Objective = "Throughput"
    input_tokens: int = DEFAULT_INPUT_TOKENS
    output_tokens: int = DEFAULT_OUTPUT_TOKENS
    concurrency: int | None = None
    turns: int | None = None
    turn_tokens: int = DEFAULT_TURN_TOKENS
    shared_tokens: int = 0
    sessions: int | None = None
    prefix_caching: bool | None = None
    learned: Learned = NOTHING_LEARNED
    weight_format: WeightFormat | None = None  # None: the architecture's dtype
    exact: bool = False  # profile exact
    drafts: WantedDrafts | None = None
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES  # CPUs that the worker's image is built for
    host_memory_bytes: int = 0  # asked for cached prefixes, of a worker on GPUs
    adapters: AdapterLimits | None = None
    adapted: ModelArchitecture | None = None  # whose linears they change, where there is room for any
    images: ImageInput | None = None
    audio: AudioInput | None = None

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of an expected request half way through its answer."""
        return self.input_tokens + self.output_tokens / 2

    @cached_property
    def without_assistant(self) -> Wishes:
        """The same, in which no drafter proposes tokens."""
        return replace(self, drafts=self.drafts.without_assistant if self.drafts else None)

    @cached_property
    def without_drafts(self) -> Wishes:
        """The same, in which nothing does."""
        return replace(self, drafts=None)

    @cached_property
    def of_one_request(self) -> Wishes:
        """The same, where one request comes at a time."""
        return replace(self, concurrency=1)

    def chunk(self, accelerator: Accelerator) -> int:
        """Most tokens of one step: as asked, else by the size of the accelerator."""
        if self.max_num_batched_tokens:
            return self.max_num_batched_tokens
        images = self.images  # such an image is computed in one step
        whole = images.max_soft_tokens if images is not None and images.architecture.mutual else 0
        if accelerator.is_cpu:
            return max(CHUNK_CPU, whole)
        return max(CHUNK_LARGE_GPU if accelerator.visible_bytes >= LARGE_GPU_BYTES else CHUNK_SMALL_GPU, whole)

    def sequences(self, accelerator: Accelerator) -> int:
        """Most requests of one step: as asked, else 64 or the expected concurrency, never above the step's tokens."""
        asked = self.max_num_seqs or max(DEFAULT_MAX_NUM_SEQS, self.concurrency or 0)
        return min(asked, self.chunk(accelerator))

    def many_sequences(self, accelerator: Accelerator) -> bool:
        """Whether a step may have more requests than those where memory allows: nobody says how many there will be."""
        open_ended = self.max_num_seqs is None and self.concurrency is None
        return open_ended and self.objective in ("Throughput", "Cost") and not accelerator.is_cpu

    def least_sequences(self, accelerator: Accelerator) -> int:
        """Fewest requests of one step that a plan may come down to where memory is short: what was asked, if a number
        was, and never below the expected concurrency."""
        if self.max_num_seqs is not None or accelerator.is_cpu:
            return self.sequences(accelerator)
        return min(self.concurrency or 1, self.sequences(accelerator))

    def host_cache_bytes(self, accelerator: Accelerator) -> int:
        """Host memory for cached prefixes; none on the CPU, whose pool is host memory."""
        return 0 if accelerator.is_cpu else self.host_memory_bytes

    def adapter_copies_bytes(self, ranks: int) -> int:
        """Host memory of a worker on so many GPUs for copies of adapters, as many as it may have."""
        if self.adapters is None or self.adapted is None or not ranks:
            return 0
        return self.adapters.most * ranks * slot_bytes(self.adapted, self.adapters, tensor_parallel_size=ranks)

    def image_host_bytes(self, ranks: int) -> int:
        """Host memory of a worker on so many GPUs for images."""
        return image_host_bytes(self.images, ranks=ranks, on_cpu=False) if self.images and ranks else 0

    def audio_host_bytes(self, ranks: int) -> int:
        """The same for sounds; what decodes images decodes them, too."""
        if not self.audio or not ranks:
            return 0
        return audio_host_bytes(self.audio, ranks=ranks, on_cpu=False, decoders=self.images is None)

    def media_host_bytes(self, ranks: int) -> int:
        return self.image_host_bytes(ranks) + self.audio_host_bytes(ranks)

    def decoders(self, ranks: int) -> int:
        """Processors of such a worker that decode images and sounds."""
        return decode_processes(on_cpu=False) if (self.images or self.audio) and ranks else 0

    def least_model_len(self, longest: int) -> int:
        """Shortest context worth a plan: minModelLen, else maxModelLen, else 2,048 tokens or the model's own limit."""
        return self.min_model_len or self.max_model_len or min(DEFAULT_MIN_MODEL_LEN, longest)


def wishes(
    spec: ModelServeSpec,
    *,
    learned: Learned = NOTHING_LEARNED,
    weight_format: WeightFormat | None = None,
    assistants: Mapping[str, AssistantFacts] = NO_FACTS,
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES,
    images: ImageArchitecture | None = None,
    audio: AudioArchitecture | None = None,
) -> Wishes:
    """Read the parts of a spec that sizing depends on; `learned` terms take the place of predicted ones, and
    its factors correct expected speeds. `assistants`: facts of the spec's own drafters, by address, which no
    release ships.
    `image_architectures`: CPUs that the worker's image is built for. `images` and `audio`: how the model sees and
    hears, where it does.

    Raises InvalidInput for images and sounds that the model does not take or a step is too short for, and for an
    amount of memory that no machine has, or that the pod's own limit cannot hold.
    """
    context, cache, engine, workload = spec.context, spec.kv_cache, spec.engine, spec.workload
    accelerators = spec.accelerators
    return Wishes(
        tensor_parallel=spec.parallelism.tensor if spec.parallelism else None,
        max_per_replica=(accelerators.max_per_replica if accelerators else None) or MAX_GPUS_PER_REPLICA,
        max_model_len=context.max_model_len if context else None,
        min_model_len=context.min_model_len if context else None,
        kv_dtype=KVCacheDtype(cache.dtype) if cache and cache.dtype else None,
        kv_layout=cache.layout if cache else None,
        utilization=Decimal(cache.gpu_memory_utilization)
        if cache and cache.gpu_memory_utilization
        else DEFAULT_UTILIZATION,
        max_num_batched_tokens=engine.max_num_batched_tokens if engine else None,
        max_num_mixed_tokens=engine.max_num_mixed_tokens if engine else None,
        max_num_seqs=engine.max_num_seqs if engine else None,
        container_memory_bytes=_container_memory_bytes(spec.pod.resources or ResourceRequirements()),
        objective=spec.objective or "Throughput",
        input_tokens=(workload.input_tokens if workload else None) or DEFAULT_INPUT_TOKENS,
        output_tokens=(workload.output_tokens if workload else None) or DEFAULT_OUTPUT_TOKENS,
        concurrency=workload.concurrency if workload else None,
        turns=workload.turns if workload else None,
        turn_tokens=(workload.turn_tokens if workload else None) or DEFAULT_TURN_TOKENS,
        shared_tokens=(workload.shared_prefix_tokens if workload else None) or 0,
        sessions=workload.sessions if workload else None,
        prefix_caching=engine.prefix_caching if engine else None,
        learned=learned,
        weight_format=weight_format,
        image_architectures=image_architectures,
        host_memory_bytes=_host_memory_bytes(spec),
        adapters=adapter_limits(spec),
        images=image_input(spec, images),
        audio=audio_input(spec, audio),
        exact=engine is not None and engine.profile == "exact",
        drafts=wanted_drafts(spec, assistants=assistants, acceptance=learned.acceptance),
    )


def adapter_limits(spec: ModelServeSpec) -> AdapterLimits | None:
    """Room for adapters, with the defaults of what is left open; None: none was asked for."""
    asked = spec.adapters
    if asked is None:
        return None
    named = DEFAULT_TARGETS if asked.targets is None else tuple(TextLinear(each) for each in asked.targets)
    return AdapterLimits(
        slots=asked.slots or min(asked.max, DEFAULT_ADAPTER_SLOTS),
        most=asked.max,
        rank=asked.rank or DEFAULT_RANK,
        targets=in_order(named),
    )


def _container_memory_bytes(resources: ResourceRequirements) -> int:
    """The memory limit as asked; left out, the default or a larger request, since no limit may be below its request."""
    limit, request = resources.limits.get("memory"), resources.requests.get("memory")
    if limit is not None:
        return _memory_bytes(limit, _LIMIT)
    return max(DEFAULT_CONTAINER_MEMORY_BYTES, _memory_bytes(request, _REQUEST) if request is not None else 0)


def _host_memory_bytes(spec: ModelServeSpec) -> int:
    """kvCache.hostMemory, which a memory limit of the user's has to hold beside the worker's own memory."""
    asked = spec.kv_cache.host_memory if spec.kv_cache else None
    if asked is None:
        return 0
    size = _memory_bytes(asked, _HOST)
    limit = (spec.pod.resources or ResourceRequirements()).limits.get("memory")
    if limit is not None and _memory_bytes(limit, _LIMIT) <= size:
        raise InvalidInput(
            f"{_HOST}: {asked} is not below {_LIMIT}, {limit}, which has to hold it beside the worker's own memory: "
            "leave the limit out, or raise it",
            field=_HOST,
        )
    return size


def _memory_bytes(quantity: str, field: str) -> int:
    size = int(quantity_value(quantity))
    if size > MAX_BYTES:
        raise InvalidInput(f"{field}: {quantity} is above {MAX_BYTES >> 50}Pi, more than any machine has", field=field)
    return size
