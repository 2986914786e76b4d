"""Under mixed traffic, in float32, every log probability is that of transformers: of scored prompts and of answers.

The tool is tests/bench/engine/logprobs_under_traffic.py, which compares on a GPU in bfloat16.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from bench.engine import logprobs_under_traffic

CPU = torch.device("cpu")


@pytest.fixture
def tool() -> ModuleType:
    return logprobs_under_traffic


def compare(tool: ModuleType, variant: str, *, drafts: bool = False, **more: Any) -> bool:
    load = tool.Load(count=48, longest=400, answers=16, chunk=128)
    return tool.compare(variant, None, load, device=CPU, seed=1, drafts=drafts, **more)


@pytest.mark.parametrize("variant", ["31B", "E4B", "26B-A4B"])
def test_log_probabilities_are_those_of_transformers(
    tool: ModuleType, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tool, variant, drafts=variant == "E4B")
    said = capsys.readouterr().out
    for kind in tool.KINDS:
        assert f"  {kind}" in said, said


def test_a_weight_that_is_off_by_a_hundredth_is_seen(tool: ModuleType) -> None:
    @torch.no_grad()
    def wrong(*args, **options):
        model = tool.our_model(*args, **options)
        model.layers[1].mlp.gate_up.matrix.weight.mul_(1.01)
        return model

    assert not compare(tool, "31B", ours=wrong)
