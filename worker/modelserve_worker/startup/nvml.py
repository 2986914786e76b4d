"""Asks NVML about GPUs, which needs no context on a device (that costs hundreds of MiB) and no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_SUCCESS = 0
_MEMORY_VERSION = 2
_NAME_LENGTH = 96
_Load = Callable[[str], Any]
"""Opens a library by its file name. Raises OSError."""


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: unlike its first version it tells what the driver keeps for itself from what processes use."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@dataclass(frozen=True)
class InstalledGPU:
    """`product` as GPU feature discovery labels a node with it."""

    product: str
    memory_mib: int
    compute_capability: tuple[int, int]


def used_bytes(uuid: str, *, load: _Load = ctypes.CDLL) -> int:
    """Bytes of a device ("GPU-...") that processes use; 0 where NVML is missing or does not know it (a MIG slice)."""
    with _loaded(load) as nvml:
        return 0 if nvml is None else _used_bytes(nvml, uuid)


def first_gpu(environment: Mapping[str, str], *, load: _Load = ctypes.CDLL) -> InstalledGPU | None:
    """The GPU that a process with this environment has as its first; None where there is none, or NVML is missing."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return None
    with _loaded(load) as nvml:
        return None if nvml is None else _gpu(nvml, (visible or "0").split(",")[0].strip())


@contextmanager
def _loaded(load: _Load) -> Iterator[Any]:
    """NVML, or None."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != _SUCCESS:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _used_bytes(nvml: Any, uuid: str) -> int:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
        return 0
    memory = _memory(nvml, handle)
    return 0 if memory is None else int(memory.used)


def _gpu(nvml: Any, wanted: str) -> InstalledGPU | None:
    """The one of this number or UUID."""
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_LENGTH)
    if wanted.isdigit():
        found = nvml.nvmlDeviceGetHandleByIndex_v2(int(wanted), ctypes.byref(handle))
    else:
        found = nvml.nvmlDeviceGetHandleByUUID(wanted.encode(), ctypes.byref(handle))
    major, minor = ctypes.c_int(), ctypes.c_int()
    if (
        found != _SUCCESS
        or nvml.nvmlDeviceGetName(handle, name, _NAME_LENGTH) != _SUCCESS
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != _SUCCESS
    ):
        return None
    memory = _memory(nvml, handle)
    if memory is None:
        return None
    product = name.value.decode(errors="replace").replace(" ", "-")
    return InstalledGPU(product, int(memory.total) >> 20, (major.value, minor.value))


def _memory(nvml: Any, handle: ctypes.c_void_p) -> _Memory | None:
    memory = _Memory(version=ctypes.sizeof(_Memory) | _MEMORY_VERSION << 24)
    try:
        return memory if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) == _SUCCESS else None
    except AttributeError:  # a driver older than the second version
        return None
