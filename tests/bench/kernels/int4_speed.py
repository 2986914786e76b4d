"""On one GPU: are INT4 products of every format right there, and what do scales of float16 and zero points cost?

    python tests/bench int4_speed [--rows 1 2 8 32 128 1024] [--formats int4_g32 int4_g32_f16 ...]

Products are those that serving launches for 31B's matrices on this GPU. Each is compared with float64: also what all
outputs together lost, which says whether scales of float16 were rounded on the way. Then it is timed inside a CUDA
graph of many calls on matrices of their own. Cells are microseconds, and of the first format's in brackets. Exits 1
when a comparison fails.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from plain_products import fine_scales, gain, int4_elements, int4_zero_points

from bench.kernels.attention_work import architecture_of
from bench.kernels.kernel_speed import microseconds, own_capability
from bench.kernels.linear_speed import CUDA, SHAPES, TOLERANCE, copies
from modelserve.model.weight_format import ScaleType, StoredType, TextLinear, WeightFormat, int4
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.weights.quantised_tiles import int4_matrix_bytes, int4_tiles
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.products.int4_linear import Int4Tiles

FORMATS: dict[str, WeightFormat] = {
    str(stored): stored
    for group in (32, 128)
    for symmetric in (True, False)
    for scale_type in (ScaleType.BFLOAT16, ScaleType.FLOAT16)
    for stored in (int4(group, symmetric=symmetric).model_copy(update={"scale_type": scale_type}),)
}
LINEARS = dict(
    zip(SHAPES["31B"], (TextLinear.QKV, TextLinear.OUTPUT, TextLinear.GATE_UP, TextLinear.DOWN), strict=True)
)
MOST_LOST = 5e-4  # of the sum of all outputs; scales that are rounded lose 1.4e-3 and more


def matrix(outputs: int, inputs: int, stored: WeightFormat) -> Int4Tiles:
    group = stored.group_size or 0
    tiles, groups = int4_tiles(inputs), 256 // group
    words = torch.randint(-(2**31), 2**31, (tiles, outputs, 32), device=CUDA).to(torch.int32)
    scales = fine_scales(tiles, groups, outputs, size=inputs**-0.5 / 8, device=CUDA)
    zeros = int4_zero_points(tiles, groups, outputs, device=CUDA)
    return Int4Tiles(words, scales.to(getattr(torch, stored.scale_type)), None if stored.symmetric else zeros, inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 128, 1024])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    arguments = parser.parse_args()
    architecture, capability, wrong = architecture_of("31B"), own_capability(), 0
    tables = {name: resolve(capability, architecture, Formats(FORMATS[name])) for name in arguments.formats}
    operations = {name: Operations(table, CUDA) for name, table in tables.items()}
    print(torch.cuda.get_device_name(), f"{'shape':10}{'rows':>6}", *(f"{name:>24}" for name in tables), flush=True)
    for layer, (outputs, inputs) in SHAPES["31B"].items():
        cells: dict[int, list[float]] = {rows: [] for rows in arguments.rows}
        for name in tables:
            stored = FORMATS[name]
            products = operations[name].products(LINEARS[layer], (outputs, inputs), StoredType.INT4)
            group = stored.group_size or 0
            size = int4_matrix_bytes(rows=outputs, inputs=inputs, group=group, zero_points=not stored.symmetric)
            matrices = [matrix(outputs, inputs, stored) for _ in range(copies(size))]
            exact = int4_elements(matrices[0], torch.float64)
            for rows in arguments.rows:
                x = torch.randn((rows, inputs), device=CUDA).bfloat16()
                output, expected = products.dense(x, matrices[0]).double(), x.double() @ exact.t()
                off = float((output - expected).norm() / expected.norm())
                rounded = x.double() @ exact.bfloat16().double().t()  # as kernels of many rows round each element
                lost = min(abs(gain(output, expected)), abs(gain(output, rounded)))
                if not (off < TOLERANCE and lost < MOST_LOST):
                    wrong += 1
                    print(f"{layer} {name}, {rows} rows: {off:.1e} of the norm, {lost:.1e} lost: WRONG", flush=True)
                cells[rows].append(microseconds([partial(products.dense, x, each) for each in matrices]))
            del matrices, exact
        for rows, times in cells.items():
            shown = (f"{time:9.1f} ({time / times[0]:.3f})" for time in times)
            print(f"{layer:10}{rows:6}", *(f"{each:>24}" for each in shown), flush=True)
    print(f"{wrong} products are wrong")
    return int(wrong > 0)
