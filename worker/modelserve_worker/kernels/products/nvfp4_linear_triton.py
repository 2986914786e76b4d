"""Triton kernels of products with NVFP4 weights, in the order of `nvfp4_linear.Nvfp4Tiles`.

Weights are the left operand: planes [BLOCK_N, 32] of them, one nibble of each word of a tile, times the 32 inputs of
BLOCK_M rows that they belong to, which lie apart in the tile: x is brought into their order first. An element times its
scale is exact in bfloat16; a row's own scale is applied to its sums. Elements are held 2^-8 times as large: their
exponents then stay in range while the bits of e2m1 stand in those of bfloat16, where they are 2^-126 times as large.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import NVFP4_TILE_INPUTS
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.products.linear_tiles import (
    LinearTile,
    SharedBuffers,
    SplitSums,
    grouped_tile,
    linear_tile,
)
from modelserve_worker.kernels.products.nvfp4_linear import GROUPS, LANES, PLANES, SCALE_EXPONENT, Nvfp4Tiles
from modelserve_worker.kernels.products.split_inputs import expert_rows, split_range, store_product
from modelserve_worker.kernels.products.tiled_products import dequantised_product, fused_product, grouped_product

TILE_INPUTS = tl.constexpr(NVFP4_TILE_INPUTS)
WORDS = tl.constexpr(PLANES * LANES)  # of a row and tile
OF_PLANE = tl.constexpr(PLANES)  # words of a lane
NIBBLES = tl.constexpr(8)
SCALES = tl.constexpr(GROUPS)
EXPONENT = tl.constexpr(SCALE_EXPONENT)
UNIT = tl.constexpr(256.0)  # what products are too small by
PACKED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no assembly


def _nibble(at: int, half: str, scales: int) -> str:
    """PTX of output `at`: a nibble of two words, which lie side by side in `half`, times a pair of scales."""
    place = at // 2
    sizes = f"shl.b32 v, {half}, {6 - 4 * place}" if place < 2 else f"shr.b32 v, {half}, {4 * place - 6}"
    return (
        f"{sizes};\nand.b32 v, v, 0x01c001c0;\nshl.b32 t, {half}, {12 - 4 * place};\n"
        f"lop3.b32 v, t, 0x80008000, v, 0xea;\nfma.rn.bf16x2 ${at}, v, ${scales}, none;\n"
    )


# Two words to eight pairs of elements: of each place of four in a half of a word the low half's, then the high half's.
# Beside the words the scales of both, of the first two places and of the others.
ELEMENTS = tl.constexpr(
    "{\n.reg .b32 low, high, v, t, none;\nmov.b32 none, 0x80008000;\n"
    "prmt.b32 low, $8, $9, 0x5410;\nprmt.b32 high, $8, $9, 0x7632;\n"
    + "".join(_nibble(at, "high" if at % 2 else "low", 10 + at // 4) for at in range(8))
    + "}"
)
OPERANDS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
OCTET = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def inputs_of(words):
    """The first input of a tile that each of its words int32 [32] has: of its first place, and of its low half."""
    return words % OF_PLANE * 32 + words // OF_PLANE * 2


@triton.jit
def scale_of(scales, row, N, tile, group: tl.constexpr):
    """Of rows [BLOCK_N, 1] and the first or second groups of planes, for all words of a tile, times 2^118: bfloat16
    [BLOCK_N, 32], or in the interpreter float32."""
    groups = tl.arange(0, OF_PLANE)[None, :] * 2 + group
    codes = tl.load(scales + ((groups + tile * SCALES).to(tl.int64) * N + row))
    of_lanes = tl.broadcast_to(codes[:, None, :], [codes.shape[0], WORDS // OF_PLANE, OF_PLANE])
    codes = of_lanes.reshape(codes.shape[0], WORDS).to(tl.int32)
    if PACKED:
        return ((codes << 4) + 0x7580).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - the compiler looks at both after an if without else
        return ((codes << 20) + ((127 - EXPONENT) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def planes_of(words, scales, n, N, tile):
    """Eight planes [BLOCK_N, 32] of a tile, elements times scales and 2^-8: by place, low halves first."""
    word = tl.arange(0, WORDS)
    row = tl.minimum(n, N - 1)[:, None]
    packed = tl.load(words + (tile * N + row).to(tl.int64) * WORDS + word[None, :])
    first = scale_of(scales, row, N, tile, 0)
    second = scale_of(scales, row, N, tile, 1)
    if PACKED:
        return tl.inline_asm_elementwise(ELEMENTS, OPERANDS, [packed, first, second], dtype=OCTET, is_pure=True, pack=2)
    else:  # noqa: RET505
        planes = ()
        for at in tl.static_range(NIBBLES):
            nibble = packed >> (16 * (at % 2) + 4 * (at // 2))
            size = nibble & 1
            exponent = nibble >> 1 & 3
            number = tl.where(exponent == 0, size * 0.5, (1.0 + 0.5 * size) * tl.exp2(exponent.to(tl.float32) - 1.0))
            number = tl.where(nibble & 8 != 0, -number, number) * (first if at < 4 else second)
            planes = planes + (number * (1.0 / UNIT),)  # noqa: RUF005 - kernels know no star
        return planes


@triton.jit
def part_of_product(x_at, wanted, words, scales, row_scales, n, N, begin, end):
    """Float32 [BLOCK_N, BLOCK_M] of tiles [begin, end), times rows' scales. `x_at`: of rows in the order of words."""
    total = tl.zeros([n.shape[0], wanted.shape[1]], tl.float32)
    for tile in range(begin, end):
        planes = planes_of(words, scales, n, N, tile)
        for at in tl.static_range(NIBBLES):
            k = tl.arange(0, WORDS) + (tile * TILE_INPUTS + at * WORDS)
            x = tl.load(x_at + k[:, None], mask=wanted, other=0.0)
            total = tl.dot(planes[at], x if PACKED else x.to(tl.float32), total)
    return total * (tl.load(row_scales + tl.minimum(n, N - 1)) * UNIT)[:, None]


