"""Triton kernels of products with INT4 weights, in the order of `int4_linear.Int4Tiles`.

Weights are the left operand: planes [BLOCK_N, 32] of them, unpacked in registers, times 32 inputs of BLOCK_M rows.
`few_rows` multiplies the nibbles as they are and scales sums of a group in float32; `many_rows` scales each element,
rounded to bfloat16 once as the plain reference's, and leaves the sums to the matrix units.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import INT4_TILE_INPUTS
from modelserve_worker.kernels.compiling.bundles import bundle, constant
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.products.int4_linear import PLANE_INPUTS, PLANES, Int4Tiles
from modelserve_worker.kernels.products.linear_tiles import (
    LinearTile,
    SharedBuffers,
    SplitSums,
    grouped_tile,
    linear_tile,
)
from modelserve_worker.kernels.products.split_inputs import expert_rows, split_range, store_product
from modelserve_worker.kernels.products.tiled_products import dequantised_product, fused_product, grouped_product

WORDS = tl.constexpr(PLANE_INPUTS)
NIBBLES = tl.constexpr(PLANES)
TILE_INPUTS = tl.constexpr(INT4_TILE_INPUTS)
PACKED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no assembly
OPERAND = tl.constexpr(tl.bfloat16 if PACKED else tl.float32)  # nor arithmetic of bfloat16

# Two words, of neighbouring elements of a plane, to eight pairs of bfloat16: the halves of both words side by side,
# then each nibble v becomes the mantissa of 128 + v.
_PAIRS = "prmt.b32 low, $8, $9, 0x5410;\nprmt.b32 high, $8, $9, 0x7632;\n" + "".join(
    f"shr.b32 t, {half}, {4 * nibble};\nlop3.b32 ${first + nibble}, t, 0x000f000f, 0x43004300, 0xea;\n"
    for first, half in ((0, "low"), (4, "high"))
    for nibble in range(4)
)
_OUT = "=r,=r,=r,=r,=r,=r,=r,=r,r,r"
PAIRS = tl.constexpr("{\n.reg .b32 low, high, t;\n" + _PAIRS + "}")
OCTET = tl.constexpr((tl.bfloat16,) * 8)
PAIRS_OPERANDS = tl.constexpr(_OUT)
SCALED_OPERANDS = tl.constexpr(_OUT + 16 * ",r")
FINELY_SCALED_OPERANDS = tl.constexpr(_OUT + 24 * ",r")


def _scaled(*, finely: bool) -> str:
    """Beside the words a scale and minus (128 + zero point) for each plane. The sum is exact, the product rounded once.

    `finely`: the scale is a sum of two (`in_two`), of which the second, behind the offsets, has an exact product, too.
    """
    planes = "".join(
        f"fma.rn.bf16x2 ${p}, ${p}, one, ${18 + p};\n"
        + (f"fma.rn.bf16x2 t, ${p}, ${26 + p}, none;\n" if finely else "")
        + f"fma.rn.bf16x2 ${p}, ${p}, ${10 + p}, {'t' if finely else 'none'};\n"
        for p in range(PLANES)
    )
    constants = "mov.b32 one, 0x3f803f80;\nmov.b32 none, 0x80008000;\n"
    return "{\n.reg .b32 low, high, t, one, none;\n" + constants + _PAIRS + planes + "}"


SCALED = tl.constexpr(_scaled(finely=False))
FINELY_SCALED = tl.constexpr(_scaled(finely=True))


@bundle
class TiledMatrix(NamedTuple):
    """A matrix, or one of each expert behind one another, as kernels take it."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    GROUPS: tl.constexpr
    WHOLE: tl.constexpr  # K is a multiple of the tile


@triton.jit
def in_two(scales):
    """Eight of float16, whose eleven bits are a sum of two numbers of bfloat16: of eight bits, and of three at most."""
    near = ()
    rests = ()
    for plane in tl.static_range(NIBBLES):
        wide = scales[plane].to(tl.float32)
        nearest = wide.to(tl.bfloat16)
        near = near + (nearest,)  # noqa: RUF005 - kernels know no star
        rests = rests + ((wide - nearest.to(tl.float32)).to(tl.bfloat16),)  # noqa: RUF005
    return near, rests


