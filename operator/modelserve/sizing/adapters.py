"""What LoRA adapters take on one rank: slots of device memory, scratch of a step, and copies in host memory.

A slot has room for one adapter of the largest rank r on every matrix that may be adapted: A [P r, inputs] of the P
matrices that are stacked there, each with factors of its own, and B [outputs, r]; of experts as many of both as there
are experts. A rank holds the inputs of A where its matrix is cut by inputs and the outputs of B where it is cut by
outputs, so that its term is a share of the sum that the ranks add up anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear
from modelserve.sizing.weights.text import WeightTensor, element_bytes, weight_tensors

DEFAULT_TARGETS = (
    TextLinear.QKV, TextLinear.OUTPUT, TextLinear.GATE_UP, TextLinear.DOWN, TextLinear.LAYER_INPUT_GATE,
    TextLinear.LAYER_PROJECTION, TextLinear.MODEL_PROJECTION,
)  # fmt: skip
"""Linear layers that slots have room for where none are named: not experts, with which a slot of 26B-A4B takes 36 times
as much."""
EXPERTS = (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)
ADAPTABLE = DEFAULT_TARGETS + EXPERTS
"""Linear layers whose products have the additive term."""
MOST_SLOTS, MOST_ADAPTERS, MOST_RANK = 256, 1024, 256
DEFAULT_RANK = 16
BLOCK_ROWS = 16  # rows of one adapter that are multiplied together
SPLIT_INPUTS, MOST_SPLITS = 256, 6  # A x is summed in so many pieces at most, of a multiple of so many inputs
FEW_ROWS = 64  # of a step, whose terms have kernels of their own
FEW_SPLIT_INPUTS, MOST_FEW_SPLITS = 256, 32  # pieces of so many inputs, of twice as many where they were more
_FLOAT32 = _INT32 = 4


def in_order(targets: Collection[TextLinear]) -> tuple[TextLinear, ...]:
    """Those of ADAPTABLE that are among `targets`, in its order."""
    return tuple(each for each in ADAPTABLE if each in targets)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """`slots` adapters lie in device memory, and so in one step; `most` in host memory, of rank `rank` at most and of
    `targets` alone."""

    slots: int
    most: int
    rank: int
    targets: tuple[TextLinear, ...] = DEFAULT_TARGETS


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix of one rank that may be adapted: `parts` rows of each that is stacked in it, `inputs` columns; or as
    many as `experts`, 0: it is no experts'."""

    linear: TextLinear
    parts: tuple[int, ...]
    inputs: int
    experts: int = 0

    def elements(self, rank: int) -> int:
        """Of both factors of one adapter."""
        return max(1, self.experts) * rank * (len(self.parts) * self.inputs + sum(self.parts))

    def scratch_bytes(self, rank: int, rows: int) -> int:
        """float32 [splits, rows, parts, rank]: what A x comes to, summed piece by piece."""
        return -(-self.inputs // split_inputs(self.inputs)) * rows * len(self.parts) * rank * _FLOAT32


def split_inputs(inputs: int) -> int:
    """Inputs of a matrix that one program of A x sums."""
    return -(-inputs // (MOST_SPLITS * SPLIT_INPUTS)) * SPLIT_INPUTS


def few_split_inputs(inputs: int) -> int:
    """The same in a step of at most FEW_ROWS rows."""
    return FEW_SPLIT_INPUTS if inputs <= FEW_SPLIT_INPUTS * MOST_FEW_SPLITS else 2 * FEW_SPLIT_INPUTS


def adapted_matrices(
    architecture: ModelArchitecture, targets: tuple[TextLinear, ...], *, tensor_parallel_size: int
) -> Iterator[AdaptedMatrix]:
    """Those of one rank, layer by layer."""
    for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size):
        if tensor.linear in targets:
            experts = tensor.count if tensor.linear in EXPERTS else 0
            yield AdaptedMatrix(tensor.linear, _parts(tensor), tensor.columns, experts)


def slot_bytes(architecture: ModelArchitecture, limits: AdapterLimits, *, tensor_parallel_size: int) -> int:
    """Device memory of one slot on one rank, in the model's dtype; an adapter in host memory takes as much."""
    matrices = adapted_matrices(architecture, limits.targets, tensor_parallel_size=tensor_parallel_size)
    return sum(matrix.elements(limits.rank) for matrix in matrices) * element_bytes(architecture)


def step_blocks(limits: AdapterLimits, rows: int, requests: int) -> int:
    """Most blocks of one adapter's rows in a step of `rows` rows of `requests` requests."""
    adapters = min(limits.slots, rows, requests)
    return -(-rows // BLOCK_ROWS) + adapters


def expert_blocks(choices: int, adapters: int, experts: int) -> int:
    """Most blocks of rows of one adapter and one expert, of so many choices of experts by rows of so many adapters."""
    pairs = min(choices, adapters * experts)
    return pairs + (choices - pairs) // BLOCK_ROWS


def expert_block_words(choices: int, adapters: int, experts: int) -> int:
    """int32 words that say which rows those blocks have: of each its rows, adapter and expert, and how many rows each
    adapter has of each expert."""
    return expert_blocks(choices, adapters, experts) * (BLOCK_ROWS + 2) + adapters * experts


def scratch_bytes(
    architecture: ModelArchitecture, limits: AdapterLimits, *, tensor_parallel_size: int, rows: int, requests: int
) -> int:
    """Device memory that a step of `rows` rows holds of one product's A x, on one rank: that of the largest; with
    experts also which rows have which adapter and expert."""
    padded = step_blocks(limits, rows, requests) * BLOCK_ROWS
    choices = rows * architecture.top_k_experts
    matrices = adapted_matrices(architecture, limits.targets, tensor_parallel_size=tensor_parallel_size)
    return max(
        (
            matrix.scratch_bytes(limits.rank, padded)
            if not matrix.experts
            else matrix.scratch_bytes(limits.rank, choices)
            + expert_block_words(choices, limits.slots, matrix.experts) * _INT32
            for matrix in matrices
        ),
        default=0,
    )


def _parts(tensor: WeightTensor) -> tuple[int, ...]:
    return tensor.parts or (tensor.rows,)
