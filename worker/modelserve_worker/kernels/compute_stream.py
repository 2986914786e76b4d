"""The one stream of a GPU that kernels run on: its default stream, or the one that a graph is being captured on.

Kernels share workspaces (`linear_tiles.SharedBuffers`, cuBLAS's, a step's scratch), and those that start early are
right because all work before them is on their stream (`dependent_launch`). On a second stream both would be wrong and
say nothing. So other streams only copy, ordered by events, and every launch of ours asks first.
"""

from __future__ import annotations

import torch


class ComputeStreamError(RuntimeError):
    """A kernel was launched, or a graph replayed, on another stream than the compute stream."""


def check_compute_stream(stream: int) -> None:
    """`stream`: the current one's handle. Raises ComputeStreamError; of a captured launch the replay is asked."""
    if stream != 0 and not torch.cuda.is_current_stream_capturing():
        raise ComputeStreamError(
            f"a kernel was launched on stream {stream:#x}: kernels share workspaces and start before those ahead of "
            "them end, so they all run on the default stream; other streams only copy, ordered by events"
        )
