"""Which products the kernel for few rows is given, and that it is given what it asks for. Its results need a GPU."""

from __future__ import annotations

import pytest
import torch
from plain_products import PlainFp8, PlainInt4
from torch import Tensor

from modelserve.weight_format import StoredType, TextLinear, WeightFormat, int4
from modelserve_worker.kernels import few_rows, fp8_linear, int4_linear, linear_rows_sm90
from modelserve_worker.kernels.elementwise import PlainElementwise
from modelserve_worker.kernels.few_rows import dense_product, few_rows_door
from modelserve_worker.kernels.fp8_linear import Fp8Pairs
from modelserve_worker.kernels.int4_linear import Int4Tiles
from modelserve_worker.layers import stored_matrix
from modelserve_worker.layers.stored_matrix import StoredMatrix

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def rows(count: int, inputs: int = 256, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(count, inputs, dtype=dtype)


def test_the_kernel_takes_few_rows_that_the_copy_engine_can_read() -> None:
    takes = linear_rows_sm90.takes
    assert all(takes(rows(count)) for count in (1, 8, 9, 32))
    assert not takes(rows(0))
    assert not takes(rows(33))
    assert not takes(rows(4, inputs=96)), "inputs are blocks of 64"
    assert not takes(rows(4, dtype=torch.float32))
    assert not takes(rows(4, inputs=260)[:, :256].t().contiguous().t()), "inputs of a row lie beside one another"
    assert not takes(rows(4, inputs=257)[:, 1:]), "rows begin at multiples of 16 bytes"
    assert takes(rows(4, inputs=512)[:, 256:]), "a part of a wider matrix"


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


def test_other_devices_multiply_as_pytorch_does() -> None:
    x, weight = rows(3), rows(64)
    assert few_rows_door(CPU) is None
    assert torch.equal(dense_product(x, weight), torch.nn.functional.linear(x, weight))


class Recorded:
    """A device whose kernel takes up to four rows; it multiplies in plain PyTorch, and says what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, bool, bool]] = []

    def takes(self, x: Tensor) -> bool:
        return x.shape[0] <= 4

    def takes_int4(self, x: Tensor) -> bool:
        return self.takes(x)

    def _product(self, name: str, x: Tensor, weight: Tensor, gated: bool, split: bool) -> Tensor:
        self.given.append((name, gated, split))
        product = torch.nn.functional.linear(x, weight)
        if split:
            half = x.shape[1] // 2
            parts = ((x[:, span], weight[:, span]) for span in (slice(half), slice(half, None)))
            return torch.stack([torch.nn.functional.linear(some.float(), w.float()) for some, w in parts])
        return PlainElementwise().gated_gelu(product) if gated else product

    def dense(self, x: Tensor, weight: Tensor, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("dense", x, weight, gated, split)

    def int4(self, x: Tensor, matrix: Int4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("int4", x, int4_linear.dequantised(matrix, x.dtype), gated, split)

    def fp8(self, x: Tensor, matrix: Fp8Pairs, *, gated: bool = False, split: bool = False) -> Tensor:
        return self._product("fp8", x, fp8_linear.dequantised(matrix, x.dtype), gated, split)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    door = Recorded()
    for module in (few_rows, stored_matrix):
        monkeypatch.setattr(module, "few_rows_door", lambda _: door)
    monkeypatch.setattr(stored_matrix, "int4_door", lambda _: PlainInt4())
    monkeypatch.setattr(stored_matrix, "fp8_door", lambda _: PlainFp8())
    return door


def fp8(scales: str) -> WeightFormat:
    return WeightFormat(stored=StoredType.FP8, scales=scales)


def loaded(weight_format: WeightFormat | None) -> StoredMatrix:
    """[128, 256] of random elements, as a GPU holds it."""
    matrix = stored_matrix.stored_matrix(
        TextLinear.GATE_UP, [64, 64], 256, weight_format=weight_format, device=CPU, dtype=BF16
    )
    with torch.no_grad():
        for name, parameter in matrix.named_parameters():
            if name == "order":
                matrix.group_index = (torch.randperm(256) // 32).int().repeat(2, 1)
            elif parameter.dtype == torch.int32:
                parameter.copy_(torch.randint(-(2**31), 2**31, parameter.shape))
            else:
                parameter.copy_((torch.rand(parameter.shape) / 16).to(parameter.dtype))
    matrix.loaded()
    return matrix


ACTIVATION_ORDER = int4(32).model_copy(update={"activation_order": True})


@pytest.mark.parametrize(("weight_format", "given"), [
    (None, "dense"), (int4(32), "int4"), (int4(128), "int4"), (ACTIVATION_ORDER, "int4"), (fp8("channel"), "fp8"),
    (int4(32, symmetric=False), None), (fp8("block"), None),
], ids=str)  # fmt: skip
def test_a_matrix_gives_its_few_rows_to_the_kernel_of_its_format(weight_format, given, recorded: Recorded) -> None:
    matrix, doors = loaded(weight_format), PlainElementwise()
    few, many = rows(2), rows(5)
    parts = matrix.in_parts(few)
    by_kernel = [matrix.linear(few), matrix.gated(few, doors), parts.sum(0) if parts.dim() == 3 else parts]
    wanted = [(given, False, True), (given, False, False), (given, True, False)]
    assert recorded.given == ([] if given is None else wanted)
    more = torch.cat((few, many))
    elsewhere = [matrix.linear(more), matrix.gated(more, doors), matrix.in_parts(more)]
    assert len(recorded.given) == (0 if given is None else 3), "more rows go elsewhere"
    for alone, among in zip(by_kernel, elsewhere, strict=True):
        torch.testing.assert_close(alone.bfloat16(), among[:2], rtol=2e-2, atol=2e-2)
