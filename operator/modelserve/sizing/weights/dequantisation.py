"""What it takes to multiply by a quantised matrix in plain PyTorch: its elements in the compute type, one at a time.

The worker makes them so (`layers/stored_matrix.py`), in a buffer of the size that is counted here.
"""

from __future__ import annotations

from functools import lru_cache

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import FP8_BLOCK, StoredType, WeightFormat
from modelserve.sizing.weights.text import SEGMENT_BYTES, WeightTensor, element_bytes, weight_tensors

INT4_KERNELS = 6  # low and high nibbles, each written to its place; less the zero point; times the scale
ZERO_POINT_KERNELS = 5  # the same nibbles of zero points, and their rows in order
FP8_KERNELS = 2  # converted; times the scale
BLOCK_KERNELS = 4  # scales of a stacked matrix's rows, these of all, and what is left of the columns


def scratch_bytes(tensor: WeightTensor, weight_format: WeightFormat, *, element_size: int) -> int:
    """Bytes of one matrix's elements of `element_size` bytes, and for INT4 of the nibbles of one half."""
    stored, elements = weight_format.of(tensor.linear), tensor.parameters
    if stored is StoredType.INT4:
        return elements * element_size + elements // 2
    return elements * element_size if stored is StoredType.FP8 else 0


def bytes_beside(tensor: WeightTensor, weight_format: WeightFormat, *, element_size: int, tokens: int) -> int:
    """Bytes of temporaries beside it: zero points twice, `tokens` inputs in order, scales of rows in blocks twice."""
    stored = weight_format.of(tensor.linear)
    if stored is StoredType.INT4:
        zero_points = 0 if weight_format.symmetric else 2 * tensor.parameters // (weight_format.group_size or 1)
        ordered = tokens * tensor.columns if weight_format.activation_order else 0
        return (zero_points + ordered) * element_size
    if stored is StoredType.FP8 and weight_format.scales == "block":
        rows = sum(-(-part // FP8_BLOCK) * FP8_BLOCK for part in tensor.parts or (tensor.rows,))
        return 2 * rows * tensor.count * -(-tensor.columns // FP8_BLOCK) * 4
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
def workspace_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None
) -> int:
    """The buffer that all products of a rank share: scratch of the largest; 0 where no matrix is quantised."""
    if weight_format is None or not weight_format.quantised:
        return 0
    e, tensors = element_bytes(architecture), weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size)
    return max(scratch_bytes(tensor, weight_format, element_size=e) for tensor in tensors)


@lru_cache(maxsize=256)
def dequantised_bytes(
    architecture: ModelArchitecture,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    weight_format: WeightFormat | None,
) -> int:
    """Memory of a rank's products by quantised matrices: the workspace in whole segments, and the most beside it."""
    if weight_format is None or not weight_format.quantised:
        return 0
    workspace = workspace_bytes(architecture, tensor_parallel_size=tensor_parallel_size, weight_format=weight_format)
    e, tensors = element_bytes(architecture), weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size)
    beside = max(bytes_beside(t, weight_format, element_size=e, tokens=max_num_batched_tokens) for t in tensors)
    return -(-workspace // SEGMENT_BYTES) * SEGMENT_BYTES + beside
