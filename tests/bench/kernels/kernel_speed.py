"""On one GPU: every kernel of a model alone, as a table of kernels has it, and its share of what that GPU could do.

    python tests/bench kernel_speed [--models E4B 31B-INT4] [--only TEXT] [--context 32768] [--segments 1 8]
        [--chunk 8192] [--rows 1 32 2048] [--capability 80] [--compilers 14] [--deadline SECONDS]

Attention at a context, products and experts by rows, and what stands between them, inside captured graphs. Cells are
`case time share`: of --bandwidth, or of the rate of products where operations take longer, which is measured first.
Caches hold none of it: calls go round 200 MB. Whether results are right is what the tests of tests/worker/kernels say,
which run on the GPU as they are. Exit status as in `deadline.py`.

With another --capability it is a stand-in for GPUs that are not there: the table is that GPU's, with its tiles, and
Triton compiles for it, whose instructions (`mma.sync`, `cp.async`; no dependent launch) ptxas then assembles for the
one at hand. So bandwidth, multiprocessors and caches are those of this GPU, code and tiles those of the other; the rate
is that of `mma.sync` from registers, beside cuBLAS in bfloat16 (by which the second share is). `!` misses 80 % of
bandwidth or 60 % of operations; cases whose floor is under 5 us, what a launch or two take, are not judged, nor are
PyTorch's kernels (`=`), which the other GPU has others of.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from bench.deadline import add_deadline, die_with_parent, within
from bench.kernels.attention_work import DEVICE, architecture_of
from bench.kernels.kernel_work import Cell, Model, Sizes, lines, random
from modelserve.model.weight_format import ScaleType, StoredType, WeightFormat, int4
from modelserve.sizing.backends.generations import generation_of

SHORT_US = 5.0
LEAST_SHARE = {"bytes": 0.8, "operations": 0.6}


FORMATS = {
    "": None, "-INT4": int4(32), "-INT8": WeightFormat(stored=StoredType.INT8, scales="channel"),
    "-INT8-G32": WeightFormat(stored=StoredType.INT8, scales="group", group_size=32, scale_type=ScaleType.FLOAT16),
    "-FP8": WeightFormat(stored=StoredType.FP8, scales="channel", fp8_activations=True),
}  # fmt: skip
MODELS: dict[str, Callable[[], Model]] = {
    name + form: lambda name=name, form=form: Model(architecture_of(name), FORMATS[form])
    for name, forms in (("E4B", ("",)), ("31B", FORMATS), ("26B-A4B", FORMATS))
    for form in forms
}


def microseconds(calls: Sequence[Callable[[], object]], *, replays: int = 20) -> float:
    """Median over replays of one graph of all calls, per call."""
    calls[0]()  # compiled
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(replays):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / len(calls))
    return statistics.median(times)


def own_capability() -> int:
    major, minor = torch.cuda.get_device_capability(DEVICE)
    return 10 * major + minor


def pretend(capability: int) -> None:
    """Triton compiles for a GPU of this capability from here on; ptxas assembles that for the GPU at hand."""
    driver = triton.runtime.driver.active
    here, target = driver.get_current_target().arch, GPUTarget("cuda", capability, 32)
    most = generation_of(capability).shared_bytes

    def assembled_here(backend: Any, stages: dict[str, Any], options: Any, language: Any, _: int) -> None:
        def assemble(ptx: str, metadata: dict[str, Any]) -> bytes:
            if metadata["shared"] > most:
                raise MemoryError(f"{metadata['shared'] >> 10} of {most >> 10} KiB")
            return bytes(backend.make_cubin(ptx, metadata, options, here))

        stages["cubin"] = assemble

    driver.get_current_target = lambda: target
    triton.knobs.runtime.add_stages_inspection_hook = assembled_here


@triton.jit
def multiply_registers(x, y, ROUNDS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left, right = tl.load(x + m * K + k[None, :]), tl.load(x + k[:, None] + n * K)
    total = tl.zeros([M, N], tl.float32)
    for _ in range(ROUNDS):
        total = tl.dot(left, right, total)
    tl.store(y + tl.program_id(0) * M * N + m * N + n, total)


def rates(bandwidth: float, *, native: bool) -> tuple[float, float]:
    """Operations a second in bfloat16 of `mma.sync` from registers, if `native` of cuBLAS, and of cuBLAS."""
    if DEVICE.type == "cpu":
        return bandwidth, bandwidth
    programs, rounds, size = 132 * 8, 2000, 8192
    x, y, square = random(128, 64), torch.empty(programs, 128, 128, device=DEVICE), random(size, size)
    launch = partial(multiply_registers[(programs,)], x, y, ROUNDS=rounds, M=128, N=128, K=64, num_warps=8)
    library = 1e6 * 2 * size**3 / microseconds([partial(torch.mm, square, square)])
    return library if native else 1e6 * programs * rounds * 2 * 128 * 128 * 64 / microseconds([launch]), library


def told(cell: Cell, bandwidth: float, rate: float, library_rate: float) -> str:
    try:
        return measured(cell, bandwidth, rate, library_rate)
    except Exception as error:  # a tile that such a GPU cannot hold, for one; the other cells are wanted
        return f"{cell.name} {type(error).__name__} {str(error)[:40]}"


def measured(cell: Cell, bandwidth: float, rate: float, library_rate: float) -> str:
    work = cell.make()
    if DEVICE.type == "cpu":  # Triton's interpreter: it runs, and takes no time that says anything
        work.calls[0]()
        return f"{cell.name} ran"
    spent = microseconds(list(work.calls))
    reading, computing = 1e6 * work.bytes / bandwidth, 1e6 * work.operations / rate
    bound, floor = ("bytes", reading) if reading >= computing else ("operations", computing)
    mark = "=" if cell.library else "!" if floor >= SHORT_US and floor / spent < LEAST_SHARE[bound] else ""
    of_library = f"/{1e6 * work.operations / library_rate / spent:.0%}" if bound == "operations" else ""
    return f"{cell.name} {spent:.4g}us {floor / spent:.0%}{of_library}{mark}"


def compile_share(models: Sequence[str], sizes: Sizes, capability: int, only: str, share: int, shares: int) -> None:
    """In a process of its own, so that many compile at a time; results lie in Triton's cache."""
    die_with_parent()
    if capability != own_capability():
        pretend(capability)
    kernels = (
        (f"{name} {kernel}", cells) for name in models for kernel, cells in lines(MODELS[name](), capability, sizes)
    )
    for number, cell in enumerate(cell for label, cells in kernels if only in label for cell in cells):
        if number % shares == share:
            with torch.no_grad(), contextlib.suppress(Exception):  # which the measurement tells
                cell.make().calls[0]()


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--capability", type=int, help="of another GPU, 10 * major + minor, under 90")
    parser.add_argument("--context", type=int, default=Sizes.context, help="tokens before a decode, and with a chunk")
    parser.add_argument("--segments", type=int, nargs="+", default=Sizes.segments, help="decodes at a time")
    parser.add_argument("--chunk", type=int, default=Sizes.chunk, help="rows of a chunk, the last of the context")
    parser.add_argument("--rows", type=int, nargs="+", default=(*Sizes.few, *Sizes.many), help="of all else")
    parser.add_argument("--only", default="", help="kernels whose line contains this text")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second; the default is an H200's")
    parser.add_argument("--compilers", type=int, default=14, help="processes that compile first")
    add_deadline(parser)
    options = parser.parse_args()
    capability, here = options.capability or own_capability(), own_capability()
    os.environ["TRITON_CACHE_DIR"] = f"{tempfile.gettempdir()}/kernel_speed_{capability}"  # of nobody else's
    few, many = ([n for n in options.rows if (n <= 64) is is_few] for is_few in (True, False))
    sizes = Sizes(options.context, tuple(options.segments), options.chunk, tuple(few), tuple(many))
    with within(options.deadline) as time:
        spawn, given = get_context("spawn"), (options.models, sizes, capability, options.only)
        shares = range(options.compilers)
        compiling = [spawn.Process(target=compile_share, args=(*given, share, len(shares))) for share in shares]
        for each in compiling:
            each.start()
        for each in compiling:
            each.join()
        if capability != here:
            pretend(capability)
        rate, library_rate = rates(options.bandwidth, native=capability == here)
        print(
            f"{torch.cuda.get_device_name()} as {capability / 10}: {options.bandwidth / 1e12:.1f} TB/s, "
            f"products {rate / 1e12:.0f} TFLOP/s, cuBLAS {library_rate / 1e12:.0f}; compiled after "
            f"{time.seconds:.0f} s", flush=True,
        )  # fmt: skip
        for name in options.models:
            for kernel, cells in lines(MODELS[name](), capability, sizes):
                if options.only in f"{name} {kernel}":
                    found = (told(cell, options.bandwidth, rate, library_rate) for cell in cells)
                    print(f"{name} {kernel}: {', '.join(found)}", flush=True)
    return time.code()
