"""Logits of a row as its filters see them, in kernels: capped, masked, changed by the row's list and its penalties.

The plain reference is `_adjusted` in `kernels.sampling.sampling`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.bundles import bundle, constant
from modelserve_worker.kernels.sampling import sampling
from modelserve_worker.kernels.sampling.ordering_triton import tanh, times
from modelserve_worker.kernels.sampling.slot_columns import LISTED

_COUNTED = tl.constexpr(sampling.IN_PROMPT - 1)
_LAST_TOKEN = tl.constexpr((1 << 31) - 1)


class RowNumbers(NamedTuple):
    """Rows of a step, parts of its buffer, as of `SampledRows`."""

    slots: Tensor
    positions: Tensor
    output_counts: Tensor


class TokenMasks(NamedTuple):
    """As of `SampledRows`. `words_per_row`: 32 tokens each."""

    rows: Tensor
    words: Tensor
    words_per_row: int


@bundle
class SlotAdjustments(NamedTuple):
    """By slot, as of `Adjustments` and `SlotColumns`. `seen_per_slot`: tokens of the whole vocabulary."""

    seen: Tensor
    seen_per_slot: int
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_tokens: Tensor
    listed: Tensor
    tokens: Tensor
    biases: Tensor
    LISTED: tl.constexpr


class Softcap(NamedTuple):
    """`by` and its reciprocal, rounded to float32; 1 where there is none."""

    by: float
    reciprocal: float


def row_numbers(rows: sampling.SampledRows) -> RowNumbers:
    return RowNumbers(rows.slots, rows.positions, rows.output_counts)


def token_masks(rows: sampling.SampledRows) -> TokenMasks | None:
    if rows.masks is None or rows.mask_rows is None:
        return None
    return TokenMasks(rows.mask_rows, rows.masks, rows.masks.shape[1])


def slot_adjustments(rows: sampling.SampledRows) -> SlotAdjustments | None:
    if (adjustments := rows.adjustments) is None:
        return None
    columns, lists = rows.columns, adjustments.lists
    return SlotAdjustments(
        adjustments.seen, adjustments.seen.shape[1], columns.repetition_penalty, columns.presence_penalty,
        columns.frequency_penalty, columns.min_tokens, columns.listed, lists.tokens, lists.biases, constant(LISTED),
    )  # fmt: skip


def softcap_of(cap: float | None) -> Softcap:
    return Softcap(1.0, 1.0) if cap is None else Softcap(cap, 1.0 / cap)


@triton.jit
def capped(logits, softcap: Softcap, CAPPED: tl.constexpr):
    """Of logits in float32, NaNs as -inf; and which are NaNs."""
    broken = logits != logits
    values = tl.where(broken, -float("inf"), logits)
    if CAPPED:
        values = tanh(values * softcap.reciprocal) * softcap.by
    return values, broken


@triton.jit
def adjusted(
    values,
    tokens,
    inside,
    row,
    slot,
    output_counts,
    masks: TokenMasks,  # or None
    adjustments: SlotAdjustments,  # or None
    CHUNK: tl.constexpr,
):
    """Capped logits of CHUNK consecutive tokens of a row -> what its filters see of them, before the temperature."""
    if masks is not None:
        mask = tl.load(masks.rows + row).to(tl.int64)
        words = masks.words + mask * masks.words_per_row + tokens // 32
        word = tl.load(words, mask=inside & (mask >= 0), other=-1)
        values = tl.where(((word >> (tokens % 32)) & 1) != 0, values, -float("inf"))
    if adjustments is not None:
        listed = tl.load(adjustments.listed + slot)
        if listed > 0:
            banning = tl.load(output_counts + row) < tl.load(adjustments.min_tokens + slot)
            values = _with_list(values, tokens, slot, listed, banning, adjustments, CHUNK)
        repetition = tl.load(adjustments.repetition + slot)
        presence = tl.load(adjustments.presence + slot)
        frequency = tl.load(adjustments.frequency + slot)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            of_slot = adjustments.seen + slot.to(tl.int64) * adjustments.seen_per_slot
            seen = tl.load(of_slot + tokens, mask=inside, other=0)
            factor = tl.where(seen > 0, repetition, 1.0)
            values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
            counts = (seen & _COUNTED).to(tl.float32)
            values = values - times(frequency, counts)
            values = values - tl.where(counts > 0, presence, 0.0)
    return values


@triton.jit
def _with_list(values, tokens, slot, listed, banning, adjustments: SlotAdjustments, CHUNK: tl.constexpr):
    """What the slot's list changes. The list is in ascending order: the entries of these tokens follow each other."""
    own = slot * adjustments.LISTED
    entry = tl.arange(0, adjustments.LISTED)
    named = tl.load(adjustments.tokens + own + entry, mask=entry < listed, other=_LAST_TOKEN)
    first = tl.min(tokens, axis=0)
    begin = tl.sum((named < first).to(tl.int32), axis=0)
    end = tl.sum((named < first + CHUNK).to(tl.int32), axis=0)
    for i in range(begin, end):
        token = tl.load(adjustments.tokens + own + i)
        bias = tl.load(adjustments.biases + own + i)
        forbids = bias == -float("inf")
        changed = tl.where(forbids, bias, values + bias)
        values = tl.where((tokens == token) & (banning | (forbids == 0)), changed, values)
    return values
