"""The one stream of a GPU that kernels run on: its default stream, or the one that a graph is being captured on.

Kernels share workspaces (`linear_tiles.SharedBuffers`, cuBLAS's, a step's scratch), and those that start early are
right because all work before them is on their stream (`dependent_launch`). On a second stream both would be wrong and
say nothing. So other streams only copy, ordered by events, and every launch of ours asks first. Memory that a graph was
captured with belongs to the stream of its capture: whatever is to have it between two replays runs there, in its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_in_turn = 0


class ComputeStreamError(RuntimeError):
    """A kernel was launched, or a graph replayed, on another stream than the compute stream."""


def check_compute_stream(stream: int) -> None:
    """`stream`: the current one's handle. Raises ComputeStreamError; of a captured launch the replay is asked."""
    if stream not in (0, _in_turn) and not torch.cuda.is_current_stream_capturing():
        raise ComputeStreamError(
            f"a kernel was launched on stream {stream:#x}: kernels share workspaces and start before those ahead of "
            "them end, so they all run on the default stream; other streams only copy, ordered by events"
        )


@contextmanager
def in_turn(stream: torch.cuda.Stream) -> Iterator[None]:
    """Launches go to `stream`, behind all that is on the compute stream by now, which goes on behind them. Of the
    thread that launches steps alone. Raises ComputeStreamError where another stream than the compute stream is left.
    """
    global _in_turn  # noqa: PLW0603 - as there is one compute stream
    compute = torch.cuda.current_stream()
    check_compute_stream(compute.cuda_stream)
    stream.wait_stream(compute)
    _in_turn = stream.cuda_stream
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        _in_turn = 0
        compute.wait_stream(stream)
