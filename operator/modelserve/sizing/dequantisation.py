"""What it takes to multiply by a quantised matrix in plain PyTorch: its elements in the compute type, one at a time.

The worker makes them so (`layers/stored_matrix.py`) and a plan counts them so.
"""

from __future__ import annotations

from functools import lru_cache

from modelserve.architecture import ModelArchitecture
from modelserve.sizing.weights import WeightTensor, element_bytes, weight_tensors
from modelserve.weight_format import FP8_BLOCK, StoredType, WeightFormat

INT4_KERNELS = 6  # low and high nibbles, each written to its place; less the zero point; times the scale
ZERO_POINT_KERNELS = 5  # the same nibbles of zero points, and their rows in order
FP8_KERNELS = 2  # converted; times the scale
BLOCK_KERNELS = 4  # scales of a stacked matrix's rows, these of all, and what is left of the columns


def scratch_bytes(tensor: WeightTensor, weight_format: WeightFormat, *, element_size: int) -> int:
    """Bytes that live while one matrix is dequantised to elements of `element_size` bytes, its result included.

    INT4: nibbles of one half; zero points twice. FP8 in blocks: float32 scales of rows and blocks of columns, twice.
    """
    stored, elements = weight_format.of(tensor.linear), tensor.parameters
    if stored is StoredType.INT4:
        zero_points = 0 if weight_format.symmetric else 2 * elements // (weight_format.group_size or 1)
        return elements * element_size + elements // 2 + zero_points * element_size
    if stored is StoredType.FP8:
        rows = sum(-(-part // FP8_BLOCK) * FP8_BLOCK for part in tensor.parts or (tensor.rows,))
        row_scales = rows * tensor.count * -(-tensor.columns // FP8_BLOCK) * 4
        return elements * element_size + (2 * row_scales if weight_format.scales == "block" else 0)
    return 0


def kernels(tensor: WeightTensor, weight_format: WeightFormat) -> int:
    """Kernels that dequantise one matrix, and put its inputs in order."""
    stored = weight_format.of(tensor.linear)
    if stored is StoredType.INT4:
        zero_points = 0 if weight_format.symmetric else ZERO_POINT_KERNELS
        return INT4_KERNELS + zero_points + weight_format.activation_order
    if stored is StoredType.FP8:
        return FP8_KERNELS + (BLOCK_KERNELS * max(1, len(tensor.parts)) if weight_format.scales == "block" else 0)
    return 0


@lru_cache(maxsize=256)
def dequantised_bytes(
    architecture: ModelArchitecture,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    weight_format: WeightFormat | None,
) -> int:
    """Scratch of the product that takes most, in the compute type; 0 where no matrix is quantised.

    With an activation order also a step's inputs in that order.
    """
    if weight_format is None or not weight_format.quantised:
        return 0
    e, largest = element_bytes(architecture), 0
    for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size):
        ordered = max_num_batched_tokens * tensor.columns * e if weight_format.activation_order else 0
        size = scratch_bytes(tensor, weight_format, element_size=e)
        largest = max(largest, size + ordered if size else 0)
    return largest


@lru_cache(maxsize=256)
def dequantising_kernels(architecture: ModelArchitecture, weight_format: WeightFormat | None) -> int:
    """Kernels of a step beside those of a model in bfloat16, over all layers."""
    if weight_format is None or not weight_format.quantised:
        return 0
    return sum(kernels(tensor, weight_format) for tensor in weight_tensors(architecture, tensor_parallel_size=1))
