"""Triton kernels of products with INT8 weights, in the order of `int8_linear.Int8Pairs`, on any capability.

Weights are the left operand: 16-bit pairs become two planes of bfloat16 by integer operations, exactly, and are
multiplied with inputs of BLOCK_M rows. Scales go on float32 sums: a row's at the end, a group's behind each group.
Products of many rows dequantise blocks of the matrix, each element rounded once, and leave the rest to cuBLAS.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import INT8_TILE_INPUTS
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.products.fp8_linear_triton import PACKED, PAIR_INPUTS, inputs_of
from modelserve_worker.kernels.products.int8_linear import Int8Pairs
from modelserve_worker.kernels.products.linear_tiles import (
    LinearTile,
    SharedBuffers,
    SplitSums,
    grouped_tile,
    linear_tile,
)
from modelserve_worker.kernels.products.split_inputs import expert_rows, split_range, store_product
from modelserve_worker.kernels.products.tiled_products import dequantised_product, fused_product, grouped_product

STORED_MULTIPLE = tl.constexpr(INT8_TILE_INPUTS)  # elements of a row
PLANE = tl.constexpr(PAIR_INPUTS.value // 2)

# Two pairs in one register. Seven bits of an element become the mantissa of 128 + v, and the eighth that of what is too
# much, -128 or -256; their sum is exact.
PLANES = tl.constexpr(
    "{\n.reg .b32 t, v, excess, one;\nmov.b32 one, 0x3f803f80;\nshr.b32 t, $2, 8;\n"
    + "".join(
        f"lop3.b32 v, {pairs}, 0x007f007f, 0x43004300, 0xea;\nlop3.b32 excess, {pairs}, 0x00800080, 0xc300c300, 0xea;\n"
        f"fma.rn.bf16x2 {plane}, v, one, excess;\n"
        for plane, pairs in (("$0", "$2"), ("$1", "t"))
    )
    + "}"
)


@triton.jit
def planes_of(pairs):
    """Pairs int16 -> their first and their second elements."""
    if PACKED:
        return tl.inline_asm_elementwise(
            PLANES, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:  # noqa: RET505 - the compiler looks at both after an if without else
        bits = pairs.to(tl.int32)
        return ((bits << 24) >> 24).to(tl.float32), ((bits << 16) >> 24).to(tl.float32)


@triton.jit
def columns_of_pairs(TILE: tl.constexpr):
    """Inputs of the first elements of a tile's pairs, from its first input; those of the second lie 32 behind."""
    pair = tl.arange(0, TILE // 2)
    return pair // PLANE * PAIR_INPUTS + pair % PLANE


@triton.jit
def pairs_at(elements, n, K, first, TILE: tl.constexpr):
    """Where the pairs of rows n and of the tile from input `first` on lie."""
    of_row = tl.cdiv(K, STORED_MULTIPLE) * (STORED_MULTIPLE // 2)
    return elements + n.to(tl.int64)[:, None] * of_row + first // 2 + tl.arange(0, TILE // 2)[None, :]


@triton.jit
def scale_of(scales, group, n, N, K, GROUP: tl.constexpr):
    """Of rows n in a group; past the last group, where inputs are zeros, the last one's."""
    return tl.load(scales + tl.minimum(group, K // GROUP - 1).to(tl.int64) * N + n).to(tl.float32)


@triton.jit
def int8_sum(
    x_at, wanted, elements, scales, n, N, K, begin, end, WHOLE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Float32 [BLOCK_N, BLOCK_M] of tiles [begin, end), scaled. Rows n may lie past the end: the last one stands in."""
    n = tl.minimum(n, N - 1)
    k = columns_of_pairs(TILE)
    total = tl.zeros([n.shape[0], wanted.shape[1]], tl.float32)
    for tile in range(begin, end):
        first = tile * TILE
        even, odd = planes_of(tl.load(pairs_at(elements, n, K, first, TILE)))
        x_even = inputs_of(x_at, first, k, wanted, K, WHOLE, False)
        x_odd = inputs_of(x_at, first + PLANE, k, wanted, K, WHOLE, False)
        if GROUP == 0:
            total = tl.dot(odd, x_odd, tl.dot(even, x_even, total))
        elif GROUP >= PAIR_INPUTS:
            scale = scale_of(scales, first // GROUP, n, N, K, GROUP)
            total += tl.dot(odd, x_odd, tl.dot(even, x_even)) * scale[:, None]
        else:
            for part in tl.static_range(PLANE // GROUP):
                inside = (k // GROUP == part)[:, None]
                of_even = x_even if GROUP == PLANE else tl.where(inside, x_even, 0.0)
                of_odd = x_odd if GROUP == PLANE else tl.where(inside, x_odd, 0.0)
                group = first // GROUP + part
                total += tl.dot(even, of_even) * scale_of(scales, group, n, N, K, GROUP)[:, None]
                group += PLANE // GROUP
                total += tl.dot(odd, of_odd) * scale_of(scales, group, n, N, K, GROUP)[:, None]
    if GROUP == 0:
        total *= tl.load(scales + n)[:, None]
    return total


@triton.jit(do_not_specialize=["rows", "splits"])
def int8_product(
    x,  # [rows, K]
    x_stride,
    elements,  # int16: pairs [N, K rounded up / 2]
    scales,
    output,  # [rows, N]
    sums: SplitSums,
    rows,
    N,
    K,
    splits,
    WHOLE: tl.constexpr,  # K is a multiple of the tile
    GROUP: tl.constexpr,  # inputs with one scale; 0: all of a row
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    row_block, column_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x + m.to(tl.int64)[None, :] * x_stride + columns_of_pairs(TILE)[:, None]
    begin, end = split_range(tl.cdiv(K, TILE), split, splits)
    total = int8_sum(x_at, (m < rows)[None, :], elements, scales, n, N, K, begin, end, WHOLE, GROUP, TILE)
    block = row_block * tl.num_programs(1) + column_block
    store_product(total, output, m, n, rows, N, sums.parts, sums.arrivals, block, split, splits, SPLIT)


@triton.jit
def int8_expert_products(
    x,  # [R, K], rows of one expert beside one another
    x_stride,
    elements,  # of expert 0; the others follow
    scales,
    output,  # [R, N]
    ends,  # of each expert's rows
    N,
    K,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    column_block, expert, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = expert_rows(ends, expert)
    elements += expert.to(tl.int64) * N * (tl.cdiv(K, STORED_MULTIPLE) * (STORED_MULTIPLE // 2))
    scales += expert.to(tl.int64) * N * (K // GROUP if GROUP else 1)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    for first in range(begin + part * BLOCK_M, end, tl.num_programs(2) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        x_at = x + m.to(tl.int64)[None, :] * x_stride + columns_of_pairs(TILE)[:, None]
        wanted = (m < end)[None, :]
        total = int8_sum(x_at, wanted, elements, scales, n, N, K, 0, tl.cdiv(K, TILE), WHOLE, GROUP, TILE)
        store_product(total, output, m, n, end, N, None, None, 0, 0, 1, False)


@triton.jit(do_not_specialize=["first", "last"])
def int8_dequantise(
    elements,
    scales,
    dense,  # [last - first, K]
    first,
    last,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    n = first + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_row, tile = tl.minimum(n, N - 1), tl.program_id(1) * STORED_MULTIPLE
    planes = planes_of(tl.load(pairs_at(elements, of_row, K, tile, STORED_MULTIPLE)))
    for plane in tl.static_range(2):
        k = tile + plane * PLANE + columns_of_pairs(STORED_MULTIPLE)
        if GROUP:
            scale = scale_of(scales, (k // GROUP)[None, :], of_row[:, None], N, K, GROUP)
        else:
            scale = tl.load(scales + of_row)[:, None]
        at = dense + (n - first).to(tl.int64)[:, None] * K + k[None, :]
        scaled = (planes[plane].to(tl.float32) * scale).to(dense.dtype.element_ty)
        tl.store(at, scaled, mask=(n < last)[:, None] & (k < K)[None, :])


def _matrix(matrix: Int8Pairs) -> tuple[Tensor, Tensor]:
    return matrix.elements.view(torch.int16), matrix.scales


def _constants(matrix: Int8Pairs) -> dict[str, Any]:
    inputs = tile_inputs(matrix)
    return {"WHOLE": matrix.inputs % inputs == 0, "GROUP": matrix.group, "TILE": inputs}


def tile_inputs(matrix: Int8Pairs) -> int:
    """Inputs that a product reads at a time: no more than two groups where scales are of small ones."""
    return INT8_TILE_INPUTS if matrix.group in (0, INT8_TILE_INPUTS) else INT8_TILE_INPUTS // 2


def int8_product_with(x: Tensor, matrix: Int8Pairs, tile: LinearTile, *, shared: SharedBuffers) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix, by the fused kernel with the tile given -> [T, N]."""
    return fused_product(
        int8_product, x, _matrix(matrix), tile, outputs=matrix.rows, inputs=(matrix.inputs,),
        tiles=triton.cdiv(matrix.inputs, tile_inputs(matrix)), shared=shared, **_constants(matrix),
    )  # fmt: skip


def int8_fused_product(x: Tensor, matrix: Int8Pairs, *, capability: int, shared: SharedBuffers) -> Tensor:
    """`int8_product_with` the tile for these rows on GPUs of `capability`."""
    return int8_product_with(x, matrix, linear_tile("int8", x.shape[0], capability=capability), shared=shared)


def int8_dequantised_product(x: Tensor, matrix: Int8Pairs, *, shared: SharedBuffers) -> Tensor:
    """The same by cuBLAS over dequantised blocks."""
    return dequantised_product(
        int8_dequantise, x, _matrix(matrix), outputs=matrix.rows, inputs=matrix.inputs,
        tiles=triton.cdiv(matrix.inputs, INT8_TILE_INPUTS), shared=shared, GROUP=matrix.group,
    )  # fmt: skip


def int8_grouped(x: Tensor, matrix: Int8Pairs, ends: Tensor, *, capability: int) -> Tensor:
    """`int8_grouped_with` the tile for so many rows and experts on GPUs of `capability`."""
    return int8_grouped_with(x, matrix, ends, grouped_tile("int8", x.shape[0], len(ends), capability))


def int8_grouped_with(x: Tensor, matrix: Int8Pairs, ends: Tensor, tile: LinearTile) -> Tensor:
    """A grouped `Product` with the tile given."""
    return grouped_product(
        int8_expert_products, x, _matrix(matrix), ends, tile, outputs=matrix.rows, inputs=(matrix.inputs,),
        **_constants(matrix),
    )  # fmt: skip
