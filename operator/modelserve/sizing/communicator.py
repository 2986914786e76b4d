"""What NCCL takes of a GPU's memory, from the channels and buffers that the worker lets it have.

GPUs that are joined by NVLink have NCCL's own settings: their sums are worth the memory, and what it takes was
measured. Over PCIe a few channels fill the link, so the worker bounds them, and the bytes follow from the bounds. One
table is read by both: by plans for the bytes, by the worker for the environment of its process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelserve.hardware import Accelerator, joined_by_nvlink
from modelserve.sizing.cuda_context import STACK_BYTES, rounded_up
from modelserve.units import MIB

NVLINK_BYTES = 896 * MIB
"""Measured on 2 x H200, 838 MiB with E4B and 842 without a model, with NVLS and without, and rounded up to 64."""

GRANULE = 2 * MIB  # in which NCCL takes memory from the driver
MOST_NEIGHBOURS = 4  # of a rank in one channel's ring and tree


@dataclass(frozen=True)
class Channels:
    """Bounds of a communicator over PCIe. A channel has records of its own, and for each neighbour in rings and trees
    buffers of three protocols (NCCL's `computeBuffSizes` in src/init.cc) and one granule; its kernels want deeper
    stacks than CUDA's default, of every thread that the GPU may hold.

    `fixed_bytes`, `record_bytes` and `stack_bytes` are of 2 x H200 with NCCL 2.28 (tests/bench nccl_memory), where the
    sum is right to 4 MiB for 1 to 16 channels over NVLink, and for buffers of 1 and 4 MiB. Ranks that send through host
    memory, as GeForce does without a bridge, have their buffers there, and take 48 MiB less.
    """

    most: int = 4  # as many as NCCL itself takes where 2 x H200 send through host memory
    simple_bytes: int = 4 * MIB  # NCCL_BUFFSIZE
    ll_bytes: int = MIB // 2  # NCCL_LL_BUFFSIZE
    ll128_bytes: int = 4_915_200  # NCCL_LL128_BUFFSIZE
    fixed_bytes: int = 176 * MIB
    record_bytes: int = 6 * MIB
    stack_bytes: int = 1760 - STACK_BYTES  # a thread

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that NCCL reads while it makes a communicator."""
        return {
            "NCCL_MAX_NCHANNELS": str(self.most),
            "NCCL_BUFFSIZE": str(self.simple_bytes),
            "NCCL_LL_BUFFSIZE": str(self.ll_bytes),
            "NCCL_LL128_BUFFSIZE": str(self.ll128_bytes),
            "NCCL_NVLS_ENABLE": "0",
        }

    def exact_bytes(self, ranks: int, resident_threads: int) -> int:
        """Of a communicator over so many ranks, on a GPU that holds so many threads."""
        buffers = -(-(self.simple_bytes + self.ll_bytes + self.ll128_bytes) // GRANULE) * GRANULE + GRANULE
        of_channel = self.record_bytes + min(ranks - 1, MOST_NEIGHBOURS) * buffers
        return self.fixed_bytes + self.most * of_channel + self.stack_bytes * resident_threads

    def bytes(self, ranks: int, resident_threads: int) -> int:
        """The same, rounded up to 64 MiB."""
        return rounded_up(self.exact_bytes(ranks, resident_threads))


OVER_PCIE = Channels()


def environment(product: str, compute_capability: tuple[int, int]) -> Mapping[str, str]:
    """What the worker sets for its process group on such GPUs; nothing where NCCL's own settings hold."""
    return {} if joined_by_nvlink(product, compute_capability) else OVER_PCIE.environment


def communicator_bytes(accelerator: Accelerator, ranks: int) -> int:
    """What NCCL takes of each GPU of a group; 0 of one rank."""
    if ranks == 1:
        return 0
    if joined_by_nvlink(accelerator.product, accelerator.compute_capability):
        return NVLINK_BYTES
    return OVER_PCIE.bytes(ranks, accelerator.resident_threads)


def communicator_source(accelerator: Accelerator) -> str:
    """Where the figure comes from."""
    if not joined_by_nvlink(accelerator.product, accelerator.compute_capability):
        return f"assumed: {OVER_PCIE.most} channels over PCIe, by what 2 x H200 take"
    hopper = accelerator.compute_capability == (9, 0)
    return "measured on 2 x H200" if hopper else "assumed: as with NVLink on 2 x H200"
