"""The pool of a CPU worker, the length it serves, and what it says when nothing fits."""

from __future__ import annotations

from decimal import Decimal

import pytest
from architecture_of import architecture_of
from rank_of import rank_of

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.sizing.memory import memory_plan
from modelserve.sizing.weights.text import weight_bytes
from modelserve.termination import TerminationReason
from modelserve_worker.startup.accelerator_check import AcceleratorMismatch, DeviceFacts
from modelserve_worker.startup.device import kernel_table, select_device, select_geometry, with_compute_dtype
from modelserve_worker.startup.memory import (
    InsufficientMemory,
    cpu_limit_bytes,
    cpu_memory_use,
    negotiate_model_len,
)

GIB = 1 << 30


def test_a_cpu_pool_is_what_the_plan_promised(small_architecture) -> None:
    architecture = small_architecture("31b")
    args = EngineArgs(model="m", cpu_memory_bytes=3 * GIB)
    weights = weight_bytes(architecture, tensor_parallel_size=1)
    geometry = select_geometry(architecture, args)
    use = cpu_memory_use(architecture, geometry, args, weight_format=None, weights_bytes=weights)
    settings = rank_of(
        architecture, max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=args.max_num_seqs, on_cpu=True,
        kv_dtype=geometry.dtype, kv_layout=geometry.layout,
    )  # fmt: skip
    plan = memory_plan(architecture, settings, total_bytes=3 * GIB, utilization=Decimal("0.9"))
    assert use.left_bytes == plan.kv_pool_bytes > GIB


def test_the_containers_limit_is_used_and_no_limit_means_half_of_what_is_free(tmp_path) -> None:
    args = EngineArgs(model="m")
    limit = tmp_path / "memory.max"
    limit.write_text(f"{GIB}\n")
    assert cpu_limit_bytes(args, cgroup_limits=(limit,)) == GIB
    limit.write_text("max\n")
    unlimited = cpu_limit_bytes(args, cgroup_limits=(limit, tmp_path / "absent"))
    limit.write_text(f"{(1 << 63) - 4096}\n")  # cgroup v1's "no limit"
    assert cpu_limit_bytes(args, cgroup_limits=(limit,)) == pytest.approx(unlimited, rel=0.2)
    assert cpu_limit_bytes(EngineArgs(model="m", cpu_memory_bytes=7), cgroup_limits=(limit,)) == 7


def test_less_than_asked_is_served_down_to_the_minimum(small_architecture, geometry_of) -> None:
    architecture = small_architecture("31b")
    geometry = geometry_of(architecture)
    args = EngineArgs(model="m", max_model_len=10_000, min_model_len=1000)
    enough, little = geometry.held_bytes(10_000), geometry.held_bytes(3000)
    assert negotiate_model_len(architecture, geometry, args, pool_bytes=enough) == 10_000
    served = negotiate_model_len(architecture, geometry, args, pool_bytes=little)
    assert 3000 <= served < 3064  # to the end of the last page
    assert geometry.held_bytes(served) <= little < geometry.held_bytes(served + 1)


@pytest.mark.parametrize("missing", [1, 128, 1 << 20])
def test_below_the_minimum_the_shortfall_is_exact(small_architecture, geometry_of, missing) -> None:
    architecture = small_architecture("31b")
    geometry = geometry_of(architecture)
    args = EngineArgs(model="m", min_model_len=1000)
    with pytest.raises(InsufficientMemory, match="minModelLen 1000") as caught:
        negotiate_model_len(architecture, geometry, args, pool_bytes=geometry.held_bytes(1000) - missing)
    assert caught.value.shortfall_bytes == missing
    assert caught.value.reason is TerminationReason.InsufficientMemory


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_model_len": 40_000}, "maxModelLen 40000 exceeds the model's 32768"),
        ({"max_model_len": 10, "min_model_len": 20}, "minModelLen 20 exceeds maxModelLen 10"),
    ],
)
def test_contradictory_lengths_are_refused(small_architecture, geometry_of, asked, message) -> None:
    architecture = small_architecture("31b")
    with pytest.raises(InvalidInput, match=message):
        negotiate_model_len(architecture, geometry_of(architecture), EngineArgs(model="m", **asked), pool_bytes=GIB)


def test_formats_left_open_follow_the_checkpoint(small_architecture) -> None:
    for variant, layout in (("31b", "v_only"), ("e4b", "kv")):
        architecture = small_architecture(variant)
        assert select_geometry(architecture, EngineArgs(model="m")).layout == layout
        assert select_geometry(architecture, EngineArgs(model="m")).dtype == "bfloat16"
        as_float32 = with_compute_dtype(architecture, EngineArgs(model="m", dtype="float32"))
        assert select_geometry(as_float32, EngineArgs(model="m")).dtype == "float32"
    with pytest.raises(InvalidInput, match="attention_k_eq_v"):
        select_geometry(architecture, EngineArgs(model="m", kv_cache_layout="v_only"))


@pytest.mark.parametrize(
    ("capability", "refused"), [((8, 0), None), ((12, 0), None), ((13, 0), "13.0"), ((8, 7), None)]
)
def test_a_gpu_that_no_tiles_are_known_for_is_refused_by_name(capability, refused) -> None:
    """Before weights are read; a float32 model, which runs without kernels, is served there."""
    found = DeviceFacts("NVIDIA X1", 80 << 30, capability)
    for dtype in ("bfloat16", "float32"):
        architecture = architecture_of("E4B", form="").model_copy(update={"dtype": dtype})
        geometry = select_geometry(architecture, args := EngineArgs(model="m"))
        if refused and dtype == "bfloat16":
            with pytest.raises(AcceleratorMismatch, match=f"NVIDIA X1: no kernels for compute capability {refused}"):
                kernel_table(found, architecture, geometry, args)
        else:
            kernel_table(found, architecture, geometry, args)


def test_asking_for_a_gpu_that_is_not_there_is_a_mismatch() -> None:
    assert select_device(EngineArgs(model="m"), rank=0, visible=0).type == "cpu"
    with pytest.raises(AcceleratorMismatch, match="0 can be seen") as caught:
        select_device(EngineArgs(model="m", device="cuda"), rank=0, visible=0)
    assert caught.value.reason is TerminationReason.AcceleratorMismatch
    with pytest.raises(AcceleratorMismatch, match="tensorParallelSize 4"):
        select_device(EngineArgs(model="m", tensor_parallel_size=4), rank=0, visible=2)
    assert str(select_device(EngineArgs(model="m", tensor_parallel_size=2), rank=1, visible=2)) == "cuda:1"
