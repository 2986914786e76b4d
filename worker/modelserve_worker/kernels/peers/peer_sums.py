"""Sums over ranks through peer memory, for messages that are small: the launch of `peer_sums.cu`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.sizing.backends.generations import DEPENDENT_LAUNCH
from modelserve.sizing.rank_sums import MOST_WIDTH, WIDTH_MULTIPLE, peer_message_bytes
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, pointer
from modelserve_worker.kernels.compiling.cuda_kernel import launch as launch_kernel

MOST_RANKS = 8
_PLAIN_WIDTH = 2048  # elements of one block where there are no rows to norm
_LINES = 2  # bytes of a line for a byte of its elements


class Addresses(ctypes.c_uint64 * MOST_RANKS):  # type: ignore[misc]  # an array type made by an expression
    """Of every rank's buffer, as a kernel takes them by value."""

    def getPtr(self) -> int:  # noqa: N802 - as cuda.bindings looks for it
        return ctypes.addressof(self)


@dataclass(frozen=True)
class PeerBuffers:
    """One allocation on every rank that all ranks write into, zero at first."""

    addresses: tuple[int, ...]  # of every rank's, as this rank sees it
    rank: int
    state: Tensor  # int32 [4] on the device: the number of the next sum, from 1
    ended: Tensor  # int32 [1], pinned: not 0 when no rank is to be waited for any more

    @property
    def argument(self) -> tuple[Addresses, None]:
        """The addresses as an argument of a launch."""
        return Addresses(*self.addresses, *(0,) * (MOST_RANKS - len(self.addresses))), None


class PeerSums:
    """Of one rank, in bfloat16. All ranks call the same methods on the same shapes in the same order.

    Elements are added in rank order in float32 and rounded once: all ranks come to the same bits. When a rank has died,
    `end` lets the others out of their waits; what they computed then means nothing.
    """

    def __init__(self, buffers: PeerBuffers, *, capability: int, launch: Callable[..., None] = launch_kernel) -> None:
        """`buffers` of PEER_BUFFER_BYTES. `launch`: of `cuda_kernel`."""
        self._kernel = launch
        self._buffers = buffers
        self._ranks = len(buffers.addresses)
        self._target = f"sm_{capability}"
        self._dependent = capability >= DEPENDENT_LAUNCH
        self._most_bytes = peer_message_bytes(self._ranks)

    def takes(self, x: Tensor) -> bool:
        """Whether `all_reduce` sums this tensor: small enough, bfloat16, whole words of 16 bytes."""
        bytes_in_blocks = -(-x.numel() // _PLAIN_WIDTH) * _PLAIN_WIDTH * x.element_size()
        return takes_elements(x) and x.numel() % 8 == 0 and bytes_in_blocks <= self._most_bytes

    def takes_rows(self, x: Tensor) -> bool:
        """Whether `residual_norm` takes rows like these [T, H].

        Shape and dtype alone decide, so all sums of a step go one way: where they go by rows, a rank has not the whole
        residual that this kernel reads.
        """
        width = x.shape[-1]
        rows_fit = width % WIDTH_MULTIPLE == 0 and width <= MOST_WIDTH
        return takes_elements(x) and rows_fit and x.numel() * x.element_size() <= self._most_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, a new tensor."""
        x = x.contiguous()
        total = torch.empty_like(x)
        self._launch(x, total, width=_PLAIN_WIDTH)
        return total

    def residual_norm(
        self,
        residual: Tensor,
        delta: Tensor,
        delta_weight: Tensor,
        *,
        scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """`ElementwiseBackend.residual_norm` of the sum of `delta` over ranks, written in the residual's place."""
        normed = None if next_weight is None else torch.empty_like(residual)
        norms = delta_weight, scalar, next_weight, normed
        self._launch(delta.contiguous(), residual, width=delta.shape[-1], norms=norms, eps=eps)
        return residual, normed

    def end(self) -> None:
        """Let all kernels go that wait for another rank, now and later. From any thread; asks nothing of the GPU."""
        self._buffers.ended[0] = 1

    def _launch(
        self,
        partial: Tensor,
        total: Tensor,
        *,
        width: int,
        norms: tuple[Tensor | None, ...] = (),
        eps: float = 0.0,
    ) -> None:
        buffers = self._buffers
        defines = (f"WIDTH={width}", f"RANKS={self._ranks}", f"NORMS={int(bool(norms))}")
        self._kernel(
            CudaSource("peer_sums.cu", "rank_sum", self._target, defines),
            grid=(-(-partial.numel() // width), 1),
            threads=width // 8,
            dependent=self._dependent,
            arguments=(
                pointer(partial), pointer(total), *map(pointer, norms or (None,) * 4), pointer(buffers.state),
                pointer(buffers.ended), buffers.argument, (self._most_bytes * _LINES, ctypes.c_longlong),
                (partial.numel(), ctypes.c_int), (buffers.rank, ctypes.c_int), (eps, ctypes.c_float),
            ),
        )  # fmt: skip


def takes_elements(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.numel() > 0
