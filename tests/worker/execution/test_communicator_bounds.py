"""What NCCL may take over PCIe: bounded as it was planned, measured, and paid for by the context where it is more."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_memory_probe import Device

from modelserve.api.spec import ModelServeSpec
from modelserve.engine_args import EngineArgs
from modelserve.hardware import CATALOGUE
from modelserve.inspection import read_rank_settings
from modelserve.planning.engine_settings import engine_args_for
from modelserve.planning.planner import plan
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.published import published_model
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.communicator import OVER_PCIE, communicator_bytes
from modelserve.sizing.memory import memory_plan
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.units import MIB
from modelserve_worker.engine.plan_report import plan_report
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.ranks import process_group
from modelserve_worker.startup import rank as startup
from modelserve_worker.startup.accelerator_check import DeviceFacts
from modelserve_worker.startup.memory import GPUMemoryProbe, InsufficientMemory, negotiate_model_len
from modelserve_worker.startup.memory_report import MemoryReport

CARD = CATALOGUE["NVIDIA-GeForce-RTX-3090"]
FOUND = DeviceFacts("NVIDIA GeForce RTX 3090", CARD.visible_bytes, CARD.compute_capability)
FACTS = published_model("hf://google/gemma-4-31B-it-qat-w4a16-ct")
assert FACTS is not None
NCCL = "NCCL_"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(NCCL)]:
        monkeypatch.delenv(name)
    for name in OVER_PCIE.environment:  # so that what a test sets is gone after it
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _joined(monkeypatch: pytest.MonkeyPatch, args: EngineArgs, found: DeviceFacts) -> dict[str, str]:
    """Variables of NCCL that the group of such GPUs is made under."""
    seen: dict[str, str] = {}

    def make(**_: Any) -> None:
        seen.update({name: value for name, value in os.environ.items() if name.startswith(NCCL)})

    monkeypatch.setattr(dist, "init_process_group", make)
    monkeypatch.setattr(process_group, "_joined", [])
    bounds = startup.communicator_bounds(args, found)
    device = torch.device("cuda", 0)
    process_group.join_tensor_parallel(rank=0, size=2, init_method="", device=device, environment=bounds)
    return seen


def test_the_group_has_the_channels_and_buffers_that_plans_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="/m", device="cuda", tensor_parallel_size=2)
    assert _joined(monkeypatch, args, FOUND) == OVER_PCIE.environment
    for name in OVER_PCIE.environment:
        monkeypatch.delenv(name)
    h200 = DeviceFacts("NVIDIA H200", CATALOGUE["NVIDIA-H200"].visible_bytes, (9, 0))
    assert _joined(monkeypatch, args, h200) == {}, "over NVLink NCCL's own settings are what was measured"


def test_what_the_pods_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "16")
    args = EngineArgs(model="/m", device="cuda", tensor_parallel_size=2)
    assert _joined(monkeypatch, args, FOUND) == OVER_PCIE.environment | {"NCCL_MAX_NCHANNELS": "16"}


def test_bounds_are_of_the_product_that_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board of another form that will do: what the plan charged is what it gets."""
    args = EngineArgs(model="/m", device="cuda", tensor_parallel_size=2, accelerator="NVIDIA-H100-PCIe")
    h100 = DeviceFacts("NVIDIA H100 80GB HBM3", CATALOGUE["NVIDIA-H100-80GB-HBM3"].visible_bytes, (9, 0))
    assert _joined(monkeypatch, args, h100) == OVER_PCIE.environment


