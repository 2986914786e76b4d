"""Times of steps as workers measured them beside what the formulas expect of the same steps. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from modelserve.api import PlanStatus
from modelserve.api.status import CalibrationSpeed
from modelserve.hardware import CPU_PRODUCT, Accelerator
from modelserve.measured_speed import STEP_KINDS, MeasuredSteps
from modelserve.model_facts import ModelFacts
from modelserve.planning.step_time import PromptRows, RankSpeed
from modelserve.sizing.pages import cache_geometry
from modelserve_operator.measurements import LEAST_FACTOR, MOST_FACTOR, WORTH_TELLING, speed_of
from modelserve_operator.observed import Body, WorkerReport


def speed_calibration(
    reports: Iterable[WorkerReport],
    plan: PlanStatus,
    facts: ModelFacts,
    accelerators: Mapping[str, Accelerator],
    *,
    shown: Iterable[Body],
) -> tuple[CalibrationSpeed, ...]:
    """Of each kind of step, the size that takes the workers most of their time.

    `shown` is what the status says of the same revision: it stays until a measured time has moved against its
    expectation by more than WORTH_TELLING, so that nothing is written at rest, nor when a pod starts anew. Nothing on
    the CPU, nor for a product that is in no catalogue: nobody knows what to expect there.
    """
    before = {each.kind: each for each in _read(shown)}
    measured = {each.kind: each for each in sorted((e for report in reports for e in report.speed), key=_busy)}
    rank = _rank(plan, facts, accelerators)
    found = []
    for kind in STEP_KINDS:
        known, steps = before.get(kind), measured.get(kind)
        fresh = _compared(steps, rank) if steps is not None and rank is not None else None
        if known is not None and (fresh is None or abs(_factor(fresh) / _factor(known) - 1) <= WORTH_TELLING):
            fresh = known
        if fresh is not None:
            found.append(fresh)
    return tuple(found)


def speed_factors(shown: Iterable[Body], plan: PlanStatus) -> dict[str, float]:
    """What the status says of speed, as it is remembered: measured over expected time, by `speed_of`."""
    cache = plan.kv_cache
    assert cache is not None
    cache_format = f"{cache.dtype.value}/{cache.layout.value}"
    factors = ((each.kind, _factor(each)) for each in _read(shown))
    return {
        speed_of(cache_format, kind): round(min(max(factor, LEAST_FACTOR), MOST_FACTOR), 2) for kind, factor in factors
    }


def _read(shown: Iterable[Body]) -> Iterator[CalibrationSpeed]:
    """Entries of a status; what this release would not write is left out."""
    for each in shown:
        with contextlib.suppress(ValidationError):
            speed = CalibrationSpeed.model_validate(each)
            if float(speed.predicted_ms) and float(speed.measured_ms):
                yield speed


def _busy(steps: MeasuredSteps) -> float:
    return steps.steps * steps.milliseconds


def _factor(speed: CalibrationSpeed) -> float:
    return float(speed.measured_ms) / float(speed.predicted_ms)


def _rank(plan: PlanStatus, facts: ModelFacts, accelerators: Mapping[str, Accelerator]) -> RankSpeed | None:
    device = accelerators.get(plan.accelerator or "")
    if device is None or device.product == CPU_PRODUCT or plan.kv_cache is None:
        return None
    tensor_parallel = plan.tensor_parallel or 1
    geometry = cache_geometry(
        facts.architecture,
        dtype=plan.kv_cache.dtype,
        layout=plan.kv_cache.layout,
        tensor_parallel_size=tensor_parallel,
    )
    return RankSpeed(facts.architecture, device, geometry, tensor_parallel=tensor_parallel, weight_format=facts.format)


def _compared(steps: MeasuredSteps, rank: RankSpeed) -> CalibrationSpeed | None:
    """None where the figures round to nothing."""
    rows = PromptRows.at(steps.prompt_tokens, keys=steps.prompt_context, window=rank.window)
    expected = rank.step(decodes=steps.requests, context=steps.context_tokens, prompts=rows).seconds * 1e3
    predicted, measured = f"{expected:.3f}", f"{steps.milliseconds:.3f}"
    if not float(predicted) or not float(measured):
        return None
    return CalibrationSpeed(
        kind=steps.kind,
        steps=steps.steps,
        **dict(_sizes(steps)),
        predicted_ms=predicted,
        measured_ms=measured,
        error_percent=f"{100 * (float(measured) / float(predicted) - 1):.1f}",
    )


def _sizes(steps: MeasuredSteps) -> Iterator[tuple[str, Any]]:
    if steps.requests:
        yield "requests", f"{steps.requests:.1f}"
        yield "context_tokens", round(steps.context_tokens)
    if steps.prompt_tokens:
        yield "prompt_tokens", round(steps.prompt_tokens)