@triton.jit
def unpacked(words, scales, offsets, SCALE: tl.constexpr):
    """Words int32 [BLOCK_N, 32] -> eight planes: 128 + nibble, or with SCALE (128 + nibble + offset) * scale.

    scales and offsets are eight of [BLOCK_N, 1] each: scales of bfloat16 or float16, offsets of bfloat16.
    """
    if PACKED and SCALE:
        if scales[0].dtype == tl.float16:
            near, rests = in_two(scales)
            both = [
                words, near[0], near[1], near[2], near[3], near[4], near[5], near[6], near[7],
                offsets[0], offsets[1], offsets[2], offsets[3], offsets[4], offsets[5], offsets[6], offsets[7],
                rests[0], rests[1], rests[2], rests[3], rests[4], rests[5], rests[6], rests[7],
            ]  # fmt: skip
            return tl.inline_asm_elementwise(
                FINELY_SCALED, FINELY_SCALED_OPERANDS, both, dtype=OCTET, is_pure=True, pack=2
            )
        else:  # noqa: RET505 - the compiler looks at both after an if without else
            given = [
                words, scales[0], scales[1], scales[2], scales[3], scales[4], scales[5], scales[6], scales[7],
                offsets[0], offsets[1], offsets[2], offsets[3], offsets[4], offsets[5], offsets[6], offsets[7],
            ]  # fmt: skip
            return tl.inline_asm_elementwise(SCALED, SCALED_OPERANDS, given, dtype=OCTET, is_pure=True, pack=2)
    elif PACKED:
        return tl.inline_asm_elementwise(PAIRS, PAIRS_OPERANDS, [words], dtype=OCTET, is_pure=True, pack=2)
    else:
        planes = ()
        for plane in tl.static_range(NIBBLES):
            values = ((words >> (4 * plane)) & 15).to(tl.float32) + 128.0
            if SCALE:
                values = (values + offsets[plane].to(tl.float32)) * scales[plane].to(tl.float32)
            planes = planes + (values.to(tl.bfloat16).to(tl.float32),)  # noqa: RUF005
        return planes


@triton.jit
def inputs_of(x_at, tile, plane: tl.constexpr, k, wanted, K, WHOLE: tl.constexpr):
    """Inputs [32, BLOCK_M] that a plane of a tile is multiplied with; zeros past the last one and past the rows."""
    first = tile * TILE_INPUTS + plane * WORDS
    mask = wanted if WHOLE else wanted & (first + k < K)[:, None]
    values = tl.load(x_at + first, mask=mask, other=0.0)
    return values if PACKED else values.to(tl.float32)