class Start:
    """Two ranks of a planned start whose communicator takes `more` on rank 1 than was planned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, more: int, least: int = 32_768, use: str = "0.96") -> None:
        spec = ModelServeSpec.model_validate(
            {
                "model": {"uri": "hf://google/gemma-4-31B-it-qat-w4a16-ct"},
                "context": {"maxModelLen": 131_072, "minModelLen": least},
                "parallelism": {"tensor": 2},
                "engine": {"maxNumSeqs": 4},
                "kvCache": {"dtype": "bfloat16", "gpuMemoryUtilization": use},
            }
        )
        assert FACTS is not None
        self.architecture = FACTS.architecture
        self.plan = plan(spec, self.architecture, [AcceleratorOffer(CARD, 2)], weight_format=FACTS.format)
        assert self.plan.max_model_len == 131_072
        self.args = engine_args_for(self.plan, spec, model_directory="/m")
        self.geometry = cache_geometry(
            self.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=2
        )
        settings = read_rank_settings(
            self.args, self.architecture, self.geometry, weight_format=FACTS.format, on_cpu=False
        )
        self.predicted = memory_plan(
            self.architecture, settings, total_bytes=CARD.visible_bytes, utilization=Decimal(use), accelerator=CARD
        )
        terms = {term.name: term.bytes for term in self.predicted.terms}
        uses = []
        for extra in (0, more):
            device = Device(monkeypatch)
            device.total, device.context = CARD.visible_bytes, terms["context"]
            probe = GPUMemoryProbe(torch.device("cuda", 0))
            device.outside += terms["nccl"] + extra + terms["peers"]
            probe.joined(peer_bytes=terms["peers"])
            device.reserved = self.predicted.weights_bytes
            probe.loaded()
            device.peak = self.predicted.weights_bytes + self.predicted.activation_bytes
            uses.append(
                probe.measure(
                    self.args.gpu_memory_utilization, scratch_bytes=0, graphs_bytes=terms["graphs"],
                    beside_graphs_bytes=0,
                )
            )  # fmt: skip
        monkeypatch.undo()
        ours, theirs = uses
        names = sorted(theirs.overhead)
        other = (
            -theirs.left_bytes,
            theirs.weights_bytes,
            theirs.activation_bytes,
            *(theirs.overhead[n] for n in names),
        )

        def greatest(values: torch.Tensor, **_: Any) -> None:
            values.copy_(torch.maximum(values, torch.tensor(other, dtype=values.dtype)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", greatest)
            self.use, self.pool = startup._agree(ours, TensorParallel(rank=0, size=2), torch.device("cpu"))

    def served(self) -> int:
        return negotiate_model_len(self.architecture, self.geometry, self.args, pool_bytes=self.pool)


def test_as_planned_the_start_serves_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, more=0)
    assert abs(start.pool - start.predicted.kv_pool_bytes) <= 256
    assert start.served() == 131_072


def test_a_larger_communicator_makes_the_pool_smaller_and_then_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned context while one request of it fits; then the longest that does, at or above minModelLen."""
    some = Start(monkeypatch, more=600 * MIB)
    assert abs(some.predicted.kv_pool_bytes - some.pool - 600 * MIB) <= 256
    assert some.served() == 131_072
    request = some.geometry.held_bytes(131_072)
    much = Start(monkeypatch, more=some.predicted.kv_pool_bytes - request // 2)
    assert 32_768 <= much.served() < 131_072
    assert much.served() == much.geometry.longest_request(much.pool)
    assert much.geometry.held_bytes(much.served()) <= much.pool
    held = much.use.weights_bytes + much.use.activation_bytes + much.use.overhead_bytes + much.pool
    assert held <= much.use.budget_bytes, "never over"
    with pytest.raises(InsufficientMemory) as ended:
        Start(monkeypatch, more=some.predicted.kv_pool_bytes - request // 2, least=131_072).served()
    assert ended.value.shortfall_bytes == request - much.pool


def test_a_larger_communicator_is_reported_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, more=600 * MIB)
    assert FACTS is not None
    memory = MemoryReport(
        device=FOUND.name,
        total_bytes=start.use.total_bytes,
        budget_bytes=start.use.budget_bytes,
        weights_bytes=start.use.weights_bytes,
        activation_bytes=start.use.activation_bytes,
        overhead=start.use.overhead,
        pool_bytes=start.pool,
        geometry=start.geometry,
        max_model_len=start.served(),
        weight_format=FACTS.format,
    )
    formats = Formats(FACTS.format, start.geometry.dtype, start.geometry.layout)
    body = plan_report(start.args, start.architecture, memory, resolve(86, start.architecture, formats, ranks=2))
    (nccl,) = (term for term in body["terms"] if term["name"] == "nccl")
    charged = communicator_bytes(CARD, 2)
    assert (nccl["predictedBytes"], nccl["measuredBytes"]) == (charged, charged + 600 * MIB)
    assert body["perGpu"]["kvPoolBytes"] == start.plan.per_gpu.kv_pool_bytes  # type: ignore[union-attr]
