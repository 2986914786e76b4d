"""Sums of many rows over ranks, with the norms behind them, through peer memory: the launch of `peer_rows.cu`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from modelserve.sizing.backends.generations import DEPENDENT_LAUNCH
from modelserve.sizing.rank_sums import PeerRowsLayout
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, pointer
from modelserve_worker.kernels.compiling.cuda_kernel import launch as launch_kernel
from modelserve_worker.kernels.peers.peer_sums import PeerBuffers, takes_elements

_THREADS_OF_A_MULTIPROCESSOR = 1536  # the least of all GPUs that have bfloat16
_MOST_BLOCKS = 4


class _Layout(ctypes.Structure):
    """`Layout` of peer_rows.cu."""

    _fields_ = (
        ("inbox", ctypes.c_longlong),
        ("normed_flags", ctypes.c_longlong),
        ("inbox_flags", ctypes.c_longlong),
        ("most_share", ctypes.c_int),
    )

    def getPtr(self) -> int:  # noqa: N802 - as cuda.bindings looks for it
        return ctypes.addressof(self)


class PeerRows:
    """Of one rank, for many rows: it adds and norms a share of them, and keeps the residual of these alone.

    All ranks call the same on the same shapes in the same order, and come to the same bits, as with `PeerSums`.
    """

    def __init__(
        self,
        buffers: PeerBuffers,
        layout: PeerRowsLayout,
        normed: Tensor,
        *,
        capability: int,
        multiprocessors: int,
        launch: Callable[..., None] = launch_kernel,
    ) -> None:
        """`buffers` of `layout.total_bytes`; `normed` [rows, width] bfloat16 is the beginning of this rank's. `launch`:
        of `cuda_kernel`."""
        self._kernel = launch
        self._buffers = buffers
        self._layout = layout
        self._normed = normed
        threads = layout.width // 8
        blocks = max(1, min(_MOST_BLOCKS, _THREADS_OF_A_MULTIPROCESSOR // threads))
        defines = (f"WIDTH={layout.width}", f"RANKS={layout.ranks}", f"BLOCKS={blocks}")
        target = f"sm_{capability}"
        self._source = CudaSource("peer_rows.cu", "rank_rows", target, defines)
        self._grid = blocks * multiprocessors
        self._dependent = capability >= DEPENDENT_LAUNCH

    def takes(self, delta: Tensor) -> bool:
        """Whether `residual_norm` takes rows like these [T, H]. Shape and dtype alone decide, as in `PeerSums`."""
        rows, width = delta.shape
        return takes_elements(delta) and width == self._layout.width and rows <= self._layout.rows

    def residual_norm(
        self,
        residual: Tensor,
        delta: Tensor,
        delta_weight: Tensor,
        *,
        scalar: Tensor | None,
        next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """`ElementwiseBackend.residual_norm` of the sum of `delta` over ranks.

        The residual is the same tensor, right in this rank's rows alone, which is where the next call with as many rows
        reads it. The normed rows are all there until the next call.
        """
        layout, buffers, normed = self._layout, self._buffers, self._normed[: delta.shape[0]]
        delta = delta.contiguous()
        offsets = _Layout(layout.inbox, layout.normed_flags, layout.inbox_flags, layout.share)
        self._kernel(
            self._source,
            grid=(self._grid, 1),
            threads=layout.width // 8,
            dependent=self._dependent,
            arguments=(
                pointer(delta), pointer(residual), pointer(delta_weight), pointer(scalar), pointer(next_weight),
                pointer(buffers.state), pointer(buffers.ended), buffers.argument, (offsets, None),
                (delta.shape[0], ctypes.c_int), (buffers.rank, ctypes.c_int), (eps, ctypes.c_float),
            ),
        )  # fmt: skip
        return residual, normed

    def end(self) -> None:
        """As `PeerSums.end`."""
        self._buffers.ended[0] = 1
