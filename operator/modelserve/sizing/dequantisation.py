"""What it takes to multiply by a quantised matrix in plain PyTorch: its elements in the compute type, one at a time.

The worker makes them so (`layers/stored_matrix.py`) and a plan counts them so.
"""

from __future__ import annotations

from functools import lru_cache

from modelserve.architecture import ModelArchitecture
from modelserve.sizing.weights import element_bytes, weight_tensors
from modelserve.weight_format import StoredType, WeightFormat

INT4_KERNELS = 6  # low and high nibbles, each written to its place; less the zero point; times the scale
FP8_KERNELS = 2  # converted; times the scale


@lru_cache(maxsize=256)
def dequantised_bytes(
    architecture: ModelArchitecture,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    weight_format: WeightFormat | None,
) -> int:
    """Bytes of the largest matrix in the compute type, and for INT4 of its nibbles of one half; 0 if none is quantised.

    With an activation order also of a step's inputs in that order.
    """
    if weight_format is None or not weight_format.quantised:
        return 0
    e, largest = element_bytes(architecture), 0
    for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size):
        stored = weight_format.of(tensor.linear)
        size = tensor.parameters * e
        if stored is StoredType.INT4:
            ordered = max_num_batched_tokens * tensor.columns * e if weight_format.activation_order else 0
            largest = max(largest, size + tensor.parameters // 2 + ordered)
        elif stored is StoredType.FP8:
            largest = max(largest, size)
    return largest


@lru_cache(maxsize=256)
def dequantising_kernels(architecture: ModelArchitecture, weight_format: WeightFormat | None) -> int:
    """Kernels of a step beside those of a model in bfloat16, over all layers."""
    if weight_format is None or not weight_format.quantised:
        return 0
    count = 0
    for tensor in weight_tensors(architecture, tensor_parallel_size=1):
        stored = weight_format.of(tensor.linear)
        if stored is StoredType.INT4:
            count += INT4_KERNELS + (5 if not weight_format.symmetric else 0) + weight_format.activation_order
        elif stored is StoredType.FP8:
            count += FP8_KERNELS + (3 * len(tensor.parts or (1,)) + 1 if weight_format.scales == "block" else 0)
    return count
