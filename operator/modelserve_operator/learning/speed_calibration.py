"""Times of steps as workers measured them beside what the formulas expect of the same steps. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from pydantic import ValidationError

from modelserve.api import PlanStatus
from modelserve.api.speed import CalibrationSpeed
from modelserve.hardware import CPU_PRODUCT, Accelerator
from modelserve.measured_speed import STEP_KINDS, MeasuredSteps, StepKind
from modelserve.model.model_facts import ModelFacts
from modelserve.planning.speed.step_time import PromptRows, RankSpeed
from modelserve.sizing.pages import cache_format, cache_geometry
from modelserve_operator.inventory.measurements import LEAST_FACTOR, MOST_FACTOR, WORTH_TELLING, speed_of
from modelserve_operator.observed.snapshot import Body, WorkerReport


def speed_calibration(
    reports: Iterable[WorkerReport],
    plan: PlanStatus,
    facts: ModelFacts,
    accelerators: Mapping[str, Accelerator],
    *,
    shown: Iterable[Body],
) -> tuple[CalibrationSpeed, ...]:
    """Means over the recent steps of each kind, of all workers and sizes.

    `shown` is what the status says of the same revision: it stays until a measured time has moved against its
    expectation by more than WORTH_TELLING, so that nothing is written at rest, nor when a pod starts anew. Nothing on
    the CPU, nor for a product that is in no catalogue: nobody knows what to expect there.
    """
    before = {each.kind: each for each in _read(shown)}
    measured = [steps for report in reports for steps in report.speed]
    rank = _rank(plan, facts, accelerators)
    found = []
    for kind in STEP_KINDS:
        known, steps = before.get(kind), [each for each in measured if each.kind == kind]
        fresh = _compared(kind, steps, rank) if steps and rank is not None else None
        if known is not None and (fresh is None or abs(_factor(fresh) / _factor(known) - 1) <= WORTH_TELLING):
            fresh = known
        if fresh is not None:
            found.append(fresh)
    return tuple(found)


def speed_factors(shown: Iterable[Body], plan: PlanStatus) -> dict[str, float]:
    """What the status says of speed, as it is remembered: measured over expected time, by `speed_of`."""
    cache = plan.kv_cache
    assert cache is not None
    found = cache_format(cache.dtype, cache.layout)
    factors = ((each.kind, _factor(each)) for each in _read(shown))
    return {speed_of(found, kind): round(min(max(factor, LEAST_FACTOR), MOST_FACTOR), 2) for kind, factor in factors}


def _read(shown: Iterable[Body]) -> Iterator[CalibrationSpeed]:
    """Entries of a status; what this release would not write is left out."""
    for each in shown:
        with contextlib.suppress(ValidationError):
            speed = CalibrationSpeed.model_validate(each)
            if float(speed.predicted_ms) and float(speed.measured_ms):
                yield speed


def _factor(speed: CalibrationSpeed) -> float:
    return float(speed.measured_ms) / float(speed.predicted_ms)


def _rank(plan: PlanStatus, facts: ModelFacts, accelerators: Mapping[str, Accelerator]) -> RankSpeed | None:
    """None also under profile exact, whose times say nothing of others'."""
    if plan.engine is not None and plan.engine.profile == "exact":
        return None
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


def _compared(kind: StepKind, measured: Sequence[MeasuredSteps], rank: RankSpeed) -> CalibrationSpeed | None:
    """None where the figures round to nothing."""
    count = sum(each.steps for each in measured)

    def mean(of: Callable[[MeasuredSteps], float]) -> float:
        return sum(each.steps * of(each) for each in measured) / count

    predicted, took = f"{mean(partial(_expected_ms, rank)):.3f}", f"{mean(lambda each: each.milliseconds):.3f}"
    if not float(predicted) or not float(took):
        return None
    requests, rows = mean(lambda each: each.requests), mean(lambda each: each.prompt_tokens)
    context = mean(lambda each: each.requests * each.context_tokens) / requests if requests else 0.0
    return CalibrationSpeed(
        kind=kind,
        steps=count,
        requests=f"{requests:.1f}" if requests else None,
        context_tokens=round(context) if requests else None,
        prompt_tokens=round(rows) if rows else None,
        predicted_ms=predicted,
        measured_ms=took,
        error_percent=f"{100 * (float(took) / float(predicted) - 1):.1f}",
    )


def _expected_ms(rank: RankSpeed, steps: MeasuredSteps) -> float:
    rows = PromptRows.at(steps.prompt_tokens, keys=steps.prompt_context, window=rank.window)
    return rank.step(decodes=steps.requests, context=steps.context_tokens, prompts=rows).seconds * 1e3
