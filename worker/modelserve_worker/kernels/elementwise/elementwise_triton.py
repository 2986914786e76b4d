"""Triton kernels of the decoder's elementwise operations; `elementwise.ElementwiseBackend` says what each one means.

Every kernel reads each input once and writes each output once. A row that is normed belongs to one program, so its sum
of squares is taken in one order whatever the batch. Widths are constants of a compiled kernel: masks and alignment are
known when it is compiled, and loads are 16 bytes wide. All loads come before the first reduction, to be in flight
together. Offsets of rows are 64-bit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.adapters.row_terms_triton import Term, term_factor, term_of, term_values
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites

_TILE = 1024  # elements of one program of an operation without norms, and of one program of small normed rows
_TERM_TILE = 256  # of the first, with a term of adapters, for which B is in registers
_WARP_ELEMENTS = 8 * 32  # 8 per thread: one 16-byte load of bfloat16, and registers for two blocks of 16 warps per SM
_MOST_WARPS = 32
_MANY_ROWS = 512  # from here on a launch has more programs than an H200 holds at a time
_FEWER_WARPS = 4


@triton.jit
def rms(x, weight, WIDTH: tl.constexpr, eps):
    """RMS_w of rows x float32 [ROWS, BLOCK], zero past WIDTH, with weight float32 [1, BLOCK]."""
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) * (1.0 / WIDTH) + eps))
    return x * scale[:, None] * weight


@triton.jit
def gelu(x):
    """x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x * sigmoid(2 u): no cancellation at -inf."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def load_row(pointer, column, WIDTH: tl.constexpr):
    """A weight [WIDTH] as float32 [1, BLOCK], zero past its end."""
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def sum_of_parts(
    delta, at, inside, rows, WIDTH: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, term=None
):  # fmt: skip
    """float32 of a delta at offsets `at`: as it is stored, or the sum of its parts, and of a term float32 like it,
    rounded once to DTYPE."""
    deltas = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        deltas += tl.load(delta + part * rows.to(tl.int64) * WIDTH + at, mask=inside, other=0.0)
    if term is not None:
        deltas += term
    return deltas.to(DTYPE).to(tl.float32)


