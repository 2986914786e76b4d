"""On one Hopper GPU: do launches of every kernel of ours with rings have the same bits, ten thousand times and more?

    python tests/bench equal_bits [--launches 10000] [--only TEXT]
        [--storm | --early]

Shapes stay in the L2 cache, where copies come soonest. Launches are captured one behind the other and start while
those ahead end; each result is compared on the GPU with that of a launch on its own, bits of NaN included. With
MODELSERVE_CUDA_BUILD=chaos every wait and arrival is disturbed (`barriers_sm90.cuh`). --storm: two more warps
of products of few rows read shared memory with all lanes in one bank, so that what others read comes late. --early:
besides, stages are freed right behind their reads, which is wrong: launches that differ show that the storm finds
that. Exits 1 where any launch differs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from attention_cases import Chunk, chunk_step, decode_step, folded, frequencies, key_weight, layout, pages_of, rotation
from launch_order import one_after_the_other
from paged_case import PagedCase
from torch import Tensor

from bench.kernels.linear_speed import fp8_matrix, int4_matrix
from modelserve.sizing.backends.products import INTEGER_ROWS
from modelserve_worker.kernels.attention import triton_launches
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.compiling import cuda_kernel
from modelserve_worker.kernels.experts.grouped_rows_sm90 import grouped_rows, grouped_rows_beside
from modelserve_worker.kernels.products.hopper import linear_rows_sm90
from modelserve_worker.kernels.products.hopper.cluster_rows_sm90 import cluster_rows
from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import integer_rows
from modelserve_worker.kernels.products.hopper.linear_int4_sm90 import int4_product
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import dense_rows, fp8_rows, int4_rows
from modelserve_worker.kernels.products.linear_tiles import SharedBuffers

CUDA = torch.device("cuda")
SHARED = SharedBuffers(CUDA)
CAPTURED = 50  # launches of a graph
# By what is asked of a product: many stages and few tiles, the largest tiles in few stages, what lies between.
SHAPES = {"split": (1024, 4096), "gated": (46464, 256), "": (16384, 512)}
Run = Callable[[], Tensor]


def products() -> Iterator[tuple[str, Run]]:
    """Every format, number of rows and kind of result; with them every size of tiles."""
    for asked, (outputs, inputs) in SHAPES.items():
        how = {asked: True} if asked else {}
        weight = (torch.randn(outputs, inputs, device=CUDA) * inputs**-0.5).bfloat16()
        fp8, g32, g256 = fp8_matrix(outputs, inputs), *(int4_matrix(outputs, inputs, group) for group in (32, 256))
        zeros = int4_matrix(outputs, inputs, 32, zeros=True)
        for rows in (8, 16, 32):
            x = torch.randn(rows, inputs, device=CUDA).bfloat16()
            ways = (("bfloat16", dense_rows, weight), ("fp8", fp8_rows, fp8), ("int4 g32", int4_rows, g32),
                    ("int4 g256", int4_rows, g256), ("int4 zeros", int4_rows, zeros))  # fmt: skip
            for name, multiply, matrix in ways:
                yield f"few rows {name} {outputs}x{inputs} {rows} {asked}", partial(multiply, x, matrix, **how)
        for rows, (name, matrix) in itertools.product(INTEGER_ROWS, (("g32", g32), ("g256", g256), ("zeros", zeros))):
            x = torch.randn(rows, inputs, device=CUDA).bfloat16()
            yield f"integers int4 {name} {outputs}x{inputs} {rows} {asked}", partial(integer_rows, x, matrix, **how)
        for rows in (64,) if asked == "split" else (64, 128, 192, 256):
            x = torch.randn(rows, inputs, device=CUDA).bfloat16()
            for name, matrix in (("g32", g32), ("zeros", zeros)):
                yield (
                    f"many rows int4 {name} {outputs}x{inputs} {rows} {asked}",
                    partial(int4_product, x, matrix, shared=SHARED, **how),
                )


def clusters() -> Iterator[tuple[str, Run]]:
    """Tens of rows: tiles whole and in parts, more inputs than stages."""
    for gated, outputs, inputs in ((True, 20480, 512), (False, 2560, 2048), (False, 3072, 2560), (False, 256, 2560)):
        weight = (torch.randn(outputs, inputs, device=CUDA) * inputs**-0.5).bfloat16()
        for rows in (33, 64, 83, 128):
            x = torch.randn(rows, inputs, device=CUDA).bfloat16()
            yield f"tens of rows {outputs}x{inputs} {rows}", partial(cluster_rows, x, weight, gated=gated)


SLICED = (  # rows of experts, which are cut into slices of at most 128, or 256
    [0] * 14 + [1, 63], [1, 31, 0, 33, 65, 97, 129, 17], [1, 31, 0, 33, 65, 97, 129, 161, 193, 225, 257, 520],
)  # fmt: skip


def experts() -> Iterator[tuple[str, Run]]:
    """Rows sorted by expert, in slices of every length, and a dense product beside them."""
    for gated, listed in itertools.product((False, True), SLICED):
        counts = torch.tensor(listed, device=CUDA)
        ends, rows = counts.cumsum(0).to(torch.int32), int(counts.sum())
        matrices = (torch.randn(len(counts), 704, 512, device=CUDA) * 512**-0.5).bfloat16()
        x = torch.randn(rows, 512, device=CUDA).bfloat16()
        name = f"experts {'gated' if gated else ''} {rows}"
        yield name, partial(grouped_rows, x, matrices, ends, gated=gated)
        dense, dense_x = (torch.randn(each, 1536, device=CUDA).bfloat16() * 0.03 for each in (2112, 120))
        yield f"{name}, dense beside", partial(_both, x, matrices, ends, dense_x, dense, gated=gated)


def _both(*given: Tensor, gated: bool) -> Tensor:
    return torch.cat([each.flatten() for each in grouped_rows_beside(*given, gated=gated)])


def attention() -> Iterator[tuple[str, Run]]:
    for heads, contexts in ((4, [2304] * 8), (2, [333, 1, 64, 900]), (1, [8200]), (2, [900, 64, 1300] * 40)):
        case = PagedCase("global", heads, 512, "none", True, contexts, 0, device="cuda", pairs=64)
        weight, q = key_weight(case), case.random(len(contexts), heads * 8, 512)
        yield f"decode v_only {heads} {len(contexts)}", decodes(case, folded(q, weight, 64), weight)
    for heads, group, contexts in ((2, 4, [700, 64, 1300] * 40), (1, 8, [2304, 1])):
        case = PagedCase("global", heads, 512, "none", False, contexts, 0, device="cuda")
        yield f"decode kv {heads} {len(contexts)}", decodes(case, case.random(len(contexts), heads * group, 512), None)
    for heads, group, window, contexts in (
        (2, 4, 512, [700, 90, 512]),
        (16, 2, 1024, [3000]),
        (8, 2, 1024, [40, 1500]),
        (2, 4, 512, [700, 90, 512, 1] * 20),
        (16, 2, 1024, [3000, 33, 1100] * 4),
    ):
        case = PagedCase("sliding", heads, 256, "none", False, contexts, window, device="cuda")
        yield (
            f"decode sliding {heads} {window} {len(contexts)}",
            decodes(case, case.random(len(contexts), heads * group, 256), None),
        )
    for v_only in (True, False):
        case = PagedCase("global", 2, 512, "none", v_only, [700, 257], device="cuda", pairs=64)
        yield f"chunk global {'v_only' if v_only else 'kv'}", global_chunks(case)
    for heads, group, window in ((2, 4, 512), (8, 2, 1024)):
        yield f"chunk sliding {heads} {window}", sliding_chunks(heads, group, window)


def decodes(case: PagedCase, q: Tensor, weight: Tensor | None) -> Run:
    rows, step = layout(case), decode_step(case, list(range(len(q))))
    kernels = AttentionKernels.over(rows, capability=90, query_heads=q.shape[1])
    size = len(q) * triton_launches.decode_workspace(rows, query_heads=q.shape[1])
    workspace = torch.empty(size, device=CUDA)
    turns = {} if weight is None else {"key_weight": weight, "turns": rotation(case, 64, 64)}

    def run() -> Tensor:
        output = torch.full_like(q, torch.nan)
        kernels.decode(q, output, step, pages=pages_of(case), workspace=workspace, **turns)
        return output

    return run


def global_chunks(case: PagedCase) -> Run:
    step = chunk_step(case, [Chunk(0, 400, 300), Chunk(1, 0, 257)], group=8, block_rows=128)
    rows, weight = layout(case), key_weight(case) if case.v_only else None
    q = folded(case.random(557, 16, 512, scale=2.0), weight, 64)
    assert step.chunks is not None
    words = step.passes[0].most_pages * case.page_tokens * triton_launches.scratch_per_key(rows, pairs=64)
    scratch = torch.empty(words, dtype=q.dtype, device=CUDA)

    kernels = AttentionKernels.over(rows, capability=90, query_heads=q.shape[1])

    def run() -> Tensor:
        output = torch.full_like(q, torch.nan)
        kernels.chunk(
            q, output, step, pages=pages_of(case), key_weight=weight, scratch=scratch,
            inverse_frequencies=frequencies(case), pairs=64,
        )  # fmt: skip
        return output

    return run


def sliding_chunks(heads: int, group: int, window: int) -> Run:
    from test_sliding_chunk_sm90 import Step  # its rows that nobody wrote are NaN

    return Step(heads, group, window, [Chunk(0, 700, 200), *(Chunk(slot, 0, 64) for slot in range(1, 40))]).attended


def differing(run: Run, launches: int) -> int:
    """Launches of so many whose bits differ from those of one on its own."""
    with one_after_the_other():
        run()
        torch.cuda.synchronize()
        expected = run().view(torch.uint8)
        torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run() for _ in range(CAPTURED)]
        for output in outputs:
            wrong += (output.view(torch.uint8) != expected).any()
    for _ in range(-(-launches // CAPTURED)):
        graph.replay()
    return int(wrong)


def stormy(*, early: bool) -> None:
    """Let `cuda_kernel` compile products of few rows with two more warps, which all read one bank."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(
        cuda_kernel.FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    path = folder / cuda_kernel.source_file("linear_rows_sm90.cu").relative_to(cuda_kernel.FOLDER)
    text = path.read_text()
    storm = """  if (warp > CONSUMERS / 32) {
    for (int i = 0; i < 400; i++) {
      u32 read;
      asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(read) : "r"(shared + lane * 128) : "memory");
    }
    return;
  }
"""
    changes = [("  if (warp == CONSUMERS / 32) {\n", storm + "  if (warp == CONSUMERS / 32) {\n"),
               ("__launch_bounds__(CONSUMERS + 32, 1)", "__launch_bounds__(CONSUMERS + 96, 1)")]  # fmt: skip
    if early:
        changes += [("      held.exchange(barriers.empty(ring.place));\n", "      __syncwarp();\n"),
                    ("lane);\n      ring.advance();\n",
                     "lane);\n      release(barriers.empty(ring.place));\n      ring.advance();\n")]  # fmt: skip
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text)
    cuda_kernel.FOLDER = folder

    def launch(source, *, threads, **options):
        cuda_kernel.launch(source, threads=threads + 64, **options)

    linear_rows_sm90.launch = launch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--storm", action="store_true")
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="after which no further kernel is begun")
    chosen = parser.parse_args()
    if chosen.storm or chosen.early:
        stormy(early=chosen.early)
    torch.manual_seed(int(time.time()))
    begun, total, wrong = time.monotonic(), 0, 0
    for name, run in (*products(), *clusters(), *experts(), *attention()):
        if chosen.only not in name or time.monotonic() - begun > chosen.seconds:
            continue
        start = time.monotonic()
        found = differing(run, chosen.launches)
        total, wrong = total + 1, wrong + found
        spent = (time.monotonic() - start) / chosen.launches * 1e6
        if found or os.environ.get("VERBOSE"):
            print(f"{found:7d} of {chosen.launches} differ  {spent:6.1f} us  {name}", flush=True)
    print(f"{total} builds and shapes x {chosen.launches} launches: {wrong} differ, {time.monotonic() - begun:.0f} s")
    return bool(wrong)
