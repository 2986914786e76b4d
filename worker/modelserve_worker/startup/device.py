"""From EngineArgs to a device and to dtypes, with an exact reason where this machine cannot do what was asked."""

from __future__ import annotations

import torch

from modelserve.engine_args import EngineArgs
from modelserve.hardware import BFLOAT16_CAPABILITY, FP8_E4M3_CAPABILITY
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.backends.generations import UnknownGenerationError
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.startup.accelerator_check import AcceleratorMismatch, DeviceFacts


def select_device(args: EngineArgs, *, rank: int, visible: int) -> torch.device:
    """Device of one rank: of `visible` GPUs number `rank`, or the CPU. `auto` takes GPUs where there are any.

    Raises AcceleratorMismatch when GPUs are asked for and there are none, or fewer than ranks.
    """
    if args.device == "cpu" or (args.device == "auto" and visible == 0):
        return torch.device("cpu")
    if visible < args.tensor_parallel_size:
        raise AcceleratorMismatch(
            f"tensorParallelSize {args.tensor_parallel_size} needs as many CUDA devices and {visible} can be seen; "
            "lower it, give the container more GPUs, or set device to cpu",
            field="device",
        )
    return torch.device("cuda", rank)


def device_facts(device: torch.device) -> DeviceFacts | None:
    """What the driver says of a GPU; None of a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, properties.total_memory, (properties.major, properties.minor))


def with_compute_dtype(architecture: ModelArchitecture, args: EngineArgs) -> ModelArchitecture:
    """The architecture with `dtype` as it will be computed in: the checkpoint's, unless EngineArgs say otherwise."""
    return architecture if args.dtype == "auto" else architecture.model_copy(update={"dtype": args.dtype})


def compute_dtype(architecture: ModelArchitecture) -> torch.dtype:
    return torch.float32 if architecture.dtype == "float32" else torch.bfloat16


def select_geometry(
    architecture: ModelArchitecture, args: EngineArgs, draft: DraftCache | None = None
) -> CacheGeometry:
    """Page geometry of one rank. dtype `auto` is the weights', layout `auto` is v_only where it is exact. `draft`: what
    the drafter wants cached.

    Raises InvalidInput for a layout that the model does not have.
    """
    layout = args.kv_cache_layout
    if layout == "auto":
        layout = KVCacheLayout.least(architecture)
    dtype = KVCacheDtype(architecture.dtype) if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    return cache_geometry(
        architecture,
        dtype=dtype,
        layout=KVCacheLayout(layout),
        tensor_parallel_size=args.tensor_parallel_size,
        draft=draft,
    )


def kernel_table(
    found: DeviceFacts | None,
    architecture: ModelArchitecture,
    geometry: CacheGeometry,
    args: EngineArgs,
    weight_format: WeightFormat | None = None,
) -> KernelTable:
    """What runs where, on the GPU that was found or, without one, on the CPU: decided here, once, for all of a rank.

    Raises AcceleratorMismatch for a GPU that no kernels are for, and for a format that it does not compute with (the
    CPU converts all formats), InvalidInput for a profile that is not there.
    """
    formats = Formats(weight_format, geometry.dtype, geometry.layout)
    if found is None:
        return resolve(None, architecture, formats, args.profile, ranks=args.tensor_parallel_size)
    _check_formats(found, architecture, geometry)
    major, minor = found.compute_capability
    try:
        return resolve(10 * major + minor, architecture, formats, args.profile, ranks=args.tensor_parallel_size)
    except UnknownGenerationError as error:
        raise AcceleratorMismatch(f"{found.name}: {error}") from error


def _check_formats(found: DeviceFacts, architecture: ModelArchitecture, geometry: CacheGeometry) -> None:
    for needed, used, remedy in (
        (BFLOAT16_CAPABILITY, architecture.dtype == "bfloat16", "dtype float32"),
        (FP8_E4M3_CAPABILITY, geometry.dtype is KVCacheDtype.FP8_E4M3, "kvCacheDtype int8 or fp8_e5m2"),
    ):
        if used and found.compute_capability < needed:
            raise AcceleratorMismatch(
                f"{found.name} has compute capability {'.'.join(map(str, found.compute_capability))}; "
                f"{'bfloat16' if needed == BFLOAT16_CAPABILITY else 'fp8_e4m3'} needs {needed[0]}.{needed[1]}: "
                f"use {remedy}"
            )
