"""Triton kernels of products with FP8 (e4m3) weights, in the order of `fp8_linear.Fp8Pairs`, on any capability.

Weights are the left operand: 16-bit pairs become two planes [BLOCK_N, 64] of bfloat16 by integer operations, exactly,
and are multiplied with inputs of BLOCK_M rows. Scales go on float32 sums: a row's at the end, a block's every 128
inputs.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import FP8_PAIR_INPUTS, fp8_inputs
from modelserve_worker.kernels.compiling.bundles import bundle, constant
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.products.fp8_linear import SCALE_BLOCK, Fp8Pairs
from modelserve_worker.kernels.products.linear_tiles import (
    LinearTile,
    SharedBuffers,
    SplitSums,
    grouped_tile,
    linear_tile,
)
from modelserve_worker.kernels.products.split_inputs import expert_rows, split_range, store_product
from modelserve_worker.kernels.products.tiled_products import contiguous_rows, fused_product, grouped_product

TILE_INPUTS = tl.constexpr(SCALE_BLOCK)
PAIR_INPUTS = tl.constexpr(FP8_PAIR_INPUTS)
LEAST_EXPONENT = tl.constexpr(9)  # of a row's largest element, 127 added: smaller ones would have a scale below 2^-126
ROUNDED_TOGETHER = 1024  # inputs of a row, by a program that rounds them ahead
SPLITTER = tl.constexpr(2.0**20 + 1)  # leaves four of float32's 24 significant bits
PACKED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no assembly
UNIT = tl.constexpr(2.0**120)  # bfloat16's exponent begins 120 below e4m3's

# Two pairs in one register. Sign and the other seven bits go to the top and to the middle of bfloat16; times 2^120,
# which is exact, subnormals included.
PLANES = tl.constexpr("""{
.reg .b32 v, t, unit, none;
mov.b32 unit, 0x7b807b80;
mov.b32 none, 0x80008000;
shl.b32 v, $2, 8;
shr.b32 t, v, 4;
and.b32 t, t, 0x07f007f0;
lop3.b32 t, v, 0x80008000, t, 0xea;
fma.rn.bf16x2 $0, t, unit, none;
shr.b32 t, $2, 4;
and.b32 t, t, 0x07f007f0;
lop3.b32 t, $2, 0x80008000, t, 0xea;
fma.rn.bf16x2 $1, t, unit, none;
}""")


# Both to four significant bits, ties to even: 17 x, rounded to bfloat16's eight bits, has no more than four of x's, and
# the difference to x gives them back.
PRECISION = tl.constexpr("""{
.reg .b32 wide, rest, sixteen, one, minus;
mov.b32 sixteen, 0x41804180;
mov.b32 one, 0x3f803f80;
mov.b32 minus, 0xbf80bf80;
fma.rn.bf16x2 wide, $1, sixteen, $1;
fma.rn.bf16x2 rest, wide, minus, $1;
fma.rn.bf16x2 $0, rest, one, wide;
}""")


@bundle
class PairedMatrix(NamedTuple):
    """A matrix, or one of each expert behind one another, as kernels take it."""

    elements: Tensor  # int16: pairs [N, stored / 2]
    scales: Tensor
    SCALE_ROWS: tl.constexpr  # rows of a block with one scale; 0: each row has one
    ROUNDS: tl.constexpr  # inputs to the precision of e4m3
    WHOLE: tl.constexpr  # K is a multiple of the tile


@triton.jit
def element(bits):
    """e4m3 in the low eight bits of int32 -> float32."""
    return ((((bits & 0x80) << 8) | ((bits & 0x7F) << 4)) << 16).to(tl.float32, bitcast=True) * UNIT


@triton.jit
def planes_of(pairs):
    """Pairs int16 -> their first and their second elements."""
    if PACKED:
        return tl.inline_asm_elementwise(
            PLANES, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:  # noqa: RET505 - the compiler looks at both after an if without else
        bits = pairs.to(tl.int32)
        return element(bits), element(bits >> 8)


@triton.jit
def inputs_of(x_at, first, k, wanted, K, WHOLE: tl.constexpr, ROUNDS: tl.constexpr):
    """Inputs first + k of some rows [k, BLOCK_M]; zeros past the last one and past the rows."""
    mask = wanted if WHOLE else wanted & (first + k < K)[:, None]
    values = tl.load(x_at + first, mask=mask, other=0.0)
    values = values if PACKED else values.to(tl.float32)
    return e4m3_precision(values) if ROUNDS else values


@triton.jit
def e4m3_precision(values):
    """To four significant bits, ties to even; bfloat16, or float32 where there is no assembly."""
    if PACKED:
        return tl.inline_asm_elementwise(PRECISION, "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:  # noqa: RET505 - the compiler looks at both after an if without else
        wide = values * SPLITTER
        return wide + (values - wide)


@triton.jit
def columns_of_pairs():
    """Inputs of the first elements of a tile's pairs, from its first input; those of the second lie 32 behind."""
    pair = tl.arange(0, TILE_INPUTS // 2)
    return pair // (PAIR_INPUTS // 2) * PAIR_INPUTS + pair % (PAIR_INPUTS // 2)


@triton.jit
def fp8_sum(
    x_at,
    wanted,
    elements,
    scales,
    n,
    N,
    K,
    stored,
    begin,
    end,
    WHOLE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Float32 [BLOCK_N, BLOCK_M] of tiles [begin, end), scaled. Rows n may lie past the end: the last one stands in."""
    n = tl.minimum(n, N - 1)
    pair = tl.arange(0, TILE_INPUTS // 2)
    k = columns_of_pairs()
    rows = elements + n.to(tl.int64)[:, None] * (stored // 2) + pair[None, :]
    total = tl.zeros([n.shape[0], wanted.shape[1]], tl.float32)
    for tile in range(begin, end):
        first = tile * TILE_INPUTS
        if WHOLE:
            pairs = tl.load(rows + first // 2)
        else:
            pairs = tl.load(rows + first // 2, mask=(first // 2 + pair < stored // 2)[None, :], other=0)
        even, odd = planes_of(pairs)
        x_even = inputs_of(x_at, first, k, wanted, K, WHOLE, ROUNDS)
        x_odd = inputs_of(x_at, first + PAIR_INPUTS // 2, k, wanted, K, WHOLE, ROUNDS)
        if SCALE_ROWS:
            scale = tl.load(scales + n // SCALE_ROWS * tl.cdiv(K, TILE_INPUTS) + tile)
            total += tl.dot(odd, x_odd, tl.dot(even, x_even)) * scale[:, None]
        else:
            total = tl.dot(odd, x_odd, tl.dot(even, x_even, total))
    if not SCALE_ROWS:
        total *= tl.load(scales + n)[:, None]
    return total


@triton.jit(do_not_specialize=["rows", "splits"])
def fp8_product(
    x,  # [rows, K]
    x_stride,
    matrix: PairedMatrix,
    output,  # [rows, N]
    sums: SplitSums,
    rows,
    N,
    K,
    stored,
    splits,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    row_block, column_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x + m.to(tl.int64)[None, :] * x_stride + columns_of_pairs()[:, None]
    begin, end = split_range(tl.cdiv(K, TILE_INPUTS), split, splits)
    total = fp8_sum(
        x_at, (m < rows)[None, :], matrix.elements, matrix.scales, n, N, K, stored, begin, end, matrix.WHOLE,
        matrix.SCALE_ROWS, matrix.ROUNDS,
    )  # fmt: skip
    block = row_block * tl.num_programs(1) + column_block
    store_product(total, output, m, n, rows, N, sums.parts, sums.arrivals, block, split, splits, SPLIT)


@triton.jit
def fp8_expert_products(
    x,  # [R, K], rows of one expert beside one another
    x_stride,
    matrix: PairedMatrix,
    output,  # [R, N]
    ends,  # of each expert's rows
    N,
    K,
    stored,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    column_block, expert, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = expert_rows(ends, expert)
    tiles = tl.cdiv(K, TILE_INPUTS)
    SCALE_ROWS: tl.constexpr = matrix.SCALE_ROWS
    elements = matrix.elements + expert.to(tl.int64) * N * (stored // 2)
    scales = matrix.scales + expert * (tl.cdiv(N, SCALE_ROWS) * tiles if SCALE_ROWS else N)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    for first in range(begin + part * BLOCK_M, end, tl.num_programs(2) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        x_at = x + m.to(tl.int64)[None, :] * x_stride + columns_of_pairs()[:, None]
        total = fp8_sum(
            x_at,
            (m < end)[None, :],
            elements,
            scales,
            n,
            N,
            K,
            stored,
            0,
            tiles,
            matrix.WHOLE,
            SCALE_ROWS,
            matrix.ROUNDS,
        )
        store_product(total, output, m, n, end, N, None, None, 0, 0, 1, False)


@triton.jit
def round_inputs(x, x_stride, rounded, scales, K: tl.constexpr, stored: tl.constexpr, BLOCK: tl.constexpr):
    """A row to e4m3 in the order of pairs, by a power of two: the least one that leaves no element above 448."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    k = pair // (PAIR_INPUTS // 2) * PAIR_INPUTS + pair % (PAIR_INPUTS // 2)
    at = x + row * x_stride + k
    even = tl.load(at, mask=k < K, other=0.0).to(tl.float32)
    odd = tl.load(at + PAIR_INPUTS // 2, mask=k + PAIR_INPUTS // 2 < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=0)
    # Its exponent, or the next one where it is above 1.8125 of it, which four bits round above 1.75.
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) + 0x17FFFF) >> 23, LEAST_EXPONENT)
    scale = (exponent - 8 << 23).to(tl.float32, bitcast=True)
    inverse = (262 - exponent << 23).to(tl.float32, bitcast=True)
    tl.store(rounded + row * (stored // 2) + pair, rounded_pair(even * inverse, odd * inverse), mask=pair < stored // 2)
    tl.store(scales + row, scale)


@triton.jit
def round_precision(x, x_stride, rounded, K, BLOCK: tl.constexpr):
    """A part of a row, x [rows, K] bfloat16, to e4m3's precision."""
    launch_dependents()
    wait_for_prerequisites()
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + k, mask=k < K, other=0.0)
    values = values if PACKED else values.to(tl.float32)
    tl.store(rounded + row * K + k, e4m3_precision(values), mask=k < K)


@triton.jit
def rounded_pair(low, high):
    """Both as e4m3, their bits in int16."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - the compiler looks at both after an if without else
        return (e4m3_bits(low) | (e4m3_bits(high) << 8)).to(tl.int16)


@triton.jit
def e4m3_bits(values):
    """In int32."""
    return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


def _paired(matrix: Fp8Pairs) -> PairedMatrix:
    constants = (matrix.scale_rows, matrix.rounds_inputs, matrix.inputs % SCALE_BLOCK == 0)
    return PairedMatrix(matrix.elements.view(torch.int16), matrix.scales, *map(constant, constants))


def fp8_product_with(x: Tensor, matrix: Fp8Pairs, tile: LinearTile, *, shared: SharedBuffers) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix with the tile given -> [T, N]."""
    return fused_product(
        fp8_product, x, (_paired(matrix),), tile, outputs=matrix.rows, inputs=(matrix.inputs, matrix.elements.shape[1]),
        tiles=triton.cdiv(matrix.inputs, SCALE_BLOCK), shared=shared,
    )  # fmt: skip


def fp8_grouped_with(x: Tensor, matrix: Fp8Pairs, ends: Tensor, tile: LinearTile) -> Tensor:
    """A grouped `Product` with the tile given."""
    _, outputs, stored = matrix.elements.shape
    return grouped_product(
        fp8_expert_products, x, (_paired(matrix),), ends, tile, outputs=outputs, inputs=(matrix.inputs, stored)
    )


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (float8_e4m3fn [T, K rounded up to 64] in the order of pairs, scales float32 [T, 1]).

    A row's scale is the least power of two that leaves no element above 448. From capability 8.9 on.
    """
    x = contiguous_rows(x)
    rows, inputs = x.shape
    stored = fp8_inputs(inputs)
    rounded = torch.empty((rows, stored), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(stored // 2)
    launch(
        round_inputs, (rows,),
        x, x.stride(0), rounded.view(torch.int16), scales, K=inputs, stored=stored, BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return rounded, scales


def rounded_precision(x: Tensor) -> Tensor:
    """x [T, K] bfloat16 rounded to e4m3's precision, in bfloat16. From capability 8.0 on."""
    x = contiguous_rows(x)
    rounded = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = x.shape[0], triton.cdiv(x.shape[1], ROUNDED_TOGETHER)
    launch(round_precision, grid, x, x.stride(0), rounded, x.shape[1], BLOCK=ROUNDED_TOGETHER, num_warps=4)
    return rounded


def fp8_unpacked_product(x: Tensor, matrix: Fp8Pairs, *, capability: int, shared: SharedBuffers) -> Tensor:
    """`fp8_product_with` the tile for these rows on GPUs of `capability`."""
    return fp8_product_with(x, matrix, linear_tile("fp8", x.shape[0], capability=capability), shared=shared)


def fp8_rounded_product(x: Tensor, matrix: Fp8Pairs) -> Tensor:
    """x [T, K] bfloat16, rounded to e4m3 by row, times the transposed matrix with a scale a row -> [T, N]."""
    rounded, scales = rounded_inputs(x)
    return torch._scaled_mm(
        rounded,
        matrix.elements.t(),
        scale_a=scales,
        scale_b=matrix.scales.unsqueeze(0),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


def fp8_grouped(x: Tensor, matrix: Fp8Pairs, ends: Tensor, *, capability: int) -> Tensor:
    """`fp8_grouped_with` the tile for so many rows and experts on GPUs of `capability`."""
    return fp8_grouped_with(x, matrix, ends, grouped_tile("fp8", x.shape[0], len(ends), capability))
