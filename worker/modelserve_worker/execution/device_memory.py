"""Memory of a GPU that is in use before this process has a context there: asked of NVML, which needs none."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_SUCCESS = 0
_MEMORY_VERSION = 2


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: unlike its first version it tells what the driver keeps for itself from what processes use."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def used_bytes(device: torch.device) -> int:
    """Bytes of the device that processes use; 0 where NVML is missing or does not know the device (a MIG slice)."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    return _used_bytes(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _used_bytes(nvml: Any, uuid: str) -> int:
    if nvml.nvmlInit_v2() != _SUCCESS:
        return 0
    try:
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
            return 0
        memory = _Memory(version=ctypes.sizeof(_Memory) | _MEMORY_VERSION << 24)
        if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) != _SUCCESS:
            return 0
        return int(memory.used)
    except AttributeError:  # a driver older than the second version
        return 0
    finally:
        nvml.nvmlShutdown()
