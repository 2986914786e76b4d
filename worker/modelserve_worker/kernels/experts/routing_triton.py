"""Triton kernels that choose experts for rows; `experts` has the interface.

The router's logits are float32: `route_few` multiplies in it, and `route_many` gives the matrix units x * scale,
which is exact in two parts of bfloat16 (each factor has eight significant bits), so that only sums are rounded. Where
rows are too few for all multiprocessors, programs share their inputs, and the last of them adds up in order. A choice
is decided by words that no two experts share, so equal logits go to the lower index, and NaN, which is above all
others, leads to indices in range.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.backends.resolve import ROUTED_ROWS
from modelserve_worker.kernels.compiling.bundles import bundle, constant
from modelserve_worker.kernels.compiling.dependent_launch import (
    launch,
    launch_dependents,
    wait_for_prerequisites,
)
from modelserve_worker.kernels.elementwise.elementwise_triton import (
    TritonElementwise,
    add_normed,
    load_row,
    parts_of,
    rms,
    sum_of_parts,
)
from modelserve_worker.kernels.experts.experts import (
    NO_EXPERT,
    AddedNorms,
    Choice,
    Routed,
    RouterWeights,
)

ROUTED_BLOCKS = 4  # of rows: times the groups of experts about one program for each multiprocessor
NOBODY = tl.constexpr(NO_EXPERT)
OPERAND = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)  # the interpreter's products
FEW_LAUNCH = {"GROUP": 2, "num_warps": 8}
MANY_LAUNCHES = {  # by the most rows
    256: {"BLOCK_T": 16, "BLOCK_H": 64, "SPLITS": 22, "num_warps": 8, "num_stages": 2},
    1024: {"BLOCK_T": 16, "BLOCK_H": 64, "SPLITS": 8, "num_warps": 4, "num_stages": 3},
    4096: {"BLOCK_T": 16, "BLOCK_H": 64, "SPLITS": 4, "num_warps": 4, "num_stages": 3},
    1 << 30: {"BLOCK_T": 32, "BLOCK_H": 64, "SPLITS": 1, "num_warps": 4, "num_stages": 3},
}
MOST_ARRIVALS = 256  # blocks of rows that several programs share
_LEAST_WORD = tl.constexpr(-(1 << 63))
_INDEX_BITS = tl.constexpr(12)  # of an expert's number in a word


@bundle
class Router(NamedTuple):
    """`RouterWeights` as kernels take them."""

    scale_weight: Tensor
    router_weight: Tensor  # [EXPERTS, WIDTH]
    scales: Tensor  # of each expert
    ROOT_SCALE: tl.constexpr
    WIDTH: tl.constexpr
    EXPERTS: tl.constexpr
    BLOCK_E: tl.constexpr
    K: tl.constexpr

    @classmethod
    def of(cls, router: RouterWeights) -> Router:
        experts, width = router.weight.shape
        constants = (width**-0.5, width, experts, _block(router), router.top_k)
        return cls(router.scale, router.weight, router.per_expert_scale, *map(constant, constants))


@bundle
class Addition(NamedTuple):
    """A delta, as of `residual_norm`, that is added to the residual before it is routed."""

    delta: Tensor
    delta_weight: Tensor
    next_weight: Tensor
    added: Tensor  # the sum; the residual itself is read by programs that end later
    next_normed: Tensor  # its norm by next_weight
    PARTS: tl.constexpr  # of delta


@triton.jit
def words_of(logits, expert, EXPERTS: tl.constexpr):
    """int64 [ROWS, BLOCK_E] of logits float32: the high bits are in their order, the low ones in reverse of indices."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(logits != logits, 0x7FFFFFFF, keys)  # true of NaN
    words = (keys.to(tl.int64) << _INDEX_BITS) + (-expert + (logits.shape[1] - 1))[None, :]
    return tl.where((expert < EXPERTS)[None, :], words, _LEAST_WORD)


@triton.jit
def largest_words(words, SLOTS: tl.constexpr, K: tl.constexpr):
    """The K largest of each row, falling, [ROWS, SLOTS]: one pass for each."""
    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.full([words.shape[0], SLOTS], _LEAST_WORD, tl.int64)
    for place in tl.static_range(K):
        best = tl.max(words, axis=1)[:, None]
        found = tl.where(slot == place, best, found)
        words = tl.where(words == best, _LEAST_WORD, words)
    return found


