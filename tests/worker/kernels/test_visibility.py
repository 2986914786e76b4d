"""What dependent launches rest on beyond the words of PTX: reads through the first cache see what was written before.

PTX promises of `griddepcontrol.wait` that writes of the kernel ahead are visible behind it. `dependent_launch` reads
more: arrays of a step before a kernel's own wait, behind the embedding, which waits itself and only then lets others
start; and memory that an earlier kernel of the step read, too, and one between the two has written. Both want the
first cache of a multiprocessor without lines of an earlier kernel. That this holds is seen here, on each GPU that
runs the tests.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hopper import on_hopper

from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer

WORDS = 8192  # 32 KB
ROUNDS = 10_000
CAPTURED = 100


@on_hopper
@pytest.mark.parametrize("early", [False, True])
def test_reads_through_the_first_cache_see_what_a_kernel_between_has_written(
    early: bool,
) -> None:
    """All blocks of the reading, the writing and the comparing kernel are resident at once."""
    words, number, sink, stale = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (WORDS, 1, 1, 1))
    count, blocks = (WORDS, ctypes.c_int), torch.cuda.get_device_properties(0).multi_processor_count

    def kernel(entry: str, *arguments) -> None:
        source = CudaSource(str(Path(__file__).with_name("visibility.cu")), entry, "sm_90a")
        launch(source, grid=(blocks, 1), threads=256, arguments=arguments)

    def turn() -> None:
        kernel("reads", pointer(words), count, pointer(sink))
        kernel("writes", pointer(words), count, pointer(number))
        kernel("advances", pointer(number))
        kernel("compares", pointer(words), count, pointer(number), pointer(stale), (int(early), ctypes.c_int))

    turn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            turn()
    for _ in range(ROUNDS // CAPTURED):
        graph.replay()
    assert int(number) == ROUNDS + 1
    assert int(stale) == 0
