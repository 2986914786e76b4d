"""Buffers that the GPUs of a tensor-parallel group write into each other's memory, opened once by CUDA IPC."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import driver

from modelserve.sizing.rank_sums import PEER_BUFFER_BYTES, PeerRowsLayout
from modelserve_worker.kernels.compiling.cuda_kernel import checked
from modelserve_worker.kernels.peers.peer_rows import PeerRows
from modelserve_worker.kernels.peers.peer_sums import MOST_RANKS, PeerBuffers, PeerSums

_HANDLE_BYTES = 64

logger = logging.getLogger(__name__)


class _Memory:
    """Device memory [rows, width] of 16-bit words at an address, as torch finds it."""

    def __init__(self, address: int, rows: int, width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (rows, width), "typestr": "<i2", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def join_peers(
    *, rank: int, size: int, device: torch.device, capability: int, layout: PeerRowsLayout | None
) -> tuple[PeerSums | None, PeerRows | None]:
    """What every rank of the default group calls once, with the same layout.

    None on all ranks where one GPU does not reach another's memory (PCIe without peer access): then NCCL does all sums.
    """
    reached = all(torch.cuda.can_device_access_peer(device, other) for other in range(size) if other != rank)
    if not _all(reached and size <= MOST_RANKS, device):
        logger.info("rank %d: GPUs do not all reach each other's memory; NCCL does all sums", rank)
        return None, None
    small = _shared_buffers(PEER_BUFFER_BYTES, rank=rank, size=size, device=device)
    if small is None:
        return None, None
    sums = PeerSums(small, capability=capability)
    large = None if layout is None else _shared_buffers(layout.total_bytes, rank=rank, size=size, device=device)
    if layout is None or large is None:
        return sums, None
    words = torch.as_tensor(_Memory(large.addresses[rank], layout.rows, layout.width), device=device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    rows = PeerRows(large, layout, words.view(torch.bfloat16), capability=capability, multiprocessors=multiprocessors)
    return sums, rows


def _shared_buffers(size_bytes: int, *, rank: int, size: int, device: torch.device) -> PeerBuffers | None:
    """Memory of every rank, zero and open to all ranks for as long as the process lives; None where it cannot be."""
    own = int(checked(driver.cuMemAlloc(size_bytes)))
    checked(driver.cuMemsetD8(own, 0, size_bytes))
    torch.cuda.synchronize(device)
    handle = checked(driver.cuIpcGetMemHandle(own))
    handles = torch.empty((size, _HANDLE_BYTES), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(handles, torch.frombuffer(_bytes(handle), dtype=torch.uint8).to(device))
    opened: list[int] = []
    for other, row in enumerate(handles.cpu()):
        status, address = (0, own) if other == rank else _open(bytes(row.tolist()))
        if status:
            logger.warning("rank %d cannot open the memory of rank %d (CUDA error %d)", rank, other, status)
        opened.append(address)
    if not _all(all(opened), device):
        return None
    state = torch.tensor([1, 0, 0, 0], dtype=torch.int32, device=device)
    return PeerBuffers(tuple(opened), rank, state, ended=torch.zeros(1, dtype=torch.int32, pin_memory=True))


def _all(mine: bool, device: torch.device) -> bool:
    """Whether it is so on every rank."""
    agreed = torch.tensor(int(mine), dtype=torch.int32, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed.item())


def _bytes(handle: Any) -> bytearray:
    return bytearray(ctypes.string_at(handle.getPtr(), _HANDLE_BYTES))


def _open(content: bytes) -> tuple[int, int]:
    """Status of the driver, 0 for success, and the address."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), content, _HANDLE_BYTES)
    status, address = driver.cuIpcOpenMemHandle(handle, driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return status.value, int(address) if status.value == 0 else 0
