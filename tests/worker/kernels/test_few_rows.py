"""Which products the kernel for few rows is given, and that it is given what it asks for. Its results need a GPU."""

from __future__ import annotations

import pytest
import torch
from plain_products import PlainFp8, PlainInt4, PlainInt8, fp8_elements, int4_elements, int8_elements
from torch import Tensor

from modelserve.model.weight_format import StoredType, TextLinear, WeightFormat, int4
from modelserve.sizing.backends.products import INTEGER_BYTES, INTEGER_ROWS, PRODUCTS, integer_bytes
from modelserve.sizing.backends.registry import Matrix, choices_of
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.weights.quantised_tiles import INT4_TILE_INPUTS
from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.products import fp8_linear_triton, int4_linear_triton, int8_linear_triton
from modelserve_worker.kernels.products.fp8_linear import Fp8Pairs
from modelserve_worker.kernels.products.hopper import (
    cluster_rows_sm90,
    integer_rows_sm90,
    linear_int4_sm90,
    linear_rows_sm90,
)
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.int8_linear import Int8Pairs
from modelserve_worker.kernels.products.linear_tiles import SharedBuffers
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.layers.stored.stored_matrix import stored_matrix

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def rows(count: int, inputs: int = 256, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(count, inputs, dtype=dtype)


def test_rows_that_the_copy_engine_cannot_read_are_copied() -> None:
    readable = linear_rows_sm90.readable
    wide = rows(4, inputs=512)
    for x in (rows(4), wide, wide[:, 256:], wide[1:3]):
        assert readable(x) is x, "a part of a wider matrix too"
    apart = rows(4, inputs=260)[:, :256].t().contiguous().t()  # inputs of a row do not lie beside one another
    for x in (apart, rows(4, inputs=257)[:, 1:]):  # rows do not begin at multiples of 16 bytes
        copy = readable(x)
        assert copy.is_contiguous()
        assert torch.equal(copy, x)


@pytest.mark.parametrize("format_", [{}, {"fp8": True}, *({"int4_scales": scales} for scales in (8, 4, 2, 1))], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_every_compilation_has_stages_under_way_within_a_block_of_shared_memory(format_, gated) -> None:
    for count in (1, 9, 17, 32):
        for matrix_rows in (256, 2560, 5376, 16384, 262_144):
            kernel = linear_rows_sm90.kernel_for(count, matrix_rows, gated=gated, split=not gated, **format_)
            assert kernel.rows >= count
            assert kernel.stages >= 2
            assert kernel.shared_bytes <= linear_rows_sm90.SHARED_BYTES
            assert kernel.x_boxes * kernel.blocks <= 256, "the largest box of the copy engine"


@pytest.mark.parametrize("scales", [8, 4, 2, 1])
@pytest.mark.parametrize("matrix_rows", [256, 2560, 5376, 16384, 43_008])
def test_integers_of_x_leave_room_for_stages_under_way(matrix_rows: int, scales: int) -> None:
    """As long as the table of kernels lets x be."""
    for count in INTEGER_ROWS:
        tiles = max(each for each in range(400) if integer_bytes(count, 256 * each) <= INTEGER_BYTES)
        matrix = Int4Tiles(
            torch.empty(tiles, matrix_rows, 32, dtype=torch.int32, device="meta"),
            torch.empty(tiles, scales, matrix_rows, dtype=BF16, device="meta"), None, tiles * INT4_TILE_INPUTS,
        )  # fmt: skip
        for gated, split in ((True, False), (False, False), (False, True)):
            kernel = integer_rows_sm90.kernel_for(count, matrix, gated=gated, split=split)
            assert kernel.rows >= count
            assert kernel.stages >= 2
            assert kernel.shared_bytes <= linear_rows_sm90.SHARED_BYTES
            assert kernel.tiles % kernel.blocks == 0
            assert kernel.tiles * kernel.parts >= tiles


@pytest.mark.parametrize(("matrix_rows", "tile", "divided"), [
    (43_008, 128, None),  # 31B's gate_up: 336 tiles in three turns
    (20_480, 160, None),  # E4B's: 128 tiles, one turn
    (16_384, 128, None),  # 31B's qkv: likewise
    (5376, 64, (128, 3)),  # 31B's o and down
    (2560, 32, (64, 3)),  # E4B's
    (2816, 32, (64, 3)),  # 26B-A4B's
    (256, 32, (32, 4)),
])  # fmt: skip
def test_a_division_gives_most_multiprocessors_work(matrix_rows, tile, divided) -> None:
    whole = linear_rows_sm90.kernel_for(1, matrix_rows)
    assert (whole.tile, whole.parts) == (tile, 1)
    if divided is not None:
        split = linear_rows_sm90.kernel_for(1, matrix_rows, split=True)
        assert (split.tile, split.parts) == divided


@pytest.mark.parametrize(("matrix_rows", "tile"), [(43_008, 352), (20_480, 160), (16_384, 128), (3072, 64)])
def test_an_int4_tile_is_the_one_that_leaves_the_fewest_multiprocessors_idle(matrix_rows, tile) -> None:
    assert linear_rows_sm90.kernel_for(1, matrix_rows, int4_scales=8).tile == tile


class Recorded:
    """Kernels of Hopper's table that multiply in plain PyTorch, and say what they were given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, bool, bool]] = []

    def dense(
        self, x: Tensor, weight: Tensor, *, gated: bool = False, split: bool = False, settles: bool = False
    ) -> Tensor:
        assert not settles  # a dense model has no experts behind it
        return self._product("dense", x, weight, gated, split)

    def dense_many(self, x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
        return self._product("dense many", x, weight, gated)

    def int4_fewest(self, x: Tensor, matrix: Int4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("int4 integers", x, int4_elements(matrix, x.dtype), gated, split)

    def int4(self, x: Tensor, matrix: Int4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("int4", x, int4_elements(matrix, x.dtype), gated, split)

    def int4_many(self, x: Tensor, matrix: Int4Tiles, *, shared: SharedBuffers, **fused: bool) -> Tensor:
        assert isinstance(shared, SharedBuffers)
        return self._product("int4 many", x, int4_elements(matrix, x.dtype), **fused)

    def fp8(self, x: Tensor, matrix: Fp8Pairs, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("fp8", x, fp8_elements(matrix, x.dtype), gated, split)

    def int8_fewest(self, x: Tensor, matrix: Int8Pairs, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("int8 integers", x, int8_elements(matrix, x.dtype), gated, split)

    def int8(self, x: Tensor, matrix: Int8Pairs, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("int8", x, int8_elements(matrix, x.dtype), gated, split)

    def _product(self, name: str, x: Tensor, weight: Tensor, gated: bool = False, split: bool = False) -> Tensor:
        self.given.append((name, gated, split))
        product = torch.nn.functional.linear(x, weight)
        if split:
            half = x.shape[1] // 2
            parts = ((x[:, span], weight[:, span]) for span in (slice(half), slice(half, None)))
            return torch.stack([torch.nn.functional.linear(some.float(), w.float()) for some, w in parts])
        return PlainElementwise().gated_gelu(product) if gated else product


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Hopper's kernels note their calls; Triton's multiply as their references."""
    kernels = Recorded()
    for name, double in (("dense_rows", kernels.dense), ("int4_rows", kernels.int4), ("fp8_rows", kernels.fp8)):
        monkeypatch.setattr(linear_rows_sm90, name, double)
    monkeypatch.setattr(linear_rows_sm90, "int8_rows", kernels.int8)
    monkeypatch.setattr(integer_rows_sm90, "integer_rows", kernels.int4_fewest)
    monkeypatch.setattr(integer_rows_sm90, "int8_integer_rows", kernels.int8_fewest)
    monkeypatch.setattr(linear_int4_sm90, "int4_product", kernels.int4_many)
    monkeypatch.setattr(cluster_rows_sm90, "cluster_rows", kernels.dense_many)
    for module, names, reference in (
        (int4_linear_triton, ("int4_fused_product", "int4_dequantised_product"), PlainInt4()),
        (int8_linear_triton, ("int8_fused_product", "int8_dequantised_product"), PlainInt8()),
        (fp8_linear_triton, ("fp8_unpacked_product",), PlainFp8()),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda x, matrix, reference=reference, **_: reference.linear(x, matrix))
    return kernels


def fp8(scales: str) -> WeightFormat:
    return WeightFormat(stored=StoredType.FP8, scales=scales)


INT8 = WeightFormat(stored=StoredType.INT8, scales="channel")
INT8_GROUPS = WeightFormat(stored=StoredType.INT8, scales="group", group_size=32, scale_type="float32")


def operations(weight_format: WeightFormat | None) -> Operations:
    """Of a Hopper GPU, for this matrix alone."""
    choices = choices_of(Matrix(TextLinear.GATE_UP, 128, 256, weight_format, 90), PRODUCTS)
    return Operations(KernelTable(90, "fast", on_kernels=True, choices=tuple(choices)), CPU)


def loaded(weight_format: WeightFormat | None) -> StoredMatrix:
    """[128, 256] of random elements, as a GPU holds it."""
    placement = Placement(CPU, BF16, weight_format=weight_format, operations=operations(weight_format))
    matrix = stored_matrix(TextLinear.GATE_UP, [64, 64], 256, placement)
    with torch.no_grad():
        for name, parameter in matrix.named_parameters():
            if name == "order":
                matrix.group_index = (torch.randperm(256) // 32).int().repeat(2, 1)
            elif parameter.dtype == torch.int32:
                parameter.copy_(torch.randint(-(2**31), 2**31, parameter.shape))
            elif parameter.dtype == torch.int8:
                parameter.copy_(torch.randint(-128, 128, parameter.shape))
            else:
                parameter.copy_((torch.rand(parameter.shape) / 16).to(parameter.dtype))
    matrix.loaded()
    return matrix


ACTIVATION_ORDER = int4(32).model_copy(update={"activation_order": True})


@pytest.mark.parametrize(("weight_format", "given"), [
    (None, "dense"), (int4(32), "int4"), (int4(128), "int4"), (ACTIVATION_ORDER, "int4"), (fp8("channel"), "fp8"),
    (int4(32, symmetric=False), "int4"), (fp8("block"), None), (INT8, "int8"), (INT8_GROUPS, None),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("count", [2, 3])
def test_a_matrix_gives_its_few_rows_to_the_kernel_of_its_format(
    weight_format, given, count, recorded: Recorded
) -> None:
    matrix, elementwise = loaded(weight_format), PlainElementwise()
    few, many = rows(count), rows(31)

    def multiplied(x: Tensor) -> list[Tensor]:
        parts = matrix.in_parts(x)
        return [matrix.linear(x), matrix.gated(x, elementwise), parts.sum(0) if parts.dim() == 3 else parts]

    by_kernel = multiplied(few)
    wanted = [(False, True), (False, False), (True, False)]
    few_given = f"{given} integers" if given in ("int4", "int8") and count <= INTEGER_ROWS[-1] else given
    assert recorded.given == ([] if given is None else [(few_given, *each) for each in wanted])
    recorded.given.clear()
    elsewhere = multiplied(torch.cat((few, many)))
    # Of many rows in bfloat16 no product is left in parts.
    many_wanted = [(gated, split and given == "int4") for gated, split in wanted]
    assert recorded.given == ([(f"{given} many", *each) for each in many_wanted] if given in ("int4", "dense") else [])
    for alone, among in zip(by_kernel, elsewhere, strict=True):
        torch.testing.assert_close(alone.bfloat16(), among[:count].bfloat16(), rtol=2e-2, atol=2e-2)
    assert matrix.linear(few[:0]).shape == (0, 128)
    assert matrix.gated(few[:0], elementwise).shape == (0, 64)
