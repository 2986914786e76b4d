"""Storage formats of cache rows: what a row of K or V becomes in the arena, and what every reader gets back.

int8 is symmetric with one float16 scale per token and head: scale = max|x| / 127, rounded to float16 first, then
x is divided by the rounded scale. fp8 rows have no scale: values saturate at the format's largest finite number.
A row is encoded once; the chunk that made it and every later reader decode the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.sizing.pages import KVCacheDtype

_FP8 = {KVCacheDtype.FP8_E4M3: torch.float8_e4m3fn, KVCacheDtype.FP8_E5M2: torch.float8_e5m2}
_INT8_MAX = 127.0


@dataclass(frozen=True)
class StoredRows:
    """Encoded rows: `values` [..., D] of the storage dtype, `scale` [..., 1] float16 for int8 and None otherwise."""

    values: Tensor
    scale: Tensor | None = None


def v_only_columns(width: int, *, pairs: int, device: torch.device | None = None) -> Tensor:
    """Which column of a head each place of a V-only row holds, int64 [width]: unrotated ones, then the rotated pairs.

    Rotation turns columns i and i + width / 2 for i < `pairs`. With both halves of them at the end of the row, kernels
    read them as blocks of their own.
    """
    half = width // 2
    places = torch.arange(width, device=device)
    first, second = places[:half], places[half:]
    return torch.cat((first[pairs:], second[pairs:], first[:pairs], second[:pairs]))


def storage_dtype(dtype: KVCacheDtype) -> torch.dtype:
    """Element type of a row's plane. fp8 planes are typed uint8, because few indexing kernels take float8."""
    if dtype in _FP8:
        return torch.uint8
    return {
        KVCacheDtype.FLOAT32: torch.float32,
        KVCacheDtype.BFLOAT16: torch.bfloat16,
        KVCacheDtype.INT8: torch.int8,
    }[dtype]


def encode_rows(rows: Tensor, dtype: KVCacheDtype) -> StoredRows:
    """Encode `rows` [..., D] of a floating dtype; the last dimension is one token and head."""
    if dtype in _FP8:
        target = _FP8[dtype]
        limit = torch.finfo(target).max
        return StoredRows(rows.float().clamp(-limit, limit).to(target).view(torch.uint8))
    if dtype is KVCacheDtype.INT8:
        values = rows.float()
        # The scale stays within float16, so that no row decodes to infinity.
        scale = (values.abs().amax(dim=-1, keepdim=True) / _INT8_MAX).clamp(max=torch.finfo(torch.float16).max).half()
        divisor = torch.where(scale > 0, scale, 1).float()
        steps = torch.where(scale > 0, values / divisor, 0.0).round_().clamp_(-_INT8_MAX, _INT8_MAX)
        return StoredRows(steps.to(torch.int8), scale)
    return StoredRows(rows.to(storage_dtype(dtype)))


def decode_rows(stored: StoredRows, dtype: KVCacheDtype, compute: torch.dtype) -> Tensor:
    """Values of encoded rows in the dtype attention computes in; the inverse of `encode_rows` up to its rounding."""
    if dtype in _FP8:
        return stored.values.view(_FP8[dtype]).to(compute)
    if stored.scale is not None:
        return (stored.values.float() * stored.scale.float()).to(compute)
    return stored.values.to(compute)
