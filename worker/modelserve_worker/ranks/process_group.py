"""Joining the process group of a tensor-parallel replica: gloo on the CPU, NCCL and peer memory on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from modelserve.sizing.rank_sums import PeerRowsLayout
from modelserve_worker.layers.parallel import TensorParallel

_joined: list[TensorParallel] = []  # at most one: torch has one default group, too


def join_tensor_parallel(
    *,
    rank: int,
    size: int,
    init_method: str,
    device: torch.device,
    timeout_s: float = 600.0,
    environment: Mapping[str, str] | None = None,
    capability: int | None = None,
    peer_layout: PeerRowsLayout | None = None,
) -> TensorParallel:
    """Join group `init_method` (tcp://HOST:PORT or file://PATH) and wait for its other ranks.

    A single rank joins nothing. `environment`: what bounds NCCL's memory (`modelserve.sizing.communicator`); variables
    that are set already, as by `pod.env`, stay as they are, and what they cost is measured.
    `capability`: of GPUs that sum by kernels where they reach each other's memory. `peer_layout`: make buffers for sums
    by rows, where GPUs reach each other's memory.
    Raises torch's DistStoreError or DistNetworkError when the others do not come in time.
    """
    if size == 1:
        return TensorParallel()
    for name, value in (environment or {}).items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    parallel = TensorParallel(rank=rank, size=size)
    if capability is not None:
        from modelserve_worker.ranks.peer_memory import join_peers  # CUDA, on GPUs alone

        peers, peer_rows = join_peers(rank=rank, size=size, device=device, capability=capability, layout=peer_layout)
        parallel = replace(parallel, peers=peers, peer_rows=peer_rows)
    _joined[:] = [parallel]
    return parallel


def abort_collectives(joined: Iterable[TensorParallel] | None = None) -> None:
    """End the collectives that this rank waits in, and all to come: another rank is gone. From any thread.

    On a GPU they wait for it inside a kernel. gloo notices by itself. `joined`: of a group of its own, if not that of
    this process.
    """
    for parallel in _joined if joined is None else joined:
        for peers in (parallel.peers, parallel.peer_rows):
            if peers is not None:
                peers.end()
    if dist.is_initialized() and dist.get_backend() == "nccl":
        group = dist.group.WORLD
        assert group is not None
        group.abort()