@triton.jit
def add_normed(kept, deltas, delta_weights, WIDTH: tl.constexpr, eps, DTYPE: tl.constexpr):
    """kept + RMS(deltas) in DTYPE, all else float32 [ROWS, BLOCK]."""
    return (kept + rms(deltas, delta_weights, WIDTH, eps).to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def rms_norm(x, weight, normed, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    weights = load_row(weight, column, WIDTH)
    wait_for_prerequisites()
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, rms(values, weights, WIDTH, eps).to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def residual_norm(
    residual,  # [rows, WIDTH], also the place of the sum
    delta,  # like residual, or float32 [PARTS, rows, WIDTH]
    term: Term,  # of the delta, or None; ROWS is 1 with one
    delta_weight,
    scalar,  # [1] or None
    next_weight,  # [WIDTH] or None
    normed,  # [rows, WIDTH], or None without a next_weight
    other_weight,  # of one more norm of the sum, or None, as is its place
    other_normed,
    rows,
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    launch_dependents()
    dtype = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    delta_weights = load_row(delta_weight, column, WIDTH)
    if next_weight is not None:
        next_weights = load_row(next_weight, column, WIDTH)
    if other_weight is not None:
        other_weights = load_row(other_weight, column, WIDTH)
    if scalar is not None:
        factor = tl.load(scalar).to(tl.float32)
    added = None
    if term is not None:
        slot = tl.load(term.row_slots + tl.program_id(0))
        held = term_factor(term, slot, column, column < WIDTH)
    wait_for_prerequisites()
    if term is not None:
        added = term_values(term, held, slot, tl.program_id(0), 0)[None, :]
    deltas = sum_of_parts(delta, at, inside, rows, WIDTH, PARTS, dtype, added)
    kept = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    summed = add_normed(kept, deltas, delta_weights, WIDTH, eps, dtype)
    if scalar is not None:
        summed = (summed.to(tl.float32) * factor).to(dtype)
    tl.store(residual + at, summed, mask=inside)
    if next_weight is not None:
        tl.store(normed + at, rms(summed.to(tl.float32), next_weights, WIDTH, eps).to(dtype), mask=inside)
    if other_weight is not None:
        tl.store(other_normed + at, rms(summed.to(tl.float32), other_weights, WIDTH, eps).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def per_layer_inputs(
    projected,  # [rows, WIDTH]: one row per token and layer
    table_rows,
    weight,
    added,
    rows,
    projection_scale,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    launch_dependents()
    dtype = added.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    weights = load_row(weight, column, WIDTH)
    wait_for_prerequisites()
    scaled = (tl.load(projected + at, mask=inside, other=0.0).to(tl.float32) * projection_scale).to(dtype)
    looked_up = tl.load(table_rows + at, mask=inside, other=0.0).to(tl.float32)
    context = rms(scaled.to(tl.float32), weights, WIDTH, eps).to(dtype).to(tl.float32)
    total = (context + looked_up).to(dtype).to(tl.float32)
    tl.store(added + at, (total * 0.7071067811865476).to(dtype), mask=inside)


@triton.jit
def gated_gelu(
    gate,
    gate_stride,  # elements from one row to the next
    factor,
    factor_stride,
    term: Term,  # of the gate, and of the factor, too, where it has two parts; or None
    gated,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    dtype = gated.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if term is not None:
        slot = tl.load(term.row_slots + row)
        gate_factor = term_factor(term, slot, column, inside)
        if term.PARTS > 1:
            factor_factor = term_factor(term, slot, WIDTH + column, inside)
    wait_for_prerequisites()
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(factor + row * factor_stride + column, mask=inside, other=0.0).to(tl.float32)
    if term is not None:
        gates = (gates + term_values(term, gate_factor, slot, tl.program_id(0), 0)).to(dtype).to(tl.float32)
        if term.PARTS > 1:
            factors += term_values(term, factor_factor, slot, tl.program_id(0), 1)
            factors = factors.to(dtype).to(tl.float32)
    opened = gelu(gates).to(dtype).to(tl.float32)
    tl.store(gated + row * WIDTH + column, (opened * factors).to(dtype), mask=inside)


@triton.jit
def embed(ids, table, embedded, table_rows, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_prerequisites()
    launch_dependents()  # in this order: whatever starts after it sees the step's arrays complete
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < table_rows)
    values = tl.load(table + token * WIDTH + column, mask=(column < WIDTH) & known, other=0.0).to(tl.float32)
    tl.store(embedded + row * WIDTH + column, (values * scale).to(embedded.dtype.element_ty), mask=column < WIDTH)


def least_many(*, exact: bool) -> int:
    """Rows from which on a launch is that of many."""
    return 0 if exact else _MANY_ROWS


def row_launch(width: int, *, many: bool = False) -> dict[str, int]:
    """Block, rows per program and warps of the kernels that norm rows of `width`.

    One row is soonest done by many warps. `many` rows fill the GPU anyway, and go through faster where several programs
    share a multiprocessor.
    """
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, _TILE // block)
    warps = min(max(1, rows * block // _WARP_ELEMENTS), _MOST_WARPS)
    if many:
        warps = max(1, warps // _FEWER_WARPS)
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps}


def tile_launch(width: int, *, most: int = _TILE) -> dict[str, int]:
    """Block and warps of the kernels that cut rows of `width` into tiles of at most so many elements."""
    block = min(most, max(16, triton.next_power_of_2(width)))
    return {"WIDTH": width, "BLOCK": block, "num_warps": max(1, block * (_TILE // most) // _WARP_ELEMENTS)}


def parts_of(delta: Tensor | None, residual: Tensor) -> int:
    """P of a delta [P, T, H], 1 of one like the residual or of none."""
    return delta.shape[0] if delta is not None and delta.dim() > residual.dim() else 1


class TritonElementwise:
    """The operations on a CUDA device. `residual_norm` writes the sum in the residual's place. `exact`: a row is added
    up in one order, that of many rows, however many there are."""

    def __init__(self, *, exact: bool = False) -> None:
        self._many = least_many(exact=exact)

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        rows = x.contiguous().view(-1, weight.shape[0])
        normed = torch.empty_like(rows)
        block = row_launch(rows.shape[1], many=rows.shape[0] >= self._many)
        launch(
            rms_norm, (triton.cdiv(rows.shape[0], block["ROWS"]),), rows, weight, normed, rows.shape[0], eps, **block
        )
        return normed.view(x.shape)

    def residual_norm(
        self,
        residual: Tensor,
        delta: Tensor,
        delta_weight: Tensor,
        *,
        scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
        term: RowTerm | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        normed = None if next_weight is None else torch.empty_like(residual)
        self._add(residual, delta, term_of(term), delta_weight, scalar, next_weight, normed, None, None, eps=eps)
        return residual, normed

    def residual_norms(
        self, residual: Tensor, delta: Tensor, delta_weight: Tensor, weights: tuple[Tensor, Tensor], *, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`residual_norm` without a scalar, and with two norms of the sum: by each of `weights`."""
        normed, other = torch.empty_like(residual), torch.empty_like(residual)
        self._add(residual, delta, None, delta_weight, None, weights[0], normed, weights[1], other, eps=eps)
        return residual, normed, other

    def _add(self, residual: Tensor, delta: Tensor, *others: Tensor | Term | None, eps: float) -> None:
        """`others`: as the kernel takes them."""
        rows, width = residual.shape
        block = row_launch(width, many=rows >= self._many)
        launch(
            residual_norm, (triton.cdiv(rows, block["ROWS"]),),
            residual, delta, *others, rows, eps, PARTS=parts_of(delta, residual), **block,
        )  # fmt: skip

    def gated_gelu(self, gate_up: Tensor, term: RowTerm | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.per_layer_gate(gate, up, term)

    def per_layer_gate(self, gate: Tensor, per_layer: Tensor, term: RowTerm | None = None) -> Tensor:
        rows, width = gate.shape
        gated = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
        block = tile_launch(width, most=_TILE if term is None else _TERM_TILE)
        launch(
            gated_gelu,
            (rows, triton.cdiv(width, block["BLOCK"])),
            gate,
            gate.stride(0),
            per_layer,
            per_layer.stride(0),
            term_of(term),
            gated,
            **block,
        )
        return gated

    def per_layer_inputs(
        self, projected: Tensor, table_rows: Tensor, weight: Tensor, *, projection_scale: float, eps: float
    ) -> Tensor:
        width = weight.shape[0]
        tokens, rows = projected.shape[0], projected.numel() // width
        added = torch.empty((tokens, rows // tokens, width), dtype=projected.dtype, device=projected.device)
        block = row_launch(width, many=rows >= self._many)
        launch(
            per_layer_inputs,
            (triton.cdiv(rows, block["ROWS"]),),
            projected,
            table_rows,
            weight,
            added,
            rows,
            projection_scale,
            eps,
            **block,
        )
        return added

    def embed(self, ids: Tensor, table: Tensor, *, scale: float) -> Tensor:
        width = table.shape[1]
        embedded = torch.empty((ids.shape[0], width), dtype=table.dtype, device=table.device)
        block = tile_launch(width)
        launch(
            embed,
            (ids.shape[0], triton.cdiv(width, block["BLOCK"])),
            ids,
            table,
            embedded,
            table.shape[0],
            scale,
            **block,
        )
        return embedded
