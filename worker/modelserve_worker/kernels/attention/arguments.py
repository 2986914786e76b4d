"""What attention kernels take together: rows in pages and in step buffers, and what kernels leave each other.

Members in capitals are known when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.kernels.attention.paged_layout import LayerRows
from modelserve_worker.kernels.compiling.bundles import bundle, constant

EIGHT_BIT = frozenset({KVCacheDtype.INT8, KVCacheDtype.FP8_E4M3, KVCacheDtype.FP8_E5M2})


@bundle
class Pages(NamedTuple):
    """Rows of one layer in pages: planes [HEADS, PAGE, D] of K and V, each from its address in page 0."""

    table: Tensor  # int32 [slots, entries] numbers of pages
    table_stride: int
    k: Tensor  # of V-only rows nobody reads it
    v: Tensor
    stride: int  # elements from page n to page n + 1, less than none where pages count down
    k_scales: Tensor  # float16 [HEADS, PAGE] of int8 rows, likewise; of others nobody reads them
    v_scales: Tensor
    scale_stride: int
    HEADS: tl.constexpr
    D: tl.constexpr
    PAGE: tl.constexpr
    ENTRIES: tl.constexpr  # of a sliding table; 0: a global one
    WINDOW: tl.constexpr  # 0: none
    FORMAT: tl.constexpr


@bundle
class HeadNorms(NamedTuple):
    """Norms of query and key heads."""

    q_weight: Tensor  # [D]
    k_weight: Tensor  # [D]
    eps: float


@bundle
class Rotary(NamedTuple):
    """Of a step's rows, float32 [T, D / 2] each."""

    cos: Tensor
    sin: Tensor


@bundle
class StepRows(NamedTuple):
    """Rows of K and V of a step that wait for their pages: [T, HEADS, D] as stored, and float16 scales [T, HEADS] of
    int8 ones."""

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor


@bundle
class Splits(NamedTuple):
    """Results of parts of rows' keys, as `combine` reads them: float32 [rows, MOST, HEADS, GROUP, D], and for each of
    these rows of D its maximum, of scores times log2(e), and sum."""

    outputs: Tensor
    maxima: Tensor
    sums: Tensor
    MOST: tl.constexpr
    HEADS: tl.constexpr
    GROUP: tl.constexpr
    D: tl.constexpr


@bundle
class Turns(NamedTuple):
    """cos and sin for keys that are made of values: float32 [tiles, PAIRS] of tiles' first positions, and [keys of a
    tile, PAIRS]."""

    start_cos: Tensor
    start_sin: Tensor
    turn_cos: Tensor
    turn_sin: Tensor
    PAIRS: tl.constexpr


@bundle
class DraftPages(NamedTuple):
    """A drafter's rows of one layer in global pages: planes [HEADS, PAGE, D] of K and V, each from its address in page
    0. Logical page l is at entry FIRST + l of the block table, l modulo ENTRIES where that is not 0."""

    table: Tensor  # int32 [slots, entries] numbers of pages
    table_stride: int
    k: Tensor
    v: Tensor
    stride: int  # elements from page n to page n + 1, less than none
    HEADS: tl.constexpr
    D: tl.constexpr
    PAGE: tl.constexpr
    FIRST: tl.constexpr
    ENTRIES: tl.constexpr


@bundle
class Blocks(NamedTuple):
    """S blocks of ROWS rows that a drafter computes at once: q [S, ROWS, Hq, D] of GROUP heads a head of keys, k and v
    [S, ROWS, HEADS, D], whose rows of HEADS * D may lie apart."""

    q: Tensor
    k: Tensor
    k_stride: int  # elements from row to row
    v: Tensor
    v_stride: int
    ROWS: tl.constexpr
    GROUP: tl.constexpr


@dataclass(frozen=True, eq=False)
class LayerPages:
    """One layer's pages in a pool: how its rows lie, the block table, int32 [slots, entries], and the pool, bytes."""

    rows: LayerRows
    table: Tensor
    arena: Tensor

    @cached_property
    def elements(self) -> Pages:
        return self._described(element_dtype(self.rows))

    @cached_property
    def pairs(self) -> Pages:
        """Of 8-bit rows: an element is two of theirs, an int16."""
        return self._described(torch.int16)

    def _described(self, dtype: torch.dtype) -> Pages:
        rows, size = self.rows, dtype.itemsize
        elements, float16 = self.arena.view(dtype), self.arena.view(torch.float16)
        k, v, k_scales, v_scales = (
            plane[(rows.origin + rows.offsets.get(name, 0)) // plane.itemsize :]
            for plane, name in ((elements, "k"), (elements, "v"), (float16, "k_scale"), (float16, "v_scale"))
        )
        constants = (rows.heads, rows.width, rows.page_tokens, rows.entries, rows.window, rows.dtype.value)
        return Pages(
            self.table, self.table.stride(0), k, v, rows.page_stride // size, k_scales, v_scales, rows.page_stride // 2,
            *map(constant, constants),
        )  # fmt: skip


def element_dtype(rows: LayerRows) -> torch.dtype:
    """Element type of stored rows; fp8 ones are typed uint8 and told apart in the kernels."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}.get(rows.dtype.value, torch.uint8)
