"""Which kernels multiply: by a matrix's format and shape, the GPU, and rows.

Hopper reads matrices near the speed of memory for up to 32 rows (decision 0018), has another kernel for up to 128 in
bfloat16, and unpacks INT4 on the way for any number (decision 0019), for one or two to integers. Elsewhere INT4 and FP8
are Triton's, and dense matrices PyTorch's. In profile exact one kernel of Triton's takes any number of rows, so that a
row is added up in one order (decision 0030).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from modelserve.sizing.backends.generations import FP8_CAPABILITY, HOPPER, generation_of
from modelserve.sizing.backends.table import HEAD, LIBRARY, Backend, Choice, Operation, Subject
from modelserve.sizing.quantised_tiles import (
    DEQUANTISED_BLOCK_BYTES,
    INT4_FUSED_ROWS,
    INT4_GROUPS,
    INT4_TILE_INPUTS,
    SPLIT_SUM_BYTES,
    dequantised_rows,
    int4_tiles,
)
from modelserve.sizing.rank_settings import Profile
from modelserve.weight_format import FP8_BLOCK, StoredType, TextLinear, WeightFormat

FEW_ROWS = 32  # that Hopper's kernels of few rows take
INTEGER_ROWS = (1, 2)  # that Hopper's kernel of INT4 in integers is compiled for
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
SCALED_MULTIPLE = 16  # outputs that PyTorch's scaled product takes


def most_fused_rows(capability: int) -> int:
    """Rows up to which Triton unpacks INT4 inside of a product; on Hopper, as measured, matrix units outrun that."""
    return INT4_FUSED_ROWS if capability == HOPPER else 8 * INT4_FUSED_ROWS


def integer_bytes(rows: int, tiles: int) -> int:
    """Of x as integers: `tiles` of 256 inputs of so many rows, two bytes each, and two floats for 32 of them."""
    return tiles * rows * (2 * INT4_TILE_INPUTS + INT4_TILE_INPUTS // 32 * 8)


def takes_format(weight_format: WeightFormat) -> bool:
    """Whether kernels multiply by the quantised matrices of this format; else they are dequantised for each product."""
    return weight_format.stored is StoredType.FP8 or weight_format.group_size in INT4_GROUPS


def product_choices(
    linear: TextLinear | None,
    shape: tuple[int, int],
    weight_format: WeightFormat | None,
    *,
    capability: int | None,
    plain_kernels: int = 0,
    profile: Profile = "fast",
    settles: bool = False,
) -> Iterator[Choice]:
    """Of a matrix with `shape` (outputs, inputs) on one rank; `linear` None is the output head, `capability` None a
    device without kernels. `plain_kernels`: PyTorch's beside the product, where it makes the elements first. `settles`:
    few rows in bfloat16 do, on Hopper."""
    stored = StoredType.BFLOAT16 if weight_format is None else weight_format.of(linear)
    quantised = weight_format if stored in (StoredType.INT4, StoredType.FP8) else None
    subject: Subject = HEAD if linear is None else linear
    choice = partial(Choice, Operation.LINEAR, subject=subject, shape=shape, format=str(quantised or stored))
    taken = quantised is not None and takes_format(quantised)
    if capability is not None and profile == "exact":
        ordered = (LIBRARY,) if quantised is not None and taken and quantised.activation_order else ()
        kernels = (*ordered, f"{stored}_product") if taken else (*(LIBRARY,) * plain_kernels, "exact_product")
        yield choice(Backend.TRITON, kernels, workspace_bytes=SPLIT_SUM_BYTES if taken else 0)
    elif capability is None or (quantised is not None and not taken):
        yield choice(Backend.PLAIN, (LIBRARY,) * (plain_kernels + 1))
    elif quantised is None:
        if capability == HOPPER and shape[1] % BOX_INPUTS == 0:
            shared = generation_of(HOPPER).shared_bytes
            yield _few_rows(partial(choice, settles=settles))
            if linear is not None and shape[0] % (2 * GROUPED_ROWS) == 0:
                most = CLUSTER_ROWS_OF.get(shape, CLUSTER_ROWS)
                yield choice(Backend.HOPPER, ("cluster_rows",), most_rows=most, shared_bytes=shared, fuses_gelu=True)
        yield choice(Backend.PLAIN, (LIBRARY,))
    elif stored is StoredType.INT4:
        yield from _int4(quantised, choice, shape, capability)
    else:
        yield from _fp8(quantised, choice, shape, capability)


def _few_rows(choice: partial[Choice], ordered: tuple[str, ...] = ()) -> Choice:
    shared = generation_of(HOPPER).shared_bytes
    kernels = (*ordered, "linear_rows")
    return choice(Backend.HOPPER, kernels, most_rows=FEW_ROWS, shared_bytes=shared, fuses_gelu=True)


def _int4(
    weight_format: WeightFormat, choice: partial[Choice], shape: tuple[int, int], capability: int
) -> Iterator[Choice]:
    outputs, inputs = shape
    ordered = (LIBRARY,) if weight_format.activation_order else ()
    if capability == HOPPER and weight_format.symmetric and inputs % BOX_INPUTS == 0:
        shared = generation_of(HOPPER).shared_bytes
        fitting = [rows for rows in INTEGER_ROWS if integer_bytes(rows, int4_tiles(inputs)) <= INTEGER_BYTES]
        if fitting:
            kernels = (*ordered, "integer_rows")
            yield choice(Backend.HOPPER, kernels, most_rows=fitting[-1], shared_bytes=shared, fuses_gelu=True)
        yield _few_rows(choice, ordered)
        yield choice(
            Backend.HOPPER, (*ordered, "linear_int4"), shared_bytes=shared,
            workspace_bytes=SPLIT_SUM_BYTES, fuses_gelu=True,
        )  # fmt: skip
        return
    yield choice(
        Backend.TRITON, (*ordered, "int4_product"), most_rows=most_fused_rows(capability),
        workspace_bytes=SPLIT_SUM_BYTES,
    )  # fmt: skip
    blocks = -(-outputs // dequantised_rows(rows=outputs, inputs=inputs))
    kernels = (*ordered, *("int4_dequantise", LIBRARY) * blocks)
    yield choice(Backend.TRITON, kernels, workspace_bytes=DEQUANTISED_BLOCK_BYTES)


def _fp8(
    weight_format: WeightFormat, choice: partial[Choice], shape: tuple[int, int], capability: int
) -> Iterator[Choice]:
    outputs, inputs = shape
    by_row = weight_format.scales != "block"
    few = capability == HOPPER and by_row and inputs % FP8_BLOCK == 0
    rounds = weight_format.fp8_activations and by_row  # at every number of rows, to the same numbers (decision 0036)
    if few and rounds:
        yield replace(_few_rows(choice), most_rows=ROUNDED_AS_READ)
        yield _few_rows(choice, ("round_precision",))
    elif few:
        yield _few_rows(choice)
    scaled = rounds and outputs % SCALED_MULTIPLE == 0 and capability >= FP8_CAPABILITY
    if not (few and scaled):
        most = FP8_UNPACKED_ROWS if scaled else None
        yield choice(Backend.TRITON, ("fp8_product",), most_rows=most, workspace_bytes=SPLIT_SUM_BYTES)
    if scaled:
        yield choice(Backend.TRITON, ("round_inputs", LIBRARY))


def grouped_rows_bytes(rows: int) -> int:
    """Shared memory of a thread block of `grouped_rows` that multiplies so many rows of x together: stages with two
    barriers each, results on their way, and where each expert's rows end."""
    stage, staged, slices = (GROUPED_TILE + rows) * 128, 2 * 64 * 128, (2 * GROUPED_EXPERTS + 2) * 4
    return GROUPED_STAGES[rows] * (stage + 2 * 8) + staged + slices


