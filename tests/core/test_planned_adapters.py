"""spec.adapters in plans: room for adapters is memory that no request gets, and what workers are told."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from modelserve.api import ModelServe, PlanStatus
from modelserve.api.model_adapter import AdapterTarget
from modelserve.hardware import CATALOGUE
from modelserve.model.weight_format import TextLinear
from modelserve.planning.changes import plan_changes
from modelserve.planning.engine_settings import engine_args_for, plan_hash
from modelserve.planning.planner import plan
from modelserve.planning.pools.host_capacity import HostCapacity
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.published import published_model
from modelserve.sizing.adapters import ADAPTABLE, DEFAULT_TARGETS, EXPERTS, AdapterLimits, slot_bytes
from modelserve_operator.manifests.pod_resources import worker_resources

URI = "hf://google/gemma-4-31B-it"


def _plan(offer: AcceleratorOffer | None = None, **fields: Any) -> PlanStatus:
    document = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": "m"},
        "spec": {"model": {"uri": URI}, "context": {"maxModelLen": 32768}, **fields},
    }
    spec = ModelServe.parse(document).spec
    facts = published_model(URI)
    assert facts is not None
    return plan(spec, facts.architecture, [offer or AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 8)])


def test_slots_are_memory_that_the_pool_does_not_get() -> None:
    bare, roomy = _plan(), _plan(adapters={"max": 64, "rank": 16, "slots": 16})
    assert bare.adapters is None
    assert roomy.adapters is not None
    assert bare.per_gpu is not None
    assert roomy.per_gpu is not None
    facts = published_model(URI)
    assert facts is not None
    one = slot_bytes(facts.architecture, AdapterLimits(16, 64, 16), tensor_parallel_size=1)
    assert roomy.adapters.slots_bytes == 16 * one
    assert roomy.per_gpu.weights_bytes == bare.per_gpu.weights_bytes + 16 * one
    assert bare.per_gpu.kv_pool_bytes - roomy.per_gpu.kv_pool_bytes >= 16 * one
    assert roomy.adapters.host_bytes == 64 * one
    assert "16 slots for adapters of rank 16" in (roomy.message or "")
    assert "adapters none -> 16 of 64" in list(plan_changes(bare, roomy))


def test_what_is_left_open_is_planned_and_targets_bound_a_slot() -> None:
    assert get_args(AdapterTarget) == tuple(each.value for each in ADAPTABLE)
    every, few = _plan(adapters={"max": 100}).adapters, _plan(adapters={"max": 4, "targets": ["o", "qkv"]}).adapters
    assert every is not None
    assert few is not None
    assert (every.slots, every.rank, every.targets) == (8, 16, tuple(each.value for each in DEFAULT_TARGETS))
    assert (few.slots, few.targets) == (4, ("qkv", "o"))
    assert few.slots_bytes / 4 < every.slots_bytes / 8


def test_experts_are_room_where_they_are_named() -> None:
    """Of 26B-A4B alone, and of every rank its share: A of gate and up whole, of down by inputs."""
    facts = published_model("hf://google/gemma-4-26B-A4B-it")
    assert facts is not None
    a, rank = facts.architecture, 16

    def slot(tensor: int, *targets: TextLinear) -> int:
        limits = AdapterLimits(8, 8, rank, targets or DEFAULT_TARGETS)
        return slot_bytes(a, limits, tensor_parallel_size=tensor)

    for tensor in (1, 2, 4):
        width = a.moe_intermediate_size // tensor
        each = rank * (2 * a.hidden_size + 2 * width + width + a.hidden_size)
        assert slot(tensor, *EXPERTS) == 2 * a.num_hidden_layers * a.num_experts * each
        assert slot(tensor, *ADAPTABLE) == slot(tensor) + slot(tensor, *EXPERTS)
    assert slot(1, *ADAPTABLE) > 30 * slot(1)
    dense = published_model(URI)
    assert dense is not None
    told = [slot_bytes(dense.architecture, AdapterLimits(8, 8, rank, targets), tensor_parallel_size=1)
            for targets in (ADAPTABLE, DEFAULT_TARGETS)]  # fmt: skip
    assert told[0] == told[1]


def test_workers_are_told_and_nothing_is_said_without() -> None:
    spec = ModelServe.parse(
        {
            "apiVersion": "serving.modelserve.dev/v1alpha1",
            "kind": "ModelServe",
            "metadata": {"name": "m"},
            "spec": {"model": {"uri": URI}},
        }
    ).spec
    bare, roomy = _plan(), _plan(adapters={"max": 64, "slots": 16, "targets": ["qkv"]})
    told = engine_args_for(roomy, spec, model_directory="/m")
    assert (told.max_loras, told.max_cpu_loras, told.max_lora_rank) == (16, 64, 16)
    assert told.adapters == AdapterLimits(16, 64, 16, (ADAPTABLE[0],))
    silent = engine_args_for(bare, spec, model_directory="/m").model_dump(exclude_unset=True)
    assert not any("lora" in name for name in silent), "no hash of what is there changes"
    assert plan_hash(bare, spec) != plan_hash(roomy, spec)


def test_copies_are_asked_of_the_node() -> None:
    bare, roomy = _plan(), _plan(adapters={"max": 64})
    assert roomy.adapters is not None
    requests = [int(worker_resources({}, each, downloaded_bytes=None)["requests"]["memory"]) for each in (bare, roomy)]
    assert requests[1] - requests[0] == roomy.adapters.host_bytes
    small = AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1, host=HostCapacity(memory_bytes=32 << 30, cpu_millis=64_000))
    refused = _plan(small, adapters={"max": 1024})
    assert refused.accelerator is None
    assert refused.candidates[0].limited_by == "HostMemory"
    assert "of it adapters" in (refused.candidates[0].message or "")
    remedy = refused.candidates[0].remedy or ""
    most = int(remedy.rpartition("adapters.max ")[2].split()[0])
    assert _plan(small, adapters={"max": most}).accelerator == "NVIDIA-H200"


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_share_slots(tensor: int) -> None:
    found = _plan(adapters={"max": 8}, parallelism={"tensor": tensor}).adapters
    facts = published_model(URI)
    assert found is not None
    assert facts is not None
    one = slot_bytes(facts.architecture, AdapterLimits(8, 8, 16), tensor_parallel_size=tensor)
    assert (found.slots_bytes, found.host_bytes) == (8 * one, 8 * one * tensor)