@triton.jit
def few_rows_sum(x_at, wanted, words, scales, zeros, n, N, K, begin, end, GROUPS: tl.constexpr, WHOLE: tl.constexpr):
    """Float32 [BLOCK_N, BLOCK_M] of tiles [begin, end). Rows n may lie past the end: the last one stands in."""
    n = tl.minimum(n, N - 1)
    k = tl.arange(0, WORDS)
    per_group: tl.constexpr = NIBBLES // GROUPS
    ZERO_ROWS: tl.constexpr = (GROUPS + 1) // 2
    total = tl.zeros([n.shape[0], wanted.shape[1]], tl.float32)
    # The sums of the inputs, times what a nibble is too large by, come from the matrix units as well.
    excess = tl.full([n.shape[0], WORDS], 1.0 if zeros is not None else -136.0, OPERAND)
    for tile in range(begin, end):
        row = tile * N + n
        planes = unpacked(tl.load(words + row[:, None] * WORDS + k[None, :]), (), (), False)
        group_row = tile * GROUPS * N + n
        for group in tl.static_range(GROUPS):
            inside = tl.zeros([n.shape[0], wanted.shape[1]], tl.float32)
            extra = tl.zeros([n.shape[0], wanted.shape[1]], tl.float32)
            for member in tl.static_range(per_group):
                x = inputs_of(x_at, tile, group * per_group + member, k, wanted, K, WHOLE)
                extra = tl.dot(excess, x, extra)
                inside = tl.dot(planes[group * per_group + member], x, inside)
            scale = tl.load(scales + group_row + group * N).to(tl.float32)
            if zeros is not None:
                if group % 2 == 0:
                    pair = tl.load(zeros + (tile * ZERO_ROWS + group // 2) * N + n)
                zero = ((pair >> (4 * (group % 2))) & 15).to(tl.float32)
                inside -= extra * (zero + 128.0)[:, None]
            else:
                inside += extra
            total += inside * scale[:, None]
    return total


@triton.jit
def many_rows_sum(x_at, wanted, words, scales, zeros, n, N, K, begin, end, GROUPS: tl.constexpr, WHOLE: tl.constexpr):
    """As `few_rows_sum`, of elements that are scaled and rounded first."""
    n = tl.minimum(n, N - 1)
    k = tl.arange(0, WORDS)
    total = tl.zeros([n.shape[0], wanted.shape[1]], tl.float32)
    for tile in range(begin, end):
        planes = scaled_planes(words, scales, zeros, n, N, tile, GROUPS)
        for plane in tl.static_range(NIBBLES):
            total = tl.dot(planes[plane], inputs_of(x_at, tile, plane, k, wanted, K, WHOLE), total)
    return total


@triton.jit
def scaled_planes(words, scales, zeros, n, N, tile, GROUPS: tl.constexpr):
    """Eight planes [BLOCK_N, 32] of a tile, the matrix's elements."""
    row = tile * N + n
    group_row = tile * GROUPS * N + n
    ZERO_ROWS: tl.constexpr = (GROUPS + 1) // 2
    given = ()
    offsets = ()
    for group in tl.static_range(GROUPS):
        scale = tl.load(scales + group_row + group * N)[:, None]
        if zeros is not None:
            if group % 2 == 0:
                pair = tl.load(zeros + (tile * ZERO_ROWS + group // 2) * N + n)
            zero = ((pair >> (4 * (group % 2))) & 15).to(tl.float32)
            offset = (-128.0 - zero).to(OPERAND)[:, None]
        else:
            offset = tl.full([n.shape[0], 1], -136.0, OPERAND)
        for _ in tl.static_range(NIBBLES // GROUPS):
            given = given + (scale,)  # noqa: RUF005
            offsets = offsets + (offset,)  # noqa: RUF005
    packed = tl.load(words + row[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    return unpacked(packed, given, offsets, True)


@triton.jit
def part_of_product(
    x_at,
    wanted,
    words,
    scales,
    zeros,
    n,
    N,
    K,
    begin,
    end,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    FEW: tl.constexpr,
):
    """One of the two sums above."""
    if FEW:
        total = few_rows_sum(x_at, wanted, words, scales, zeros, n, N, K, begin, end, GROUPS, WHOLE)
    else:
        total = many_rows_sum(x_at, wanted, words, scales, zeros, n, N, K, begin, end, GROUPS, WHOLE)
    return total


@triton.jit(do_not_specialize=["rows", "splits"])
def int4_product(
    x,  # [rows, K]
    x_stride,
    matrix: TiledMatrix,
    output,  # [rows, N]
    sums: SplitSums,
    rows,
    N,
    K,
    splits,
    SPLIT: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    row_block, column_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x + m.to(tl.int64)[None, :] * x_stride + tl.arange(0, WORDS)[:, None]
    begin, end = split_range(tl.cdiv(K, TILE_INPUTS), split, splits)
    wanted = (m < rows)[None, :]
    total = part_of_product(
        x_at, wanted, matrix.words, matrix.scales, matrix.zeros, n, N, K, begin, end, matrix.GROUPS, matrix.WHOLE, FEW
    )
    block = row_block * tl.num_programs(1) + column_block
    store_product(total, output, m, n, rows, N, sums.parts, sums.arrivals, block, split, splits, SPLIT)


@triton.jit
def int4_expert_products(
    x,  # [R, K], rows of one expert beside one another
    x_stride,
    matrix: TiledMatrix,
    output,  # [R, N]
    ends,  # of each expert's rows
    N,
    K,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    column_block, expert, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = expert_rows(ends, expert)
    tiles = tl.cdiv(K, TILE_INPUTS)
    GROUPS: tl.constexpr = matrix.GROUPS
    words = matrix.words + expert.to(tl.int64) * tiles * N * WORDS
    scales = matrix.scales + expert.to(tl.int64) * tiles * N * GROUPS
    zeros = matrix.zeros
    if zeros is not None:
        zeros += expert.to(tl.int64) * tiles * N * ((GROUPS + 1) // 2)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    for first in range(begin + part * BLOCK_M, end, tl.num_programs(2) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        x_at = x + m.to(tl.int64)[None, :] * x_stride + tl.arange(0, WORDS)[:, None]
        wanted = (m < end)[None, :]
        total = part_of_product(x_at, wanted, words, scales, zeros, n, N, K, 0, tiles, GROUPS, matrix.WHOLE, FEW)
        store_product(total, output, m, n, end, N, None, None, 0, 0, 1, False)


@triton.jit(do_not_specialize=["first", "last"])
def int4_dequantise(
    words,
    scales,
    zeros,  # or None
    elements,  # [last - first, K]
    first,
    last,
    N,
    K,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    n = first + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    planes = scaled_planes(words, scales, zeros, tl.minimum(n, N - 1), N, tile, GROUPS)
    for plane in tl.static_range(NIBBLES):
        k = tile * TILE_INPUTS + plane * WORDS + tl.arange(0, WORDS)
        at = elements + (n - first).to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, planes[plane].to(elements.dtype.element_ty), mask=(n < last)[:, None] & (k < K)[None, :])


def _matrix(tiles: Int4Tiles) -> TiledMatrix:
    groups, whole = constant(tiles.scales.shape[-2]), constant(tiles.inputs % INT4_TILE_INPUTS == 0)
    return TiledMatrix(tiles.words, tiles.scales, tiles.zero_points, groups, whole)


def int4_product_with(x: Tensor, tiles: Int4Tiles, tile: LinearTile, *, shared: SharedBuffers) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix, by the fused kernel with the tile given -> [T, N]."""
    return fused_product(
        int4_product, x, (_matrix(tiles),), tile, outputs=tiles.rows, inputs=(tiles.inputs,),
        tiles=tiles.words.shape[-3], shared=shared, FEW=tile.few,
    )  # fmt: skip


def int4_dequantised_product(x: Tensor, tiles: Int4Tiles, *, shared: SharedBuffers) -> Tensor:
    """The same by cuBLAS over dequantised blocks."""
    return dequantised_product(
        int4_dequantise, x, (tiles.words, tiles.scales, tiles.zero_points), outputs=tiles.rows, inputs=tiles.inputs,
        tiles=tiles.words.shape[-3], shared=shared, GROUPS=tiles.scales.shape[-2],
    )  # fmt: skip


def int4_fused_product(x: Tensor, tiles: Int4Tiles, *, capability: int, shared: SharedBuffers) -> Tensor:
    """`int4_product_with` the tile for these rows on GPUs of `capability`."""
    return int4_product_with(x, tiles, linear_tile("int4", x.shape[0], capability=capability), shared=shared)


def int4_grouped(x: Tensor, tiles: Int4Tiles, ends: Tensor, *, capability: int) -> Tensor:
    """`int4_grouped_with` the tile for so many rows and experts on GPUs of `capability`."""
    return int4_grouped_with(x, tiles, ends, grouped_tile("int4", x.shape[0], len(ends), capability))


def int4_grouped_with(x: Tensor, tiles: Int4Tiles, ends: Tensor, tile: LinearTile) -> Tensor:
    """A grouped `Product` with the tile given."""
    return grouped_product(
        int4_expert_products, x, (_matrix(tiles),), ends, tile, outputs=tiles.rows, inputs=(tiles.inputs,),
        FEW=tile.few,
    )  # fmt: skip
