"""From a plan to the worker's settings, and to the plan's hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from modelserve import __version__
from modelserve.api.drafter import DrafterPlan
from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import PlanStatus
from modelserve.engine_args import DEFAULT_MIXED_STEP_MILLISECONDS, EngineArgs
from modelserve.hardware import CPU_PRODUCT

ENGINE_VERSION = __version__
HASH_LENGTH = 10


_DRAFTERS_IN_HASHES = ("/", "/2")
# Settings that a plan need not set, as 0.1.0 wrote them into its hashes, which this release's must equal.
_UNSET_IN_HASHES = {
    "host": "0.0.0.0",  # noqa: S104 - nobody listens here
    "port": 8000,
    "accelerator": None,
    "acceleratorMemoryBytes": None,
    "dtype": "auto",
    "loadFormat": "auto",
    "prefixCaching": False,
    "debugKvStamps": False,
    "seed": 0,
    "shutdownDelaySeconds": 0,
}


def engine_args_for(
    plan: PlanStatus,
    spec: ModelServeSpec,
    *,
    model_directory: str,
    drafter_directories: tuple[str, ...] = _DRAFTERS_IN_HASHES,
) -> EngineArgs:
    """The worker's settings under a plan that fits; the directories are where the checkpoint is mounted, and the
    plan's drafters, if it has any: a worker that does not find one serves without.

    Raises ValueError when the plan has no choice in it.
    """
    if plan.accelerator is None or plan.kv_cache is None or plan.engine is None or plan.max_model_len is None:
        raise ValueError("the plan has no candidate that fits, so there are no engine settings")
    engine = spec.engine
    asked: dict[str, Any] = {}  # settings that others have only as their worker's release has them
    if engine is not None and engine.prefix_caching is not None:
        asked["prefix_caching"] = engine.prefix_caching
    if engine is not None and engine.kv_events_port:
        asked["kv_events_endpoint"] = f"tcp://*:{engine.kv_events_port}"
    if engine is not None and engine.profile == "exact":
        asked["profile"] = engine.profile  # fast, the default, changes no hash
    if plan.accelerator == CPU_PRODUCT and spec.objective == "Latency":  # as half as many rows are planned on GPUs
        asked["mixed_step_milliseconds"] = DEFAULT_MIXED_STEP_MILLISECONDS // 2
    if plan.host_cache_bytes:
        asked["host_cache_bytes"] = plan.host_cache_bytes
    if (room := plan.adapters) is not None:
        asked |= {
            "max_loras": room.slots,
            "max_lora_rank": room.rank,
            "max_cpu_loras": room.max,
            "lora_targets": room.targets,
        }
    if plan.images is not None:
        asked |= {"images_per_request": plan.images.per_request, "max_soft_tokens": plan.images.max_soft_tokens}
        asked |= {"image_urls": list(plan.images.urls)} if plan.images.urls else {}
    if plan.audio is not None:
        asked |= {"audio_per_request": plan.audio.per_request, "audio_seconds": plan.audio.seconds}
    if plan.drafter is not None:
        asked |= _drafts(plan.drafter, drafter_directories)
    return EngineArgs(
        **asked,
        model=model_directory,
        served_model_name=served_name(spec),
        device="cpu" if plan.accelerator == CPU_PRODUCT else "cuda",
        tensor_parallel_size=plan.tensor_parallel or 1,
        max_model_len=plan.max_model_len,
        min_model_len=min(plan.engine.min_model_len, plan.max_model_len),
        kv_cache_dtype=plan.kv_cache.dtype,
        kv_cache_layout=plan.kv_cache.layout,
        gpu_memory_utilization=float(plan.engine.gpu_memory_utilization),
        cpu_memory_bytes=plan.container_memory_bytes,
        max_num_batched_tokens=plan.engine.max_num_batched_tokens,
        max_num_mixed_tokens=plan.engine.max_num_mixed_tokens,
        max_num_seqs=plan.engine.max_num_seqs,
        drain_seconds=spec.rollout.drain_seconds,
    )


def _drafts(drafter: DrafterPlan, directories: tuple[str, ...]) -> dict[str, Any]:
    places = list(directories[: len(drafter.named)])
    of_assistant = {"drafter": places if len(places) > 1 else places[0], "drafter_optional": True} if places else {}
    lookup = {"prompt_lookup": True} if drafter.prompt_lookup else {}
    count = {"num_speculative_tokens": drafter.num_speculative_tokens} if drafter.num_speculative_tokens else {}
    return {**of_assistant, **lookup, **count}


def served_name(spec: ModelServeSpec) -> str:
    """Name of the model in the HTTP API: as asked, else the last part of its address."""
    return spec.model.served_name or _last_part(spec.model.uri)


def _last_part(uri: str) -> str:
    """Of an address, without the tag and the digest of an image."""
    return uri.rstrip("/").rsplit("/", 1)[1].partition("@")[0].partition(":")[0]


def plan_hash(plan: PlanStatus, spec: ModelServeSpec, *, engine_version: str = ENGINE_VERSION) -> str:
    """Ten hex digits over all that the running engine depends on: settings, checkpoint, image, accelerator, version.

    Candidates, capacity figures, placement, replicas and pod additions are no part of it, nor what a release has where
    no plan sets anything: a setting that is added, or has another default, changes no hash. One that is set to what it
    was by default once is not the same as one that is left out.
    """
    settings = engine_args_for(plan, spec, model_directory="/").model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    set_to_old = sorted(name for name in settings if name in _UNSET_IN_HASHES)
    return _digest(
        {
            **({"set": set_to_old} if set_to_old else {}),
            **({"drafter": _identity(plan.drafter)} if plan.drafter else {}),
            "engineArgs": _UNSET_IN_HASHES | settings,
            "engineVersion": engine_version,
            "model": spec.model.uri,
            "revision": spec.model.revision,
            "image": spec.image,
            "accelerator": plan.accelerator,
            "gpusPerReplica": plan.gpus_per_replica,
        }
    )


def _identity(drafter: DrafterPlan) -> list[Any]:
    """What tells drafters apart in a hash: of one as it always was, its address and revision."""
    return [list(each) for each in drafter.named] if drafter.models else [drafter.uri, drafter.revision]


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
