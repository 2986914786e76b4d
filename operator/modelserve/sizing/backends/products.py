"""Which kernels multiply: a row each, in the order in which they are preferred (`registry.ProductKernel`).

Hopper reads matrices near the speed of memory for up to 32 rows (decision 0018), has another kernel for up to 128 in
bfloat16, and unpacks INT4 on the way for any number (decision 0019), for one or two to integers. Elsewhere INT4 and FP8
are Triton's, and dense matrices PyTorch's. In profile exact one kernel of Triton's takes any number of rows, so that a
row is added up in one order (decision 0030).
"""

from __future__ import annotations

from functools import partial

from modelserve.model.weight_format import FP8_BLOCK, StoredType, TextLinear
from modelserve.sizing.backends.generations import FP8_CAPABILITY, HOPPER, generation_of
from modelserve.sizing.backends.registry import Matrix, ProductKernel
from modelserve.sizing.backends.table import ANY_ROWS, LIBRARY, Backend, Ends, Operation, any_rows
from modelserve.sizing.weights.quantised_tiles import (
    DEQUANTISED_BLOCK_BYTES,
    INT4_FUSED_ROWS,
    INT4_TILE_INPUTS,
    INT8_TILE_INPUTS,
    SPLIT_SUM_BYTES,
    dequantised_rows,
    int4_tiles,
    int8_inputs,
    takes_format,
)

FEW_ROWS = 32  # that Hopper's kernels of few rows take
INTEGER_ROWS = (1, 2)  # that Hopper's kernel of INT4 in integers is compiled for
INT8_INTEGER_GROUPS, SCALE_BYTES = (32, 64, 128), 2  # that it takes of INT8, and what a scale of those has
INTEGER_BYTES = 100 << 10  # of a block's shared memory that it keeps x in, at most
CLUSTER_ROWS = 128  # that Hopper's kernel of tens of rows takes, beyond which cuBLAS's are faster
CLUSTER_TILE_ROWS = 64  # rows of x in its tiles; where there are more, they have twice as many
# And matrices (outputs, inputs) of E4B, 26B-A4B and 31B of which they are from fewer on.
CLUSTER_ROWS_OF = {(6144, 2560): 64, (2560, 2048): 64, (2816, 2112): 64, (16384, 5376): 64, (5376, 8192): 96}
ROUNDED_AS_READ = 16  # rows up to which Hopper's kernel of few rows rounds FP8's inputs itself; more are rounded ahead
FP8_UNPACKED_ROWS = 16  # up to which FP8 is unpacked, where more rows are multiplied in e4m3
BOX_INPUTS = 64  # of bfloat16, which Hopper's copy engine reads together
GROUPED_TILE = 128  # of `grouped_rows`: rows of a matrix
GROUPED_STAGES = {128: 6, 256: 4}  # stages, by the rows of x that are multiplied together
GROUPED_ROWS = 8  # rows of a matrix, or of each half of it, that it stores together
GROUPED_EXPERTS = 256  # at most
# At most, of a dense matrix beside them: each tile has a multiprocessor, of which there are 114 or more.
GROUPED_DENSE_ROWS, GROUPED_DENSE_TILES = 256, 64
CHOSEN_ROWS, CHOSEN_SLOTS = 8, 64  # rows, and choices of experts of theirs, that `chosen_rows` takes
SCALE_ROWS = 16  # a multiple of which Hopper's copy engine reads NVFP4's scales of, and zero points
_GATED = (TextLinear.GATE_UP, TextLinear.EXPERT_GATE_UP)
SCALED_MULTIPLE = 16  # outputs that PyTorch's scaled product takes


def most_fused_rows(capability: int) -> int:
    """Rows up to which Triton unpacks INT4 inside of a product; on Hopper, as measured, matrix units outrun that."""
    return INT4_FUSED_ROWS if capability == HOPPER else 8 * INT4_FUSED_ROWS


def integer_bytes(rows: int, inputs: int) -> int:
    """Of x as integers: so many inputs of so many rows, two bytes each, and two floats for 32 of them."""
    return rows * inputs * 2 + rows * inputs // 32 * 8


