"""Tests that need a Hopper GPU: their marks, and launches as a step's graph has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from attention_cases import ints
from launch_order import one_after_the_other
from paged_case import PagedCase
from torch import Tensor

from modelserve_worker.kernels.step import Step

Result = TypeVar("Result")
_ABSENT = not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)
ON_HOPPER = (pytest.mark.gpu, pytest.mark.skipif(_ABSENT, reason="needs a Hopper GPU"))


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    for mark in ON_HOPPER:
        test = mark(test)
    return test


def captured(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `run`, whose kernels are compiled before, and what each replay writes."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def point_decodes(step: Step, case: PagedCase, slots: list[int]) -> None:
    """Let the step's arrays say that these slots decode; -1 is a padded row."""
    assert step.decode is not None
    step.decode.slots.copy_(ints(slots, "cuda"))
    step.decode.starts.copy_(ints([case.contexts[slot] - 1 if slot >= 0 else -1 for slot in slots], "cuda"))


def check_captured_bits(run: Callable[[], list[Tensor]], *, replays: int) -> None:
    """A captured chain has the bits of kernels that run one after the other, replay after replay."""
    run()  # compiled before it is compared
    with one_after_the_other():
        expected = run()
    assert not any(right.isnan().any() for right in expected)
    graph, outputs = captured(run)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(replays):
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        for output, right in zip(outputs, expected, strict=True):
            wrong += (output != right).sum()
    assert int(wrong) == 0
