"""What it takes to multiply by a quantised matrix in plain PyTorch: its elements in the compute type, one at a time.

The worker makes them so (`layers/stored/`), in a buffer of the size that is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import FP8_BLOCK, NVFP4_GROUP, StoredType, WeightFormat
from modelserve.sizing.weights.quantised_tiles import takes_format
from modelserve.sizing.weights.text import SEGMENT_BYTES, WeightTensor, element_bytes, weight_tensors

INT4_KERNELS = 6  # low and high nibbles, each written to its place; less the zero point; times the scale
ZERO_POINT_KERNELS = 5  # the same nibbles of zero points, and their rows in order
NVFP4_KERNELS = 10  # nibbles likewise; their bits in place, three; scales converted; times these, and times the row's
SCALED_KERNELS = 2  # of INT8 and FP8: converted; times the scale
BLOCK_KERNELS = 4  # scales of a stacked matrix's rows, these of all, and what is left of the columns
_NIBBLES = (StoredType.INT4, StoredType.NVFP4)  # two elements in a byte


def scratch_bytes(tensor: WeightTensor, weight_format: WeightFormat, *, element_size: int) -> int:
    """Bytes of one matrix's elements of `element_size` bytes, and the nibbles of one half where two are in a byte."""
    stored, elements = weight_format.matrix(tensor.linear), tensor.parameters
    if not stored.quantised:
        return 0
    return elements * element_size + (elements // 2 if stored.stored in _NIBBLES else 0)


def bytes_beside(tensor: WeightTensor, weight_format: WeightFormat, *, element_size: int, tokens: int) -> int:
    """Bytes of temporaries beside it: zero points twice, `tokens` inputs in order, converted scales of NVFP4, scales of
    rows in blocks twice."""
    stored = weight_format.matrix(tensor.linear)
    if stored.stored is StoredType.INT4:
        zero_points = 0 if stored.symmetric else 2 * tensor.parameters // (stored.group_size or 1)
        ordered = tokens * tensor.columns if stored.activation_order else 0
        return (zero_points + ordered) * element_size
    if stored.stored is StoredType.NVFP4:
        return tensor.parameters // NVFP4_GROUP * element_size
    if stored.scales == "block":
        rows = sum(-(-part // FP8_BLOCK) * FP8_BLOCK for part in tensor.parts or (tensor.rows,))
        return 2 * rows * tensor.count * -(-tensor.columns // FP8_BLOCK) * 4
    return 0


def kernels(tensor: WeightTensor, weight_format: WeightFormat) -> int:
    """Kernels that dequantise one matrix, and put its inputs in order."""
    stored = weight_format.matrix(tensor.linear)
    if stored.stored is StoredType.INT4:
        zero_points = 0 if stored.symmetric else ZERO_POINT_KERNELS
        return INT4_KERNELS + zero_points + stored.activation_order
    if stored.stored is StoredType.NVFP4:
        return NVFP4_KERNELS
    blocks = BLOCK_KERNELS * max(1, len(tensor.parts)) if stored.scales == "block" else 0
    return SCALED_KERNELS + blocks if stored.quantised else 0


@lru_cache(maxsize=256)
def workspace_bytes(
    architecture: ModelArchitecture,
    *,
    tensor_parallel_size: int,
    weight_format: WeightFormat | None,
    on_kernels: bool = False,
) -> int:
    """The buffer that all products of a rank by dequantised matrices share: scratch of the largest; 0 where there is
    none. `on_kernels`: kernels multiply by those that they take."""
    if weight_format is None or not weight_format.quantised:
        return 0
    e = element_bytes(architecture)
    tensors = _dequantised(architecture, tensor_parallel_size, weight_format, on_kernels=on_kernels)
    return max((scratch_bytes(tensor, weight_format, element_size=e) for tensor in tensors), default=0)


@lru_cache(maxsize=256)
def dequantised_bytes(
    architecture: ModelArchitecture,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    weight_format: WeightFormat | None,
    on_kernels: bool = False,
) -> int:
    """Memory of a rank's products by dequantised matrices: the workspace in whole segments, and the most beside it; 0
    where there is none. `on_kernels`: kernels multiply by those that they take."""
    if weight_format is None or not weight_format.quantised:
        return 0
    workspace = workspace_bytes(
        architecture,
        tensor_parallel_size=tensor_parallel_size,
        weight_format=weight_format,
        on_kernels=on_kernels,
    )
    e = element_bytes(architecture)
    tensors = _dequantised(architecture, tensor_parallel_size, weight_format, on_kernels=on_kernels)
    beside = (bytes_beside(t, weight_format, element_size=e, tokens=max_num_batched_tokens) for t in tensors)
    return -(-workspace // SEGMENT_BYTES) * SEGMENT_BYTES + max(beside, default=0)


def _dequantised(
    architecture: ModelArchitecture, tensor_parallel_size: int, weight_format: WeightFormat, *, on_kernels: bool
) -> Iterator[WeightTensor]:
    """The quantised matrices of a rank that no kernel multiplies by."""
    for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size):
        stored = weight_format.matrix(tensor.linear)
        if stored.quantised and not (on_kernels and takes_format(stored)):
            yield tensor