@triton.jit
def ranked_words(words, SLOTS: tl.constexpr):
    """The same for one row, all at once: a word's place is how many are larger."""
    rank = tl.sum((words[:, None, :] > words[:, :, None]).to(tl.int32), axis=2)
    slot = tl.arange(0, SLOTS)[None, None, :]
    return tl.sum(tl.where(rank[:, :, None] == slot, words[:, :, None], 0), axis=1)


@triton.jit
def row_to_route(x, addition, delta_weights, at, inside, rows, eps, WIDTH: tl.constexpr):
    """float32 [1, BLOCK] of x, or of its sum with the delta's norm."""
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if addition is not None:
        deltas = sum_of_parts(addition.delta, at, inside, rows, WIDTH, addition.PARTS, x.dtype.element_ty)
        values = add_normed(values, deltas, delta_weights, WIDTH, eps, x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def choose(found, row, rows, wanted, choice, router):
    """Store what rows choose, their largest words [ROWS, SLOTS]; wanted [ROWS] is false of padding."""
    K: tl.constexpr = router.K
    slot = tl.arange(0, found.shape[1])[None, :]
    key = (found >> _INDEX_BITS).to(tl.int32)
    values = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    largest = tl.sum(tl.where(slot == 0, values, 0.0), axis=1)[:, None]
    chosen = (-(found & (router.BLOCK_E - 1)) + (router.BLOCK_E - 1)).to(tl.int32)
    exponentials = tl.where(slot < K, tl.exp(values - largest), 0.0)
    shares = tl.div_rn(exponentials, tl.sum(exponentials, axis=1)[:, None] + tl.zeros_like(exponentials))
    factors = tl.load(router.scales + chosen, mask=slot < K, other=0.0).to(tl.float32)
    at = row[:, None] * K + slot
    inside = (row < rows)[:, None] & (slot < K)
    tl.store(choice.weights + at, shares * factors, mask=inside)
    tl.store(choice.experts + at, tl.where(wanted[:, None], chosen, NOBODY), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def route_few(
    x,  # [rows, WIDTH]
    addition: Addition,  # to x, or None
    norm_weight,
    router: Router,
    num_rows,  # [1] or None
    normed,  # [rows, WIDTH]
    logits,  # float32 [rows, EXPERTS]
    arrivals,  # int32, one for each block of rows, 0 between launches
    choice: Choice,
    rows,
    eps,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program computes ROWS rows' logits of GROUP experts, and one more stores their norms; the last of those that
    compute logits chooses. All add to the residual for themselves."""
    launch_dependents()
    WIDTH: tl.constexpr = router.WIDTH
    EXPERTS: tl.constexpr = router.EXPERTS
    BLOCK_E: tl.constexpr = router.BLOCK_E
    K: tl.constexpr = router.K
    block, group, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1) - 1
    first, end = block * ROWS, tl.minimum(block * ROWS + ROWS, rows)
    column = tl.arange(0, BLOCK)
    own = (column < WIDTH)[None, :]
    delta_weights = None if addition is None else load_row(addition.delta_weight, column, WIDTH)
    expert = group * GROUP + tl.arange(0, GROUP)
    inside = (expert < EXPERTS)[:, None] & own
    elements = tl.load(router.router_weight + expert[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    factors = load_row(router.scale_weight, column, WIDTH)
    wait_for_prerequisites()
    if group == groups:
        norm_weights = load_row(norm_weight, column, WIDTH)
        next_weights = None if addition is None else load_row(addition.next_weight, column, WIDTH)
        for row in range(first, end):
            at = row * WIDTH + column[None, :]
            values = row_to_route(x, addition, delta_weights, at, own, rows, eps, WIDTH)
            tl.store(normed + at, rms(values, norm_weights, WIDTH, eps).to(normed.dtype.element_ty), mask=own)
            if addition is not None:
                tl.store(addition.added + at, values.to(x.dtype.element_ty), mask=own)
                following = rms(values, next_weights, WIDTH, eps).to(normed.dtype.element_ty)
                tl.store(addition.next_normed + at, following, mask=own)
    else:
        for row in range(first, end):
            at = row * WIDTH + column[None, :]
            values = row_to_route(x, addition, delta_weights, at, own, rows, eps, WIDTH)
            root = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=1) * (1.0 / WIDTH) + eps))
            products = tl.sum(elements.to(tl.float32) * (values * factors), axis=1) * (root * router.ROOT_SCALE)
            tl.store(logits + row * EXPERTS + expert, products, mask=expert < EXPERTS)
        tl.debug_barrier()  # every thread's logits are written before one of them counts the program in
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == groups - 1:
            every, m = tl.arange(0, BLOCK_E), block * ROWS + tl.arange(0, ROWS)
            known = (m < rows)[:, None] & (every < EXPERTS)[None, :]
            found = tl.load(logits + m[:, None] * EXPERTS + every[None, :], mask=known, other=0.0, cache_modifier=".cg")
            wanted = m < (rows if num_rows is None else tl.load(num_rows))
            words = words_of(found, every, EXPERTS)
            if ROWS == 1:
                largest = ranked_words(words, triton.next_power_of_2(K))
            else:
                largest = largest_words(words, triton.next_power_of_2(K), K)
            choose(largest, m, rows, wanted, choice, router)
            tl.store(arrivals + block, 0)


@triton.jit(do_not_specialize=["rows"])
def route_many(
    x,  # [rows, WIDTH]
    router: Router,
    num_rows,  # [1] or None
    sums_of_parts,  # float32 [SPLITS, rows, BLOCK_E], or None with one part
    squares_of_parts,  # float32 [SPLITS, rows], likewise
    arrivals,  # int32, one for each block of rows, 0 between launches
    choice: Choice,
    rows,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A program has BLOCK_T rows and one of SPLITS parts of their inputs; the last of a block's programs chooses."""
    launch_dependents()
    WIDTH: tl.constexpr = router.WIDTH
    EXPERTS: tl.constexpr = router.EXPERTS
    BLOCK_E: tl.constexpr = router.BLOCK_E
    K: tl.constexpr = router.K
    wait_for_prerequisites()
    block, split = tl.program_id(0), tl.program_id(1)
    row = block * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    x_at = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * WIDTH
    matrix_at = router.router_weight + tl.minimum(expert, EXPERTS - 1)[None, :] * WIDTH
    sums = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    BLOCKS: tl.constexpr = triton.cdiv(WIDTH, BLOCK_H)
    for at in range(BLOCKS * split // SPLITS, BLOCKS * (split + 1) // SPLITS):
        column = at * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = column < WIDTH
        values = tl.load(x_at + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        elements = tl.load(matrix_at + column[:, None], mask=inside[:, None], other=0.0).to(OPERAND)
        scaled = values * load_row(router.scale_weight, column, WIDTH)
        high = scaled.to(tl.bfloat16)
        low = (scaled - high.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(high.to(OPERAND), elements, sums)
        sums = tl.dot(low.to(OPERAND), elements, sums)
        squares += tl.sum(values * values, axis=1)
    last = True
    if SPLITS > 1:
        at = split * rows + row
        tl.store(sums_of_parts + at[:, None] * BLOCK_E + expert[None, :], sums, mask=(row < rows)[:, None])
        tl.store(squares_of_parts + at, squares, mask=row < rows)
        tl.debug_barrier()  # every thread's sums are written before one of them counts the program in
        last = tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(arrivals + block, 0)
            sums = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
            squares = tl.zeros([BLOCK_T], tl.float32)
            for part in tl.static_range(SPLITS):
                at = part * rows + row
                part_at = sums_of_parts + at[:, None] * BLOCK_E + expert[None, :]
                sums += tl.load(part_at, mask=(row < rows)[:, None], other=0.0, cache_modifier=".cg")
                squares += tl.load(squares_of_parts + at, mask=row < rows, other=0.0, cache_modifier=".cg")
        root = tl.div_rn(1.0, tl.sqrt_rn(squares * (1.0 / WIDTH) + eps))
        wanted = row < (rows if num_rows is None else tl.load(num_rows))
        words = words_of(sums * (root * router.ROOT_SCALE)[:, None], expert, EXPERTS)
        largest = largest_words(words, triton.next_power_of_2(K), K)
        choose(largest, row, rows, wanted, choice, router)


def route(
    x: Tensor, router: RouterWeights, norm_weight: Tensor, arrivals: Tensor, *, eps: float, num_rows: Tensor | None,
    exact: bool = False,
) -> Routed:  # fmt: skip
    """`ExpertBackend.route` of x bfloat16 [T, H], contiguous. arrivals: int32 [MOST_ARRIVALS], 0 between calls.
    `exact`: by the kernel of many rows at all times, in one part."""
    if _by_few(len(x), exact=exact):
        return _route_few(x, None, router, norm_weight, arrivals, eps=eps, num_rows=num_rows)
    choice = _route_many(x, router, arrivals, eps=eps, num_rows=num_rows, exact=exact)
    return Routed(TritonElementwise(exact=exact).rms_norm(x, norm_weight, eps=eps), choice)


def add_and_route(
    residual: Tensor, delta: Tensor, norms: AddedNorms, router: RouterWeights, arrivals: Tensor, *, eps: float,
    num_rows: Tensor | None, exact: bool = False,
) -> tuple[Tensor, Tensor, Routed]:  # fmt: skip
    """`ExpertBackend.add_and_route` of bfloat16 rows, in two launches, of few in one."""
    if _by_few(len(residual), exact=exact):
        added, opened = torch.empty_like(residual), torch.empty_like(residual)
        addition = Addition(delta, norms.delta, norms.dense, added, opened, constant(parts_of(delta, residual)))
        routed = _route_few(residual, addition, router, norms.experts, arrivals, eps=eps, num_rows=num_rows)
        return added, opened, routed
    summed, opened, normed = TritonElementwise(exact=exact).residual_norms(
        residual, delta, norms.delta, (norms.dense, norms.experts), eps=eps
    )
    choice = _route_many(summed, router, arrivals, eps=eps, num_rows=num_rows, exact=exact)
    return summed, opened, Routed(normed, choice)


def _by_few(rows: int, *, exact: bool) -> bool:
    return rows <= ROUTED_ROWS and not exact


def _route_few(
    x: Tensor, addition: Addition | None, router: RouterWeights, norm_weight: Tensor, arrivals: Tensor, *,
    eps: float, num_rows: Tensor | None,
) -> Routed:  # fmt: skip
    (rows, width), experts = x.shape, len(router.weight)
    normed, choice = torch.empty_like(x), _empty_choice(x, router)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(triton.cdiv(rows, ROUTED_BLOCKS))
    launch(
        route_few, (triton.cdiv(rows, block), triton.cdiv(experts, FEW_LAUNCH["GROUP"]) + 1),
        x, addition, norm_weight, Router.of(router), num_rows, normed, logits, arrivals, choice, rows, eps, ROWS=block,
        BLOCK=triton.next_power_of_2(width), **FEW_LAUNCH,
    )  # fmt: skip
    return Routed(normed, choice)


def _route_many(
    x: Tensor, router: RouterWeights, arrivals: Tensor, *, eps: float, num_rows: Tensor | None, exact: bool
) -> Choice:
    rows = len(x)
    many = many_launch(max(MANY_LAUNCHES) if exact else rows)
    choice, parts = _empty_choice(x, router), many["SPLITS"]
    sums = torch.empty((parts, rows, _block(router)), dtype=torch.float32, device=x.device) if parts > 1 else None
    squares = torch.empty((parts, rows), dtype=torch.float32, device=x.device) if parts > 1 else None
    launch(
        route_many, (triton.cdiv(rows, many["BLOCK_T"]), parts),
        x, Router.of(router), num_rows, sums, squares, arrivals, choice, rows, eps, **many,
    )  # fmt: skip
    return choice


def _empty_choice(x: Tensor, router: RouterWeights) -> Choice:
    shape = len(x), router.top_k
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    return Choice(weights, torch.empty(shape, dtype=torch.int32, device=x.device))


def many_launch(rows: int) -> dict[str, int]:
    return next(launch for most, launch in MANY_LAUNCHES.items() if rows <= most)


def _block(router: RouterWeights) -> int:
    """Logits of a row, to which those of experts are filled up."""
    block: int = triton.next_power_of_2(len(router.weight))
    return max(16, block)