def grouped_rows_bytes(rows: int) -> int:
    """Shared memory of a thread block of `grouped_rows` that multiplies so many rows of x together: stages with two
    barriers each, results on their way, and where each expert's rows end."""
    stage, staged, slices = (GROUPED_TILE + rows) * 128, 2 * 64 * 128, (2 * GROUPED_EXPERTS + 2) * 4
    return GROUPED_STAGES[rows] * (stage + 2 * 8) + staged + slices


MOST_GROUPED_BYTES = max(map(grouped_rows_bytes, GROUPED_STAGES))


def _taken(matrix: Matrix) -> bool:
    """Whether kernels multiply by the matrix as it is stored."""
    return matrix.capability is not None and matrix.quantised is not None and takes_format(matrix.quantised)


def _takes(matrix: Matrix, stored: StoredType, *, exact: bool) -> bool:
    return _taken(matrix) and matrix.stored is stored and matrix.exact is exact


def _hopper_takes(matrix: Matrix, stored: StoredType, *, whole: int = BOX_INPUTS) -> bool:
    """Whether Hopper's kernels, of profile fast, multiply by such a matrix: of whole blocks of inputs."""
    if matrix.capability != HOPPER or matrix.exact or matrix.stored is not stored or matrix.inputs % whole:
        return False
    return matrix.quantised is None or _taken(matrix)


def _hopper_takes_tiles(matrix: Matrix) -> bool:
    """INT4 or NVFP4. Scales of a byte and zero points lie in rows that the copy engine reads: of whole 16 bytes, which
    each half of a gated matrix begins with."""
    if not (_hopper_takes(matrix, StoredType.INT4) or _hopper_takes(matrix, StoredType.NVFP4)):
        return False
    symmetric_int4 = matrix.stored is StoredType.INT4 and matrix.quantised is not None and matrix.quantised.symmetric
    halves = 2 if matrix.linear in _GATED else 1
    return symmetric_int4 or matrix.outputs % (halves * SCALE_ROWS) == 0


def _int8_few(matrix: Matrix) -> bool:
    """With a scale for each row."""
    by_row = matrix.quantised is not None and matrix.quantised.group_size is None
    return by_row and _hopper_takes(matrix, StoredType.INT8)


