"""/v1/plan: the operator reads back what it planned, beside what came of it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from rank_of import rank_of

from modelserve.api.status import GpuMemory, PlanStatus
from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat, int4
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.memory import memory_plan
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.weights.text import weight_bytes
from modelserve_worker.engine.plan_report import plan_report
from modelserve_worker.startup.memory_report import MemoryReport

GIB = 1 << 30
ARCHITECTURE = ModelArchitecture(
    num_hidden_layers=6,
    full_attention_layers=(5,),
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    head_dim=32,
    global_head_dim=64,
    attention_k_eq_v=True,
    sliding_window=1024,
    max_position_embeddings=131072,
    vocab_size=512,
)


def report(
    device: str,
    *,
    total_bytes: int = 4 * GIB,
    max_model_len: int = 40_000,
    weight_format: WeightFormat | None = None,
) -> tuple[dict[str, Any], EngineArgs]:
    args = EngineArgs(
        model="/models/tiny", max_model_len=max_model_len, max_num_batched_tokens=512, max_num_seqs=8,
        tensor_parallel_size=1 if device == "cpu" else 2,
    )  # fmt: skip
    geometry = cache_geometry(
        ARCHITECTURE,
        dtype=KVCacheDtype.BFLOAT16,
        layout=KVCacheLayout.V_ONLY,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    memory = MemoryReport(
        device=device,
        total_bytes=total_bytes,
        budget_bytes=total_bytes,
        weights_bytes=11,
        activation_bytes=22,
        overhead={"process": 30, "headroom": 3} if device == "cpu" else {"context": 14, "graphs": 7, "nccl": 12},
        pool_bytes=1 << 30,
        geometry=geometry,
        max_model_len=max_model_len,
        weight_format=weight_format,
    )
    table = resolve(
        None if device == "cpu" else 90, ARCHITECTURE, Formats(weight_format), ranks=args.tensor_parallel_size
    )
    return plan_report(args, ARCHITECTURE, memory, table), args


def test_quantised_weights_are_predicted_as_they_are_stored() -> None:
    dense, packed = (report("cpu", weight_format=stored)[0]["perGpu"] for stored in (None, int4(32)))
    assert packed["weightsBytes"] == weight_bytes(ARCHITECTURE, tensor_parallel_size=1, weight_format=int4(32))
    assert packed["weightsBytes"] < 0.4 * dense["weightsBytes"]
    scratch = 8 * 64 * 256 + 2 * 2 * 64 * 256  # of the widest matrix: q and k of a global layer
    assert packed["activationBytes"] > dense["activationBytes"] + 2 * scratch


@pytest.mark.parametrize(("device", "product", "gpus"), [("cpu", "CPU", 0), ("NVIDIA H200", "NVIDIA-H200", 2)])
def test_predicted_beside_allocated(device: str, product: str, gpus: int) -> None:
    body, args = report(device)
    allocated, capacity = body.pop("allocated"), body.pop("allocatedConcurrency")
    for addition in ("terms", "pages", "engineVersion"):
        body.pop(addition)
    kernels = body.pop("kernels")
    assert kernels["profile"] == "fast"
    assert {each["backend"] for each in kernels["choices"]} == {"plain"}, "heads of 16 columns fill no tile"
    plan = PlanStatus.model_validate(body)
    settings = rank_of(
        ARCHITECTURE, tensor_parallel_size=args.tensor_parallel_size,
        max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=args.max_num_seqs, on_cpu=device == "cpu",
    )  # fmt: skip
    predicted = memory_plan(ARCHITECTURE, settings, total_bytes=4 * GIB, utilization=Decimal("0.9"))
    assert (plan.accelerator, plan.gpus_per_replica, plan.max_model_len) == (product, gpus, 40_000)
    assert plan.per_gpu is not None
    assert plan.per_gpu.kv_pool_bytes == predicted.kv_pool_bytes > 0
    measured = GpuMemory.model_validate(allocated)
    assert (measured.weights_bytes, measured.activation_bytes, measured.overhead_bytes) == (11, 22, 33)
    assert measured.kv_pool_bytes == 1 << 30
    assert set(capacity) == {"at8k", "at32k", "atMax"}, "lengths above maxModelLen are left out"
    held = body["perRequest"]["atMaxBytes"]
    assert capacity["atMax"] == f"{Decimal((1 << 30) * 100 // held) / 100:.2f}"
    assert (plan.container_memory_bytes == 4 * GIB) == (device == "cpu")


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
def test_every_term_is_named_and_both_sides_add_up_to_the_budget(device: str) -> None:
    body, _ = report(device)
    terms = {term["name"]: term for term in body["terms"]}
    outside = {"process", "headroom"} if device == "cpu" else {"context", "graphs", "nccl"}
    assert set(terms) == {"weights", "activation", "pool", *outside}
    predicted = {name: term["predictedBytes"] for name, term in terms.items()}
    assert sum(predicted[name] for name in outside) == body["perGpu"]["overheadBytes"], "no predicted part is lost"
    budget = 4 * GIB if device == "cpu" else int(4 * GIB * Decimal("0.9"))
    assert 0 <= budget - sum(predicted.values()) < 128
    assert (terms["weights"]["measuredBytes"], terms["activation"]["measuredBytes"]) == (11, 22)
    assert sum(terms[name]["measuredBytes"] for name in outside) == 33
    pool = terms["pool"]
    error = Decimal(100 * ((1 << 30) - pool["predictedBytes"])) / pool["predictedBytes"]
    assert pool["errorPercent"] == f"{error:.2f}"
    assert body["engineVersion"]
    for pages in body["pages"]:
        assert pages["measured"] == (1 << 30) // pages["pageBytes"]
        assert pages["predicted"] == pool["predictedBytes"] // pages["pageBytes"]
    assert [pages["kind"] for pages in body["pages"]] == ["sliding", "global"]
