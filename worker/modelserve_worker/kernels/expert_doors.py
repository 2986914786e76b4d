"""Which doors of a mixture of experts a device has."""

from __future__ import annotations

from functools import cache

import torch

from modelserve_worker.kernels.experts import ExpertDoors, PlainExperts
from modelserve_worker.kernels.linear_tiles import kernel_capability


@cache
def expert_doors(device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> ExpertDoors:
    """The implementation for a device and compute dtype, chosen once: kernels for bfloat16 on CUDA, else plain."""
    if dtype != torch.bfloat16 or kernel_capability(device) is None:
        return PlainExperts(exact=exact)
    from modelserve_worker.kernels.experts_triton import TritonExperts

    return TritonExperts(device, exact=exact)
