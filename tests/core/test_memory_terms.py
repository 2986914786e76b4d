"""Memory terms: against what a driver said of an H200, and how each can be replaced by a better figure."""

from __future__ import annotations

from decimal import Decimal

import pytest

from modelserve.errors import InvalidInput
from modelserve.published import published_model
from modelserve.sizing.memory import MEMORY_GROUPS, MemoryPlan, memory_plan

MIB = 1 << 20
H200_MIB = 143_155  # 139.8 GiB
# Variant, TP, chunk, and MiB that one H200 really held: weights, activation peak, everything outside the allocator.
MEASURED = [
    ("E4B", 1, 8192, 14_246, 1336, 689),
    ("31B", 1, 8192, 58_712, 3292, 689),
    ("31B", 1, 2048, 58_712, 1308, 689),
    ("E4B", 2, 8192, 7250, 1156, 1527),
    ("31B", 2, 8192, 29_488, 2014, 1529),
]


def _plan(variant: str, tp: int = 1, chunk: int = 8192, *, on_cpu: bool = False, **learned: int) -> MemoryPlan:
    facts = published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    return memory_plan(
        facts.architecture,
        total_bytes=H200_MIB * MIB,
        utilization=Decimal("0.9"),
        tensor_parallel_size=tp,
        max_num_batched_tokens=chunk,
        max_num_seqs=64,
        on_cpu=on_cpu,
        learned=learned,
    )


@pytest.mark.parametrize(("variant", "tp", "chunk", "weights", "activation", "overhead"), MEASURED)
def test_the_prediction_never_promises_more_than_was_measured(
    variant: str, tp: int, chunk: int, weights: int, activation: int, overhead: int
) -> None:
    """Every group is at or above its measurement, and all of them within 1 % of the GPU."""
    predicted = _plan(variant, tp, chunk)
    measured = {"weights": weights, "activation": activation, "overhead": overhead}
    excess = {group: predicted.group_bytes(group) / MIB - measured[group] for group in MEMORY_GROUPS}
    assert min(excess.values()) >= 0, excess
    assert sum(excess.values()) < H200_MIB / 100, excess
    assert excess["weights"] < 40, "segments are counted, not guessed"


def test_terms_have_names_and_sources_and_leave_the_pool() -> None:
    terms = _plan("E4B", 2)
    names = [term.name for term in terms.terms]
    assert len(names) == len(set(names))
    assert {"parameters", "allocator", "penalties", "cublas", "context", "nccl"} <= set(names)
    assert all(term.source for term in terms.terms)
    assert terms.budget_bytes - sum(term.bytes for term in terms.terms) == terms.available_bytes
    on_cpu = {term.name for term in _plan("E2B", on_cpu=True).terms}
    assert on_cpu.isdisjoint({"allocator", "cublas", "context", "graphs"})


def test_a_term_or_a_group_can_be_replaced() -> None:
    before, after = _plan("31B"), _plan("31B", context=512 * MIB, graphs=300 * MIB)
    assert after.overhead_bytes == 812 * MIB
    assert after.weights_bytes == before.weights_bytes
    whole = _plan("31B", activation=1 * MIB, residual=5 * MIB)
    assert whole.activation_bytes == 1 * MIB, "a measured group wins over the terms it is made of"
    assert [term.source for term in whole.terms if term.group == "activation"] == ["given"]


def test_a_phase_that_is_replaced_may_stop_being_the_largest() -> None:
    smaller = _plan("31B", attention=0, mlp=0)
    assert "sampling" in {term.name for term in smaller.terms}
    assert "attention" not in {term.name for term in smaller.terms}


@pytest.mark.parametrize(("name", "value", "says"), [("heap", 1, "terms are"), ("context", -1, "0 or more")])
def test_an_override_that_means_nothing_is_refused(name: str, value: int, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        _plan("31B", **{name: value})