MOST_GROUPED_BYTES = max(map(grouped_rows_bytes, GROUPED_STAGES))


def grouped_choice(
    linear: TextLinear,
    shape: tuple[int, int],
    weight_format: WeightFormat | None,
    *,
    experts: int,
    capability: int | None,
    plain_kernels: int = 0,
    profile: Profile = "fast",
) -> Choice:
    """Of rows sorted by expert times experts' matrices, for any number of rows.

    Hopper's kernel is for bfloat16 in whole stages of inputs, and enough of them to store the results before meanwhile.
    It adds in one order whatever the number of rows, so that it is profile exact's, too.
    PyTorch's has a kernel that lays out its problems there; on other GPUs it reads on the host where each expert's rows
    end, which no captured step can, so that Triton's kernel of profile exact is that of both.
    """
    stored = StoredType.BFLOAT16 if weight_format is None else weight_format.of(linear)
    quantised = weight_format if stored in (StoredType.INT4, StoredType.FP8) else None
    choice = partial(Choice, Operation.GROUPED, subject=linear, shape=shape, format=str(quantised or stored))
    if quantised is not None and capability is not None and takes_format(quantised):
        ordered = (LIBRARY,) if quantised.activation_order else ()
        return choice(Backend.TRITON, (*ordered, f"{stored}_expert_products"))
    outputs, inputs = shape
    gated = linear is TextLinear.EXPERT_GATE_UP
    whole = inputs % BOX_INPUTS == 0 and inputs >= 8 * BOX_INPUTS and outputs % (GROUPED_ROWS * (1 + gated)) == 0
    if quantised is None and capability == HOPPER and whole and experts <= GROUPED_EXPERTS:
        return choice(Backend.HOPPER, ("grouped_rows",), shared_bytes=MOST_GROUPED_BYTES, fuses_gelu=gated)
    if capability is not None and (profile == "exact" or capability != HOPPER):
        return choice(Backend.TRITON, (*(LIBRARY,) * plain_kernels, "exact_expert_products"))
    return choice(Backend.PLAIN, (LIBRARY,) * (2 + plain_kernels))
