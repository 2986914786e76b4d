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
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.startup.accelerator_check import AcceleratorMismatch, DeviceFacts


def select_device(args: EngineArgs, *, rank: int) -> torch.device:
    """Device of one rank: GPU number `rank`, or the CPU. `auto` takes GPUs where there are any.

    Raises AcceleratorMismatch when GPUs are asked for and there are none, or fewer than ranks.
    """
    count = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cpu" or (args.device == "auto" and count == 0):
        return torch.device("cpu")
    if count < args.tensor_parallel_size:
        raise AcceleratorMismatch(
            f"tensorParallelSize {args.tensor_parallel_size} needs as many CUDA devices and {count} can be seen; "
            "lower it, give the container more GPUs, or set device to cpu",
            field="device",
        )
    return torch.device("cuda", rank)


def device_facts(device: torch.device) -> DeviceFacts:
    """What the driver says of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, properties.total_memory, (properties.major, properties.minor))


def with_compute_dtype(architecture: ModelArchitecture, args: EngineArgs) -> ModelArchitecture:
    """The architecture with `dtype` as it will be computed in: the checkpoint's, unless EngineArgs say otherwise."""
    return architecture if args.dtype == "auto" else architecture.model_copy(update={"dtype": args.dtype})


def compute_dtype(architecture: ModelArchitecture) -> torch.dtype:
    return torch.float32 if architecture.dtype == "float32" else torch.bfloat16


def select_geometry(architecture: ModelArchitecture, args: EngineArgs) -> CacheGeometry:
    """Page geometry of one rank. dtype `auto` is the weights', layout `auto` is v_only where it is exact.

    Raises InvalidInput for a layout that the model does not have.
    """
    layout = args.kv_cache_layout
    if layout == "auto":
        layout = KVCacheLayout.least(architecture)
    dtype = KVCacheDtype(architecture.dtype) if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    return cache_geometry(
        architecture, dtype=dtype, layout=KVCacheLayout(layout), tensor_parallel_size=args.tensor_parallel_size
    )


def kernel_table(
    device: torch.device,
    architecture: ModelArchitecture,
    geometry: CacheGeometry,
    args: EngineArgs,
    weight_format: WeightFormat | None = None,
) -> KernelTable:
    """What runs where: decided here, once, for all of a rank.

    Raises AcceleratorMismatch for a GPU that no kernels are for, and for a format that it does not compute with (the
    CPU converts all formats), InvalidInput for a profile that is not there.
    """
    gpu = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        gpu = 10 * major + minor
        _check_formats(device, (major, minor), architecture, geometry)
    formats = Formats(weight_format, geometry.dtype, geometry.layout)
    try:
        return resolve(gpu, architecture, formats, args.profile, ranks=args.tensor_parallel_size)
    except UnknownGenerationError as error:
        raise AcceleratorMismatch(f"{torch.cuda.get_device_name(device)}: {error}") from error


def _check_formats(
    device: torch.device, capability: tuple[int, int], architecture: ModelArchitecture, geometry: CacheGeometry
) -> None:
    for needed, used, remedy in (
        (BFLOAT16_CAPABILITY, architecture.dtype == "bfloat16", "dtype float32"),
        (FP8_E4M3_CAPABILITY, geometry.dtype is KVCacheDtype.FP8_E4M3, "kvCacheDtype int8 or fp8_e5m2"),
    ):
        if used and capability < needed:
            raise AcceleratorMismatch(
                f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
                f"{'bfloat16' if needed == BFLOAT16_CAPABILITY else 'fp8_e4m3'} needs {needed[0]}.{needed[1]}: "
                f"use {remedy}"
            )
