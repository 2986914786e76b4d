"""The body of /v1/plan: what sizing predicts for these settings beside what this worker really allocated."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from modelserve import __version__
from modelserve.api.status import (
    CalibrationPages,
    CalibrationTerm,
    Concurrency,
    EnginePlan,
    GpuMemory,
    KVCachePlan,
    PlanStatus,
    RequestBytes,
)
from modelserve.engine_args import EngineArgs
from modelserve.hardware import CPU, CPU_PRODUCT, accelerator_from_labels
from modelserve.inspection import read_rank_settings
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.planning.report import LENGTHS, gpu_memory
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.memory import MemoryPlan, memory_plan
from modelserve.sizing.pages import CacheGeometry
from modelserve.units import MIB
from modelserve_worker.startup.memory_report import MemoryReport


def plan_report(
    args: EngineArgs, architecture: ModelArchitecture, memory: MemoryReport, table: KernelTable
) -> dict[str, Any]:
    """JSON in the shape of status.plan, all terms per GPU.

    `perGpu` and `concurrency` are predicted from the device's memory, `allocated` and `allocatedConcurrency` are what
    came of it, `maxModelLen` is what is served. A plan that names no length sizes for the served one. `terms` and
    `pages` hold both sides of every named term and page kind; `engineVersion` is the release that measured them.
    `kernels` is the table of what runs where.
    """
    on_cpu = memory.device == "cpu"
    utilization = Decimal(str(args.gpu_memory_utilization))
    geometry, length = memory.geometry, memory.max_model_len
    settings = read_rank_settings(
        args, architecture, geometry, weight_format=memory.weight_format, on_cpu=on_cpu, capability=table.capability
    )
    product = CPU_PRODUCT if on_cpu else memory.device.replace(" ", "-")  # as the node label spells it
    gpu = accelerator_from_labels(
        product, memory_mib=memory.total_bytes // MIB, compute_capability=table.compute_capability
    )
    predicted = memory_plan(
        architecture, settings, total_bytes=memory.total_bytes, utilization=utilization, accelerator=gpu or CPU
    )
    plan = PlanStatus(
        accelerator=product,
        gpus_per_replica=0 if on_cpu else args.tensor_parallel_size,
        tensor_parallel=args.tensor_parallel_size,
        max_model_len=length,
        container_memory_bytes=memory.total_bytes if on_cpu else None,
        kv_cache=KVCachePlan(dtype=geometry.dtype, layout=geometry.layout),
        engine=EnginePlan(
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_mixed_tokens=args.max_num_mixed_tokens,
            max_num_seqs=args.max_num_seqs,
            min_model_len=args.min_model_len,
            gpu_memory_utilization=f"{utilization:f}",
            profile="exact" if args.profile == "exact" else None,
        ),
        per_gpu=gpu_memory(predicted),
        per_request=_request_bytes(geometry, length),
        concurrency=_concurrency(geometry, predicted.kv_pool_bytes, length),
    )
    allocated = GpuMemory(
        weights_bytes=memory.weights_bytes,
        activation_bytes=memory.activation_bytes,
        overhead_bytes=memory.overhead_bytes,
        kv_pool_bytes=memory.pool_bytes,
    )
    return plan.to_json() | {
        "allocated": allocated.to_json(),
        "allocatedConcurrency": _concurrency(geometry, memory.pool_bytes, length).to_json(),
        "engineVersion": __version__,
        "kernels": table.to_json(),
        "terms": [term.to_json() for term in _terms(predicted, memory)],
        "pages": [pages.to_json() for pages in _pages(predicted, memory)],
    }


def _terms(predicted: MemoryPlan, memory: MemoryReport) -> list[CalibrationTerm]:
    """Every measured term beside its prediction.

    What is predicted but cannot be measured by itself (library handles) is in what the driver holds outside of
    the engine's tensors, which is the term `context`.
    """
    overhead = dict.fromkeys(memory.overhead, 0)
    for term in predicted.terms:
        if term.group == "overhead":
            overhead[term.name if term.name in overhead else "context"] += term.bytes
    sides = {
        "weights": (predicted.weights_bytes, memory.weights_bytes),
        "activation": (predicted.activation_bytes, memory.activation_bytes),
        **{name: (overhead[name], memory.overhead[name]) for name in overhead},
        "pool": (predicted.kv_pool_bytes, memory.pool_bytes),
    }
    return [
        CalibrationTerm.compare(name, predicted_bytes=before, measured_bytes=after)
        for name, (before, after) in sides.items()
    ]


def _pages(predicted: MemoryPlan, memory: MemoryReport) -> list[CalibrationPages]:
    """Pages of each kind, were the whole pool of that kind."""
    found = []
    for kind in LayerKind:
        page_bytes = memory.geometry.page(kind).page_bytes
        found.append(
            CalibrationPages(
                kind="global" if kind is LayerKind.GLOBAL else "sliding",
                page_bytes=page_bytes,
                predicted=predicted.kv_pool_bytes // page_bytes if page_bytes else 0,
                measured=memory.num_pages(kind),
            )
        )
    return found


def _request_bytes(geometry: CacheGeometry, max_model_len: int) -> RequestBytes:
    held = {f"{name}_bytes": geometry.held_bytes(at) for name, at in LENGTHS.items() if at <= max_model_len}
    return RequestBytes(at_max_bytes=geometry.held_bytes(max_model_len), **held)


def _concurrency(geometry: CacheGeometry, pool_bytes: int, max_model_len: int) -> Concurrency:
    at = {name: f"{geometry.concurrency(pool_bytes, n):.2f}" for name, n in LENGTHS.items() if n <= max_model_len}
    return Concurrency(at_max=f"{geometry.concurrency(pool_bytes, max_model_len):.2f}", **at)
