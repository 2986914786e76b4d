"""What the objective says of a worker on a CPU: how long prompts may hold up whoever decodes."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.api import ModelServeSpec
from modelserve.engine_args import DEFAULT_MIXED_STEP_MILLISECONDS, EngineArgs
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, engine_args_for, plan
from modelserve.published import published_model

URI = "hf://google/gemma-4-E4B-it"
ON_CPU = {"accelerators": {"products": ["CPU"]}, "pod": {"resources": {"limits": {"memory": "64Gi"}}}}


def settings(objective: str | None, **fields: Any) -> EngineArgs:
    facts = published_model(URI)
    assert facts is not None
    spec = ModelServeSpec.model_validate({"model": {"uri": URI}, "objective": objective, **fields})
    planned = plan(spec, facts.architecture, [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1)])
    return engine_args_for(planned, spec, model_directory="/m")


def test_latency_halves_what_a_prompt_may_add_to_a_step_on_a_cpu() -> None:
    asked = settings("Latency", **ON_CPU)
    assert asked.mixed_step_milliseconds == DEFAULT_MIXED_STEP_MILLISECONDS // 2
    assert "mixedStepMilliseconds" not in asked.dialect("0.1.0"), "a worker that does not know it is not told"


@pytest.mark.parametrize("objective", [None, "Throughput", "MaxContext", "Cost"])
def test_others_say_nothing_and_change_no_hash(objective: str | None) -> None:
    assert "mixed_step_milliseconds" not in settings(objective, **ON_CPU).model_fields_set
    assert settings(objective, **ON_CPU).mixed_step_milliseconds == DEFAULT_MIXED_STEP_MILLISECONDS


def test_on_gpus_rows_are_planned_instead() -> None:
    assert "mixed_step_milliseconds" not in settings("Latency").model_fields_set
