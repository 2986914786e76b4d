"""One matrix in the published layouts, rounded to nearest: what its tensors hold, by what follows the module's name."""

from __future__ import annotations

import torch
from torch import Tensor

from modelserve.model.weight_format import FP8_BLOCK, Layout, MatrixFormat, StoredType

FP8_LARGEST = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
GPTQ = (Layout.GPTQ, Layout.GPTQ_V2)


def pack(values: Tensor, bits: int = 4) -> Tensor:
    """0..15, or of other bits, [N, K] -> int32 [N, K / 8], the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits)
    words = (values.reshape(values.shape[0], -1, 32 // bits).long() << shifts).sum(dim=-1) & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def matrix_tensors(weight: Tensor, stored: MatrixFormat, order: Tensor) -> dict[str, Tensor]:
    """Tensors of one matrix [N, K] by what follows its module's name. `order` [K]: columns of the first group, ..."""
    if stored.stored is StoredType.INT8:
        return int8_tensors(weight, stored)
    if stored.stored is StoredType.NVFP4:
        return nvfp4_tensors(weight, stored)
    if stored.stored is StoredType.INT4 and stored.layout is not Layout.COMPRESSED_TENSORS:
        return turned_int4_tensors(weight, stored, order)
    parts = int4_tensors(weight, stored, order) if stored.stored is StoredType.INT4 else fp8_tensors(weight, stored)
    inverse = {"scale": "scale_inv"} if stored.layout is Layout.BLOCK_FP8 else {}
    return {f".weight{'_' + inverse.get(part, part) if part else ''}": tensor for part, tensor in parts.items()}


def int4_tensors(weight: Tensor, stored: MatrixFormat, order: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' by what follows `weight_`."""
    nibbles, scale, zero, index = int4_steps(weight, stored, order)
    tensors = {"packed": pack(nibbles), "scale": scale, "shape": torch.tensor(list(weight.shape))}
    if not stored.symmetric:
        tensors["zero_point"] = pack(zero.T.contiguous()).T.contiguous()
    if stored.activation_order:
        tensors["g_idx"] = index
    return tensors


def turned_int4_tensors(weight: Tensor, stored: MatrixFormat, order: Tensor) -> dict[str, Tensor]:
    """GPTQ's and AWQ's, columns before rows."""
    nibbles, scale, zero, index = int4_steps(weight, stored, order)
    tensors = {".scales": scale.T.contiguous()}
    if stored.layout is Layout.AWQ:
        tensors[".qweight"], tensors[".qzeros"] = (
            pack(values.T.reshape(values.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1)) for values in (nibbles, zero)
        )
        return tensors
    tensors[".qweight"] = pack(nibbles).T.contiguous()
    tensors[".qzeros"] = pack((zero - int(stored.layout is Layout.GPTQ)).T)
    return tensors | {".g_idx": index}


def int4_steps(weight: Tensor, stored: MatrixFormat, order: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Elements 0..15 [N, K], scales and zero points [N, K / g], and the group of each column."""
    rows, columns = weight.shape
    size = stored.group_size or columns
    index = torch.empty(columns, dtype=torch.int32)
    index[order] = torch.arange(columns, dtype=torch.int32) // size
    grouped, held = weight.double()[:, order].view(rows, -1, size), getattr(torch, stored.scale_type)
    if stored.symmetric:
        scale = (grouped.abs().amax(-1) / 7.5).clamp(min=1e-6).to(held)
        zero = torch.full(scale.shape, 8)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-6).to(held)
        zero = (-low / scale.double()).round().clamp(0, 15).long()
    steps = ((grouped / scale.double().unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, 15).long()
    nibbles = torch.empty((rows, columns), dtype=torch.long)
    nibbles[:, order] = steps.view(rows, columns)
    return nibbles, scale, zero, index


def int8_tensors(weight: Tensor, stored: MatrixFormat) -> dict[str, Tensor]:
    rows, columns = weight.shape
    size = stored.group_size or columns
    held = torch.bfloat16 if stored.group_size is None else getattr(torch, stored.scale_type)
    grouped = weight.double().view(rows, -1, size)
    scale = (grouped.abs().amax(-1) / 127.5).clamp(min=1e-6).to(held)
    steps = (grouped / scale.double().unsqueeze(-1)).round().clamp(-128, 127).view(rows, columns)
    if stored.layout is Layout.COMPRESSED_TENSORS:
        return {".weight": steps.to(torch.int8), ".weight_scale": scale}
    words = pack(steps + 128, bits=8)
    if stored.layout is Layout.PACKED_INT8:
        return {".weight_packed": words, ".weight_scale": scale, ".weight_shape": torch.tensor([rows, columns])}
    zero = torch.full((columns // size, rows), 128 - int(stored.layout is Layout.GPTQ))
    index = torch.arange(columns, dtype=torch.int32) // size
    turned = {".qweight": words.T.contiguous(), ".scales": scale.T.contiguous()}
    return turned | {".qzeros": pack(zero, bits=8), ".g_idx": index}


def nvfp4_tensors(weight: Tensor, stored: MatrixFormat) -> dict[str, Tensor]:
    rows, columns = weight.shape
    grouped = weight.double().view(rows, -1, 16)
    whole = (weight.double().abs().amax() / (6 * FP8_LARGEST)).clamp(min=1e-12).float()
    if stored.layout is Layout.COMPRESSED_TENSORS:
        whole = 1 / (1 / whole)  # as the reciprocal is stored
    scale = (grouped.abs().amax(-1) / 6 / whole.double()).clamp(max=FP8_LARGEST).float().to(torch.float8_e4m3fn)
    spread = (scale.double() * whole.double()).clamp(min=1e-30).unsqueeze(-1)
    steps = ((grouped / spread).abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    steps = (steps + 8 * (grouped < 0)).view(rows, columns).to(torch.uint8)
    packed = steps[:, 0::2] | steps[:, 1::2] << 4
    if stored.layout is Layout.MODELOPT:
        inputs = torch.tensor(0.01)
        return {".weight": packed, ".weight_scale": scale, ".weight_scale_2": whole, ".input_scale": inputs}
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": (1 / whole).view(1)}


def fp8_tensors(weight: Tensor, stored: MatrixFormat) -> dict[str, Tensor]:
    """Elements under the empty name, and their scale."""
    rows, columns = weight.shape
    if stored.scales == "block":
        padded = torch.nn.functional.pad(weight.double(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
        blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
        scale = (blocks.abs().amax((1, 3)) / FP8_LARGEST).clamp(min=1e-8).to(torch.bfloat16)
        spread = scale.double().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:rows, :columns]
    else:
        largest = (
            weight.double().abs().amax(1, keepdim=True) if stored.scales == "channel" else weight.double().abs().amax()
        )
        scale = (largest / FP8_LARGEST).clamp(min=1e-8).to(torch.bfloat16)
        spread, scale = scale.double(), scale.view(-1, 1) if stored.scales == "channel" else scale.view(1)
    elements = (weight.double() / spread).clamp(-FP8_LARGEST, FP8_LARGEST).float()
    return {"": elements.to(torch.float8_e4m3fn), "scale": scale}
