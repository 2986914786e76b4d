"""Copies of many stretches of memory, started by one call."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from cuda.bindings import driver
from numpy.typing import NDArray

from modelserve_worker.kernels.compiling.cuda_kernel import checked


class Stretches(NamedTuple):
    """Addresses and bytes, int64 [n] each. None is copied to or from where another is copied to."""

    destinations: NDArray[np.int64]
    sources: NDArray[np.int64]
    sizes: NDArray[np.int64]


def copy_at_once(stretches: Stretches) -> None:
    """Memory of the CPU."""
    for destination, source, size in zip(*(each.tolist() for each in stretches), strict=True):
        ctypes.memmove(destination, source, size)


def copy_on_stream(stretches: Stretches) -> None:
    """Between pinned memory and that of the GPU, on the current stream, which is not the default one. The interpreter
    is left once. Raises RuntimeError where the driver takes none of them."""
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    destinations, sources = ([driver.CUdeviceptr(one) for one in each.tolist()] for each in stretches[:2])
    sizes, stream = stretches.sizes.tolist(), torch.cuda.current_stream().cuda_stream
    checked(driver.cuMemcpyBatchAsync(destinations, sources, sizes, len(sizes), [attributes], [0], 1, stream))
