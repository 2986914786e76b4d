"""Joining the process group of a tensor-parallel replica: gloo on the CPU, NCCL on GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from modelserve_worker.layers.parallel import TensorParallel

__all__ = ["TensorParallel", "join_tensor_parallel"]


def join_tensor_parallel(
    *, rank: int, size: int, init_method: str, device: torch.device, timeout_s: float = 600.0
) -> TensorParallel:
    """Join group `init_method` (tcp://HOST:PORT or file://PATH) and wait for its other ranks.

    A single rank joins nothing. Raises torch's DistStoreError or DistNetworkError when the others do not come in time.
    """
    if size == 1:
        return TensorParallel()
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return TensorParallel(rank=rank, size=size, group=dist.group.WORLD)