def _int8_groups(matrix: Matrix) -> bool:
    """With scales of two bytes for groups, in rows that the copy engine reads: of whole 16 bytes."""
    found = matrix.quantised
    if found is None or found.group_size not in INT8_INTEGER_GROUPS or found.scale_type.bytes != SCALE_BYTES:
        return False
    return _hopper_takes(matrix, StoredType.INT8, whole=INT8_TILE_INPUTS) and matrix.outputs % (16 // SCALE_BYTES) == 0


def _integer_rows(matrix: Matrix) -> int:
    if not _hopper_takes_tiles(matrix):
        return 0
    return _most_integer_rows(int4_tiles(matrix.inputs) * INT4_TILE_INPUTS)


def _int8_integer_rows(matrix: Matrix) -> int:
    taken = _int8_few(matrix) or _int8_groups(matrix)
    return _most_integer_rows(int8_inputs(matrix.inputs)) if taken else 0


def _most_integer_rows(inputs: int) -> int:
    return max((rows for rows in INTEGER_ROWS if integer_bytes(rows, inputs) <= INTEGER_BYTES), default=0)


def _cluster_rows(matrix: Matrix) -> int:
    whole = _hopper_takes(matrix, StoredType.BFLOAT16) and matrix.outputs % (2 * GROUPED_ROWS) == 0
    shape = matrix.outputs, matrix.inputs
    return CLUSTER_ROWS_OF.get(shape, CLUSTER_ROWS) if whole and matrix.linear is not None else 0


def _fp8_rounds(matrix: Matrix) -> bool:
    """Whether inputs are rounded to e4m3, at every number of rows to the same numbers (decision 0036)."""
    found = matrix.quantised
    return found is not None and found.fp8_activations and found.scales != "block"


def _fp8_few(matrix: Matrix) -> bool:
    by_row = matrix.quantised is not None and matrix.quantised.scales != "block"
    return by_row and _hopper_takes(matrix, StoredType.FP8, whole=FP8_BLOCK)


def _fp8_scaled(matrix: Matrix) -> bool:
    """Whether PyTorch's product of e4m3 by e4m3 takes it."""
    units = matrix.capability is not None and matrix.capability >= FP8_CAPABILITY
    return _takes(matrix, StoredType.FP8, exact=False) and _fp8_rounds(matrix) and units and not _odd_outputs(matrix)


def _odd_outputs(matrix: Matrix) -> bool:
    return matrix.outputs % SCALED_MULTIPLE != 0


def _fp8_unpacked(matrix: Matrix) -> int | None:
    scaled = _fp8_scaled(matrix)
    if not _takes(matrix, StoredType.FP8, exact=False) or (scaled and _fp8_few(matrix)):
        return 0
    return FP8_UNPACKED_ROWS if scaled else ANY_ROWS


def _fused(matrix: Matrix, stored: StoredType) -> int:
    if matrix.capability is None or not _takes(matrix, stored, exact=False):
        return 0
    return most_fused_rows(matrix.capability)


def _dequantising(matrix: Matrix, kernel: str) -> tuple[str, ...]:
    blocks = -(-matrix.outputs // dequantised_rows(rows=matrix.outputs, inputs=matrix.inputs))
    return (*matrix.ordering, *(kernel, LIBRARY) * blocks)


def _grouped_on_hopper(matrix: Matrix) -> bool:
    """In whole stages of inputs, and enough of them to store the results before meanwhile."""
    inputs, gated = matrix.inputs, matrix.linear is TextLinear.EXPERT_GATE_UP
    whole = inputs % BOX_INPUTS == 0 and inputs >= 8 * BOX_INPUTS and matrix.outputs % (GROUPED_ROWS * (1 + gated)) == 0
    dense = matrix.capability == HOPPER and matrix.quantised is None
    return dense and whole and matrix.experts <= GROUPED_EXPERTS


def _split_sums(_matrix: Matrix) -> tuple[str, int]:
    return "split_sums", SPLIT_SUM_BYTES


def _dequantised_block(_matrix: Matrix) -> tuple[str, int]:
    return "dequantised_block", DEQUANTISED_BLOCK_BYTES


_PRODUCTS = "modelserve_worker.kernels.products."
_HOPPER = _PRODUCTS + "hopper."
_ROWS, _INT4, _FP8 = _HOPPER + "linear_rows_sm90:", _PRODUCTS + "int4_linear_triton:", _PRODUCTS + "fp8_linear_triton:"
_INT8 = _PRODUCTS + "int8_linear_triton:"
_NVFP4 = _PRODUCTS + "nvfp4_linear_triton:"
_SHARED = generation_of(HOPPER).shared_bytes
_BESIDE = Ends(gated=True, split=True, beside=True)
_FUSED = Ends(gated=True, split=True)
_hopper = partial(ProductKernel, backend=Backend.HOPPER, shared_bytes=_SHARED, ends=_FUSED)
_triton = partial(ProductKernel, backend=Backend.TRITON)
_grouped = partial(ProductKernel, operation=Operation.GROUPED)

DENSE_PRODUCTS = (
    # Of profile exact: one kernel for any number of rows.
    _triton(
        "int4_exact", takes=lambda m: any_rows(_takes(m, StoredType.INT4, exact=True)),
        launch=_INT4 + "int4_product_with", given=("tile", "shared"),
        kernels=lambda m: (*m.ordering, "int4_product"), buffer=_split_sums,
    ),
    _triton(
        "int8_exact", takes=lambda m: any_rows(_takes(m, StoredType.INT8, exact=True)),
        launch=_INT8 + "int8_product_with", given=("tile", "shared"), kernels=lambda _: ("int8_product",),
        buffer=_split_sums,
    ),
    _triton(
        "fp8_exact", takes=lambda m: any_rows(_takes(m, StoredType.FP8, exact=True)),
        launch=_FP8 + "fp8_product_with", given=("tile", "shared"),
        kernels=lambda m: (*m.ordering, "fp8_product"), buffer=_split_sums,
    ),
    _triton(
        "nvfp4_exact", takes=lambda m: any_rows(_takes(m, StoredType.NVFP4, exact=True)),
        launch=_NVFP4 + "nvfp4_product_with", given=("tile", "shared"),
        kernels=lambda _: ("nvfp4_product",), buffer=_split_sums,
    ),
    _triton(
        "exact_product", takes=lambda m: any_rows(m.exact),
        kernels=lambda m: (*(LIBRARY,) * m.plain_kernels, "exact_product"),
    ),
    # Of Hopper, few rows before many.
    _hopper("integer_rows", takes=_integer_rows, launch=_HOPPER + "integer_rows_sm90:integer_rows"),
    _hopper(
        "int4_rows", takes=lambda m: FEW_ROWS if _hopper_takes_tiles(m) else 0, launch=_ROWS + "int4_rows",
        kernels=lambda m: (*m.ordering, "linear_rows"), ends=_BESIDE,
    ),
    _hopper(
        "linear_int4", takes=lambda m: any_rows(_hopper_takes_tiles(m)), buffer=_split_sums,
        launch=_HOPPER + "linear_int4_sm90:int4_product", given=("shared",),
    ),
    _hopper(
        "int8_integer_rows", takes=_int8_integer_rows, launch=_HOPPER + "integer_rows_sm90:int8_integer_rows",
        kernels=lambda _: ("integer_rows",),
    ),
    _hopper(
        "int8_rows", takes=lambda m: FEW_ROWS if _int8_few(m) else 0, launch=_ROWS + "int8_rows",
        kernels=lambda _: ("linear_rows",), ends=_BESIDE,
    ),
    _hopper(
        "fp8_rows", takes=lambda m: (ROUNDED_AS_READ if _fp8_rounds(m) else FEW_ROWS) if _fp8_few(m) else 0,
        launch=_ROWS + "fp8_rows", kernels=lambda _: ("linear_rows",), ends=_BESIDE,
    ),
    _hopper(
        "fp8_rounded_rows", takes=lambda m: FEW_ROWS if _fp8_few(m) and _fp8_rounds(m) else 0,
        launch=_ROWS + "fp8_rows", kernels=lambda _: ("round_precision", "linear_rows"), ends=_BESIDE,
    ),
    _hopper(
        "dense_rows", takes=lambda m: FEW_ROWS if _hopper_takes(m, StoredType.BFLOAT16) else 0,
        launch=_ROWS + "dense_rows", given=("settles",), kernels=lambda _: ("linear_rows",), ends=_BESIDE,
    ),
    _hopper(
        "cluster_rows", takes=_cluster_rows, launch=_HOPPER + "cluster_rows_sm90:cluster_rows", ends=Ends(gated=True),
        extra=(CLUSTER_TILE_ROWS + 1, "wide_seconds"),
    ),
    # Of every GPU that has kernels.
    _triton(
        "int4_product", buffer=_split_sums, launch=_INT4 + "int4_fused_product", given=("capability", "shared"),
        takes=lambda m: _fused(m, StoredType.INT4),
    ),
    _triton(
        "int4_dequantised", takes=lambda m: any_rows(_takes(m, StoredType.INT4, exact=False)),
        launch=_INT4 + "int4_dequantised_product", given=("shared",), buffer=_dequantised_block,
        kernels=lambda m: _dequantising(m, "int4_dequantise"), extra=(1, "library_seconds"),
    ),
    _triton(
        "int8_product", buffer=_split_sums, launch=_INT8 + "int8_fused_product", given=("capability", "shared"),
        takes=lambda m: _fused(m, StoredType.INT8),
    ),
    _triton(
        "int8_dequantised", takes=lambda m: any_rows(_takes(m, StoredType.INT8, exact=False)),
        launch=_INT8 + "int8_dequantised_product", given=("shared",), buffer=_dequantised_block,
        kernels=lambda m: _dequantising(m, "int8_dequantise"), extra=(1, "library_seconds"),
    ),
    _triton(
        "nvfp4_product", buffer=_split_sums, launch=_NVFP4 + "nvfp4_fused_product", given=("capability", "shared"),
        takes=lambda m: _fused(m, StoredType.NVFP4),
    ),
    _triton(
        "nvfp4_dequantised", takes=lambda m: any_rows(_takes(m, StoredType.NVFP4, exact=False)),
        launch=_NVFP4 + "nvfp4_dequantised_product", given=("shared",), buffer=_dequantised_block,
        kernels=lambda m: _dequantising(m, "nvfp4_dequantise"), extra=(1, "library_seconds"),
    ),
    _triton(
        "fp8_product", takes=_fp8_unpacked, launch=_FP8 + "fp8_unpacked_product", given=("capability", "shared"),
        buffer=_split_sums,
    ),
    _triton(
        "fp8_scaled", takes=lambda m: any_rows(_fp8_scaled(m)), launch=_FP8 + "fp8_rounded_product",
        kernels=lambda _: ("round_inputs", LIBRARY), extra=(1, "library_seconds"),
    ),
    ProductKernel(
        "plain", Backend.PLAIN, takes=lambda _: ANY_ROWS, kernels=lambda m: (LIBRARY,) * (m.plain_kernels + 1),
        extra=(1, "library_seconds"),
    ),
)  # fmt: skip
"""By one matrix, which the whole of a step's rows are multiplied by."""

GROUPED_PRODUCTS = (
    _grouped(
        "int4_experts_exact", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.INT4, exact=True)),
        launch=_INT4 + "int4_grouped_with", given=("tile",),
        kernels=lambda m: (*m.ordering, "int4_expert_products"),
    ),
    _grouped(
        "int8_experts_exact", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.INT8, exact=True)),
        launch=_INT8 + "int8_grouped_with", given=("tile",), kernels=lambda _: ("int8_expert_products",),
    ),
    _grouped(
        "fp8_experts_exact", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.FP8, exact=True)),
        launch=_FP8 + "fp8_grouped_with", given=("tile",), kernels=lambda _: ("fp8_expert_products",),
    ),
    _grouped(
        "nvfp4_experts_exact", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.NVFP4, exact=True)),
        launch=_NVFP4 + "nvfp4_grouped_with", given=("tile",), kernels=lambda _: ("nvfp4_expert_products",),
    ),
    _grouped(
        "nvfp4_expert_products", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.NVFP4, exact=False)),
        launch=_NVFP4 + "nvfp4_grouped", given=("capability",),
    ),
    _grouped(
        "int4_expert_products", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.INT4, exact=False)),
        launch=_INT4 + "int4_grouped", given=("capability",),
    ),
    _grouped(
        "int8_expert_products", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.INT8, exact=False)),
        launch=_INT8 + "int8_grouped", given=("capability",),
    ),
    _grouped(
        "fp8_expert_products", Backend.TRITON, takes=lambda m: any_rows(_takes(m, StoredType.FP8, exact=False)),
        launch=_FP8 + "fp8_grouped", given=("capability",),
    ),
    # It adds in one order whatever the number of rows, so that it is profile exact's, too.
    _grouped(
        "grouped_rows", Backend.HOPPER, takes=lambda m: any_rows(_grouped_on_hopper(m)),
        launch="modelserve_worker.kernels.experts.grouped_rows_sm90:grouped_rows",
        ends=Ends(gated=True), shared_bytes=MOST_GROUPED_BYTES,
    ),
    # PyTorch's has a kernel that lays out its problems on Hopper; on other GPUs it reads on the host where each
    # expert's rows end, which no captured step can, so that profile exact's kernel is that of both profiles.
    _grouped(
        "exact_expert_products", Backend.TRITON,
        takes=lambda m: any_rows(m.exact or m.capability not in (None, HOPPER)),
        kernels=lambda m: (*(LIBRARY,) * m.plain_kernels, "exact_expert_products"),
    ),
    _grouped(
        "plain_experts", Backend.PLAIN, takes=lambda _: ANY_ROWS, kernels=lambda m: (LIBRARY,) * (2 + m.plain_kernels),
    ),
)  # fmt: skip
"""By the matrices of experts, of rows that are sorted by expert."""

PRODUCTS = [*DENSE_PRODUCTS, *GROUPED_PRODUCTS]
