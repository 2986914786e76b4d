"""Does the model fit one accelerator in one number? The arithmetic of a single candidate, with nothing chosen yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial

from modelserve.api.status import LimitedBy
from modelserve.hardware import (
    BFLOAT16_CAPABILITY,
    FP8_E4M3_CAPABILITY,
    LEAST_CAPABILITY,
    RANK_ARCHITECTURES,
    Accelerator,
)
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.drafts import left_out
from modelserve.planning.learned import no_terms
from modelserve.planning.pools.node_labels import COMPUTE_LABELS
from modelserve.planning.wishes import Wishes
from modelserve.sizing.backends.generations import UnknownGenerationError, generation_of, known_capability
from modelserve.sizing.backends.resolve import takes_model
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.memory import MemoryPlan, memory_plan
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_format, cache_geometry
from modelserve.sizing.rank_settings import RankSettings
from modelserve.sizing.speculation import NO_DRAFTS, Speculation
from modelserve.sizing.weights.drafter import drafter_ranks_problem
from modelserve.sizing.weights.text import tensor_parallel_problem
from modelserve.units import GIB

MANY_SEQUENCES = (256, 128)
FEW_SEQUENCES = 4  # fewer places would buy little, and make who comes wait
SHORT_REQUEST = 512  # tokens
LEAST_POOL_LEFT = 0.98


@dataclass(frozen=True)
class Fit:
    """A candidate that holds the model and at least one request of `max_model_len` tokens."""

    accelerator: Accelerator
    gpus: int  # 0 on the CPU
    tensor_parallel: int
    memory: MemoryPlan
    geometry: CacheGeometry
    max_model_len: int
    limited_by: LimitedBy | None  # what keeps max_model_len below the model's own limit, or below what was asked
    shortened: bool  # below the maxModelLen that was asked, at or above minModelLen
    downgraded: bool  # int8 cache although nobody asked: only so does the asked length fit, and its quality holds
    sequences: int  # most requests of one step
    speculation: Speculation = NO_DRAFTS
    undrafted: str = ""  # why what the spec asks to propose tokens does not, or not all of it
    withheld: int = 0  # tokens that an int8 cache would hold, which may not be chosen unasked; 0: it would not help


@dataclass(frozen=True)
class Refusal:
    """A candidate that cannot serve, and why; `shortfall_bytes` is per GPU, where memory refuses it, and of
    the node where its memory does."""

    accelerator: Accelerator
    gpus: int
    tensor_parallel: int
    limited_by: LimitedBy
    message: str
    shortfall_bytes: int | None = None
    memory: MemoryPlan | None = None
    remedy: str | None = None  # where it is no other candidate


Evaluation = Fit | Refusal


def evaluate(wishes: Wishes, architecture: ModelArchitecture, accelerator: Accelerator, *, gpus: int) -> Evaluation:
    """Size one candidate. `gpus` is 0 on the CPU; each GPU of a replica is one tensor-parallel rank.

    Tried in this order, the first that holds one request wins: the asked length in the weights' dtype, the asked length
    in int8 (only when the dtype is open, a length was asked, and its quality on these weights was measured and holds),
    then the longest length at or above the least.
    """
    tensor_parallel = max(1, gpus)

    problem = _unservable(wishes, architecture, accelerator, tensor_parallel)
    if problem:
        return Refusal(accelerator, gpus, tensor_parallel, *problem)
    longest = architecture.max_position_embeddings
    asked, least = wishes.max_model_len or longest, wishes.least_model_len(longest)
    own_dtype = wishes.kv_dtype or KVCacheDtype(architecture.dtype)
    layout = wishes.kv_layout or KVCacheLayout.least(architecture)
    dtypes = [own_dtype]
    if wishes.kv_dtype is None and (wishes.max_model_len or wishes.min_model_len):
        dtypes.append(KVCacheDtype.INT8)
    speculation, undrafted = _speculation(wishes, tensor_parallel)
    draft = speculation.draft_cache
    geometries = [_geometry(architecture, dtype, layout, tensor_parallel, draft) for dtype in dtypes]
    wanted = (asked, least) if wishes.max_model_len else (least,)
    if wishes.objective == "MaxContext":
        wanted = (asked,)
    sized = [_sized(wishes, architecture, accelerator, geometry, tensor_parallel, wanted) for geometry in geometries]
    lengths = [min(asked, geometry.longest_request(memory.kv_pool_bytes)) for geometry, memory, _ in sized]
    withheld = 0
    for enough in (asked if wishes.max_model_len else least, least):
        for (geometry, memory, sequences), length in zip(sized, lengths, strict=True):
            if length >= enough:
                downgraded = geometry.dtype is not own_dtype
                if downgraded and not wishes.learned.takes_unasked(accelerator.product, geometry.dtype, layout):
                    withheld = max(withheld, length)
                    continue
                return Fit(
                    accelerator=accelerator,
                    gpus=gpus,
                    tensor_parallel=tensor_parallel,
                    memory=memory,
                    geometry=geometry,
                    max_model_len=length,
                    limited_by="Memory" if length < asked else None,
                    shortened=bool(wishes.max_model_len) and length < asked,
                    downgraded=downgraded,
                    sequences=sequences,
                    speculation=speculation,
                    undrafted=undrafted,
                    withheld=withheld,
                )
    counted = sized[:1] if withheld else sized
    geometry, memory, _ = min(counted, key=lambda each: each[0].held_bytes(least) - each[1].available_bytes)
    smallest = geometry.held_bytes(least)
    shortfall = max(1, smallest - memory.available_bytes)
    message = _memory_message(memory, smallest, least, accelerator)
    if withheld:
        message += "; " + wishes.learned.why_withheld(withheld, accelerator.product, KVCacheDtype.INT8, layout)
    return Refusal(accelerator, gpus, tensor_parallel, "Memory", message, shortfall, memory)


def _sized(
    wishes: Wishes,
    architecture: ModelArchitecture,
    accelerator: Accelerator,
    geometry: CacheGeometry,
    tensor_parallel: int,
    wanted: tuple[int, ...],
) -> tuple[CacheGeometry, MemoryPlan, int]:
    """A rank's memory for a cache of this format, and the most requests of a step. How many these are follows from
    predictions alone, since what workers report is of the number that they have. `wanted`: lengths that one request
    should have, the longest first."""
    settings = _settings(
        tensor_parallel_size=tensor_parallel,
        max_num_batched_tokens=wishes.chunk(accelerator),
        max_num_seqs=wishes.sequences(accelerator),
        kv_dtype=geometry.dtype,
        kv_layout=geometry.layout,
        on_cpu=accelerator.is_cpu,
        weight_format=wishes.weight_format,
        speculation=_speculation(wishes, tensor_parallel)[0],
        profile="exact" if wishes.exact else "fast",
        capability=known_capability(accelerator.compute_capability),
        adapters=wishes.adapters,
        images=wishes.images,
        audio=wishes.audio,
    )
    total = wishes.container_memory_bytes if accelerator.is_cpu else accelerator.visible_bytes
    settings, memory = _predicted(
        architecture,
        settings,
        accelerator,
        total_bytes=total,
        utilization=wishes.utilization,
        many=MANY_SEQUENCES if wishes.many_sequences(accelerator) else (),
        least=wishes.least_sequences(accelerator),
        wanted=wanted,
    )
    if wishes.learned.terms is not no_terms:
        learned = wishes.learned.terms(
            accelerator.product,
            tensor_parallel_size=tensor_parallel,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            cache_format=cache_format(geometry.dtype, geometry.layout),
        )
        memory = memory_plan(
            architecture,
            settings,
            total_bytes=total,
            utilization=wishes.utilization,
            learned=learned,
            accelerator=accelerator,
        )
    return geometry, memory, settings.max_num_seqs


_settings = lru_cache(maxsize=512)(RankSettings)  # one object where products differ in memory alone


@lru_cache(maxsize=2048)
def _predicted(
    architecture: ModelArchitecture,
    settings: RankSettings,
    accelerator: Accelerator,
    *,
    total_bytes: int,
    utilization: Decimal,
    many: tuple[int, ...],
    least: int,
    wanted: tuple[int, ...],
) -> tuple[RankSettings, MemoryPlan]:
    """Divide a rank's memory, with as many requests a step as `settings` say, but for two cases. More, of `many`: if
    the pool holds so many short ones, and workspace and graphs for them leave it at least LEAST_POOL_LEFT of its bytes.
    Fewer, `least` or more: where the pool could not hold so many short ones at once, or where only so one request has
    the first of the lengths in `wanted` that any number reaches; the fewest where none does."""
    divided = partial(
        memory_plan, architecture, total_bytes=total_bytes, utilization=utilization, accelerator=accelerator
    )
    asked = divided(settings)
    geometry = _geometry(
        architecture, settings.kv_dtype, settings.kv_layout, settings.tensor_parallel_size,
        settings.speculation.draft_cache,
    )  # fmt: skip

    def holds(rank: RankSettings, memory: MemoryPlan) -> bool:
        return geometry.requests(memory.kv_pool_bytes, SHORT_REQUEST) >= rank.max_num_seqs

    for more in many:
        larger = replace(settings, max_num_seqs=more)
        memory = divided(larger)
        if memory.kv_pool_bytes >= LEAST_POOL_LEFT * asked.kv_pool_bytes and holds(larger, memory):
            return larger, memory
    plans = [(settings, asked)]
    if not (holds(settings, asked) and geometry.longest_request(asked.kv_pool_bytes) >= wanted[0]):
        fewer = (replace(settings, max_num_seqs=count) for count in _fewer(settings.max_num_seqs, least))
        plans += [(each, divided(each)) for each in fewer]
    filled = [each for each in plans if holds(*each)] or plans[-1:]
    for length in wanted:
        for each in filled:
            if geometry.longest_request(each[1].kv_pool_bytes) >= length:
                return each
    return plans[-1]


def _fewer(count: int, least: int) -> list[int]:
    """Numbers of requests below `count`, as graphs of decodes are captured: every eighth, then 4."""
    return [each for each in (*range((count - 1) // 8 * 8, 0, -8), FEW_SEQUENCES) if least <= each < count]


def _speculation(wishes: Wishes, tensor_parallel: int) -> tuple[Speculation, str]:
    """What proposes tokens on so many ranks, and why not all that is asked for."""
    drafts = wishes.drafts
    if drafts is None:
        return NO_DRAFTS, ""
    found = [(each, drafter_ranks_problem(each.architecture, tensor_parallel)) for each in drafts.drafters]
    why = (left_out(drafts, each, problem) for each, problem in found if problem is not None)
    kept = tuple(each for each, problem in found if problem is None)
    return drafts.only(kept).speculation, "; ".join(why)


def _unservable(
    wishes: Wishes, architecture: ModelArchitecture, accelerator: Accelerator, tensor_parallel: int
) -> tuple[LimitedBy, str] | None:
    """Why no amount of memory would help."""
    longest = architecture.max_position_embeddings
    for name, length in (("maxModelLen", wishes.max_model_len), ("minModelLen", wishes.min_model_len)):
        if length and length > longest:
            return "ContextLength", f"{name} {length:,} is above the {longest:,} tokens that the model supports"
    problem = tensor_parallel_problem(architecture, tensor_parallel, weight_format=wishes.weight_format)
    if problem:
        return "TensorParallel", problem
    if wishes.kv_layout is KVCacheLayout.V_ONLY and not architecture.attention_k_eq_v:
        return "Layout", "kvCache.layout v_only needs a model that derives K from V; this model stores both"
    problem = architecture_problem(wishes, accelerator, tensor_parallel)
    if problem:
        return "Architecture", problem
    if accelerator.is_cpu:
        return _one_rank_only(wishes)
    capability = accelerator.compute_capability
    known = capability > (0, 0)
    shown = ".".join(map(str, capability))
    if known and capability < LEAST_CAPABILITY:
        return "ComputeCapability", f"compute capability {shown} is below 7.5, the least that the engine runs on"
    if known and architecture.dtype == "bfloat16" and capability < BFLOAT16_CAPABILITY:
        return "ComputeCapability", f"bfloat16, the model's dtype, needs compute capability 8.0; this has {shown}"
    if known and takes_model(architecture):
        try:
            generation_of(10 * capability[0] + capability[1])
        except UnknownGenerationError as error:
            return "ComputeCapability", str(error)
    if wishes.kv_dtype is KVCacheDtype.FP8_E4M3 and capability < FP8_E4M3_CAPABILITY:
        has = f"this accelerator has {shown}" if known else f"no label {' or '.join(COMPUTE_LABELS)} says what this has"
        return "ComputeCapability", f"fp8_e4m3 needs compute capability 8.9; {has}"
    return None


def architecture_problem(wishes: Wishes, accelerator: Accelerator, tensor_parallel: int) -> str | None:
    """Why the CPUs of the accelerator's nodes run no worker, or none of so many ranks."""
    cpus = accelerator.architecture
    if not cpus:
        return None
    if cpus not in wishes.image_architectures:
        built = " and ".join(wishes.image_architectures)
        return f"its nodes have {cpus} CPUs, which the worker's image is not built for; it is for {built}"
    if tensor_parallel > 1 and cpus not in RANK_ARCHITECTURES:
        order = " and ".join(RANK_ARCHITECTURES)
        return (
            f"its nodes have {cpus} CPUs, where a replica has one GPU; {tensor_parallel} would pass steps on through "
            f"shared memory in the order of stores that only {order} keeps"
        )
    return None


