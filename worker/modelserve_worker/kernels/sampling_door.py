"""Which implementation of sampling by candidates a device has."""

from __future__ import annotations

from functools import cache

import torch

from modelserve_worker.kernels.sampling import PlainSampling, SamplingDoor


@cache
def sampling_door(device: torch.device) -> SamplingDoor:
    """The implementation for a device: Triton kernels on CUDA, the plain twin elsewhere."""
    if device.type != "cuda":
        return PlainSampling()
    # It chooses where kernels run when it is imported.
    from modelserve_worker.kernels.sampling_triton import TritonSampling

    return TritonSampling()