@triton.jit(do_not_specialize=["rows", "splits"])
def nvfp4_product(
    x,  # [rows, whole tiles], in the order of words
    x_stride,
    words,
    scales,
    row_scales,
    output,  # [rows, N]
    sums: SplitSums,
    rows,
    N,
    K,
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
    x_at = x + m.to(tl.int64)[None, :] * x_stride
    begin, end = split_range(tl.cdiv(K, TILE_INPUTS), split, splits)
    total = part_of_product(x_at, (m < rows)[None, :], words, scales, row_scales, n, N, begin, end)
    block = row_block * tl.num_programs(1) + column_block
    store_product(total, output, m, n, rows, N, sums.parts, sums.arrivals, block, split, splits, SPLIT)


@triton.jit
def nvfp4_expert_products(
    x,  # [R, whole tiles], in the order of words; rows of one expert beside one another
    x_stride,
    words,  # of expert 0; the others follow
    scales,
    row_scales,
    output,  # [R, N]
    ends,  # of each expert's rows
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    column_block, expert, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = expert_rows(ends, expert)
    tiles = tl.cdiv(K, TILE_INPUTS)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_before = expert.to(tl.int64) * N
    words += rows_before * tiles * WORDS
    scales += rows_before * tiles * SCALES
    row_scales += rows_before
    for first in range(begin + part * BLOCK_M, end, tl.num_programs(2) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        x_at = x + m.to(tl.int64)[None, :] * x_stride
        wanted = (m < end)[None, :]
        total = part_of_product(x_at, wanted, words, scales, row_scales, n, N, 0, tiles)
        store_product(total, output, m, n, end, N, None, None, 0, 0, 1, False)


@triton.jit(do_not_specialize=["first", "last"])
def nvfp4_dequantise(
    words,
    scales,
    row_scales,
    elements,  # [last - first, K]
    first,
    last,
    N,
    K,
    BLOCK_N: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    n = first + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    planes = planes_of(words, scales, n, N, tile)
    row_scale = tl.load(row_scales + tl.minimum(n, N - 1))[:, None] * UNIT
    of_words = inputs_of(tl.arange(0, WORDS))
    for at in tl.static_range(NIBBLES):
        k = of_words + tile * TILE_INPUTS + (at // 2 * 8 + at % 2)
        to = elements + (n - first).to(tl.int64)[:, None] * K + k[None, :]
        value = (planes[at].to(tl.float32) * row_scale).to(elements.dtype.element_ty)
        tl.store(to, value, mask=(n < last)[:, None] & (k < K)[None, :])


def in_order_of_words(x: Tensor) -> Tensor:
    """x [T, K] -> [T, whole tiles]: of each tile and place of words the inputs that its words have there."""
    past = -x.shape[1] % NVFP4_TILE_INPUTS
    whole = functional.pad(x, (0, past)) if past else x
    tiles = whole.reshape(len(x), -1, PLANES, 4, LANES, 2)
    return tiles.permute(0, 1, 3, 5, 4, 2).reshape(whole.shape)


def nvfp4_product_with(x: Tensor, tiles: Nvfp4Tiles, tile: LinearTile, *, shared: SharedBuffers) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix, by the fused kernel with the tile given -> [T, N]."""
    return fused_product(
        nvfp4_product, in_order_of_words(x), _matrix(tiles), tile, outputs=tiles.rows, inputs=(tiles.inputs,),
        tiles=tiles.words.shape[-3], shared=shared,
    )  # fmt: skip


def nvfp4_dequantised_product(x: Tensor, tiles: Nvfp4Tiles, *, shared: SharedBuffers) -> Tensor:
    """The same by cuBLAS over dequantised blocks."""
    return dequantised_product(
        nvfp4_dequantise, x, _matrix(tiles), outputs=tiles.rows, inputs=tiles.inputs, tiles=tiles.words.shape[-3],
        shared=shared,
    )  # fmt: skip


def nvfp4_fused_product(x: Tensor, tiles: Nvfp4Tiles, *, capability: int, shared: SharedBuffers) -> Tensor:
    """`nvfp4_product_with` the tile for these rows on GPUs of `capability`."""
    return nvfp4_product_with(x, tiles, linear_tile("nvfp4", x.shape[0], capability=capability), shared=shared)


def nvfp4_grouped(x: Tensor, tiles: Nvfp4Tiles, ends: Tensor, *, capability: int) -> Tensor:
    """`nvfp4_grouped_with` the tile for so many rows and experts on GPUs of `capability`."""
    return nvfp4_grouped_with(x, tiles, ends, grouped_tile("nvfp4", x.shape[0], len(ends), capability))


def nvfp4_grouped_with(x: Tensor, tiles: Nvfp4Tiles, ends: Tensor, tile: LinearTile) -> Tensor:
    """A grouped `Product` with the tile given."""
    x = in_order_of_words(x)
    return grouped_product(
        nvfp4_expert_products, x, _matrix(tiles), ends, tile, outputs=tiles.rows, inputs=(tiles.inputs,)
    )


def _matrix(tiles: Nvfp4Tiles) -> tuple[Tensor, Tensor, Tensor]:
    return tiles.words, tiles.scales, tiles.row_scales
