"""Predicted beside measured memory: what the status shows of it, and what is learned from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

from modelserve.api import Calibration, GpuMemory, PlanStatus
from modelserve.api.speed import CalibrationSpeed
from modelserve.hardware import CPU_PRODUCT
from modelserve.model.model_facts import ModelFacts
from modelserve.quality.cache_quality import CacheQuality
from modelserve.sizing.pages import cache_format
from modelserve_operator.inventory.measurements import STEADY_TERMS, Entry, MeasuredQuality, geometry_digest, step_shape
from modelserve_operator.observed.snapshot import WorkerReport


def calibration(
    reports: Iterable[WorkerReport], plan: PlanStatus | None, *, speed: tuple[CalibrationSpeed, ...] = ()
) -> Calibration | None:
    """What the committed plan promised beside what came of it, of the worker whose pool fell shortest.

    `terms` and `pages` are the worker's own comparison: with the formulas alone, before anything was learned. None on
    the CPU, where nothing is measured.
    """
    if plan is not None and plan.accelerator == CPU_PRODUCT:
        return None
    promised = plan.per_gpu if plan is not None else None
    measured = [(report, report.measured) for report in reports if report.measured is not None]
    if not measured:
        return None
    worst, memory = min(measured, key=lambda pair: pair[1].kv_pool_bytes)
    predicted = promised or worst.predicted
    return Calibration(
        terms=worst.terms,
        pages=worst.pages,
        predicted=predicted,
        measured=memory,
        error_percent=_pool_error(predicted, memory),
        speed=speed or None,
    )


def _pool_error(predicted: GpuMemory | None, measured: GpuMemory) -> str | None:
    """(measured - predicted) / predicted of the pool, in percent to two decimals; None when nothing was predicted."""
    if predicted is None or not predicted.kv_pool_bytes:
        return None
    difference = measured.kv_pool_bytes - predicted.kv_pool_bytes
    return f"{Decimal(100 * difference) / predicted.kv_pool_bytes:.2f}"


def measurement(
    measured: Mapping[str, int],
    plan: PlanStatus,
    facts: ModelFacts,
    *,
    namespace: str,
    engine_version: str,
    model_uri: str,
    measured_at: str,
    speed: Mapping[str, float],
    acceptance: Mapping[str, float],
    cache_quality: Mapping[str, CacheQuality],
) -> Entry | None:
    """What the terms of one worker (bytes by name) teach about the ranks of its plan, whether it got ready or found too
    little memory, `speed`, what was measured of its steps (speed_calibration), `acceptance` of its drafts, and
    `cache_quality` by quality_of. On the CPU the last alone is measured: None without it.

    `namespace`: where it counts, see Entry. `measured_at`: when its pod was made. A report is read many times, and only
    a newer worker's takes one back.

    CUDA graphs teach nothing: a worker sizes its pool before it captures them, with the formula's figure.
    """
    if plan.accelerator is None or plan.engine is None or plan.kv_cache is None or not engine_version:
        return None
    sized = plan.accelerator != CPU_PRODUCT and {"weights", "activation", "context"} <= measured.keys()
    if not sized and not cache_quality:
        return None
    stored = cache_format(plan.kv_cache.dtype, plan.kv_cache.layout)
    step = step_shape(plan.engine.max_num_batched_tokens, plan.engine.max_num_seqs, stored)
    return Entry(
        namespace=namespace,
        product=plan.accelerator,
        engine_version=engine_version,
        model=geometry_digest(facts),
        model_uri=model_uri,
        dtype=str(facts.format),
        tensor_parallel=plan.tensor_parallel or 1,
        terms={name: measured[name] for name in STEADY_TERMS if name in measured} if sized else {},
        activation={step: measured["activation"]} if sized else {},
        measured_at=measured_at,
        speed=dict(speed),
        acceptance=dict(acceptance),
        cache_quality={
            key: MeasuredQuality(**found.model_dump(), measured_at=measured_at) for key, found in cache_quality.items()
        },
    )