def _one_rank_only(wishes: Wishes) -> tuple[LimitedBy, str] | None:
    """A CPU replica is one process."""
    if wishes.tensor_parallel in (None, 1):
        return None
    return "TensorParallel", f"parallelism.tensor {wishes.tensor_parallel} needs GPUs; the CPU runs one rank"


def _memory_message(memory: MemoryPlan, request_bytes: int, length: int, accelerator: Accelerator) -> str:
    needed = memory.weights_bytes + memory.activation_bytes + memory.overhead_bytes + request_bytes
    where = "of the container" if accelerator.is_cpu else "per GPU"
    return (
        f"needs {needed / GIB:.2f} GiB {where} (weights {memory.weights_bytes / GIB:.2f}, workspace "
        f"{memory.activation_bytes / GIB:.2f}, overhead {memory.overhead_bytes / GIB:.2f}, one request of {length:,} "
        f"tokens {request_bytes / GIB:.2f}), has {memory.budget_bytes / GIB:.2f}: "
        f"{(needed - memory.budget_bytes) / GIB:.2f} GiB missing"
    )


@lru_cache(maxsize=256)
def _geometry(
    architecture: ModelArchitecture,
    dtype: KVCacheDtype,
    layout: KVCacheLayout,
    tensor_parallel: int,
    draft: DraftCache | None,
) -> CacheGeometry:
    return cache_geometry(architecture, dtype=dtype, layout=layout, tensor_parallel_size=tensor_parallel, draft=draft)
