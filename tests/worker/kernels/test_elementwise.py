"""Each elementwise kernel says what its plain reference says, and the reference says what float64 says."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modelserve_worker.kernels.adapters.terms import RowTerm, SlotFactors
from modelserve_worker.kernels.elementwise.elementwise import ElementwiseBackend, ExactElementwise, PlainElementwise
from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise

pytestmark = pytest.mark.drawn

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float32]
ROWS = [1, 3, 17]
WIDTHS = [112, 128, 1536, 2816, 5376]

Result = Tensor | tuple[Tensor, Tensor | None]
Call = Callable[[ElementwiseBackend], Result]


class Numbers:
    """Fresh random inputs of one test; a failure names the seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.seed = secrets.randbits(32)
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(self.seed)

    def activations(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Rows of very different sizes, as residual streams have them."""
        size = scale * 10 ** (2 * torch.rand((*shape[:-1], 1), generator=self._generator) - 1)
        return (torch.randn(shape, generator=self._generator) * size).to(self.device, self.dtype)

    def weight(self, size: int) -> Tensor:
        return (1.0 + 0.3 * torch.randn(size, generator=self._generator)).to(self.device, self.dtype)

    def ids(self, low: int, high: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (count,), generator=self._generator).to(self.device, dtype)


@pytest.fixture(params=DTYPES, ids=["bf16", "f32"])
def numbers(request: pytest.FixtureRequest, device: torch.device) -> Numbers:
    return Numbers(device, request.param)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance to the next number of `dtype`, for values of float64; that of the smallest normal number near zero."""
    size = values.abs().clamp_min(torch.finfo(dtype).tiny)
    return torch.finfo(dtype).eps * 2.0 ** size.log2().floor()


def assert_near(actual: Tensor, expected: Tensor, *, steps: float, scale: Tensor | float, seed: int) -> None:
    """Within `steps` roundings of the dtype of `actual`, at the larger of the values and of the terms they sum."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    wide = expected.double()
    larger = torch.maximum(wide.abs(), torch.as_tensor(scale, device=wide.device, dtype=torch.float64).expand_as(wide))
    excess = (actual.double() - wide).abs() / (steps * ulp(larger, actual.dtype))
    assert excess.max() <= 1.0, f"seed {seed}: {float(excess.max()) * steps:.2f} roundings apart"


def check(
    numbers: Numbers, call: Call, exact: Callable[[], tuple[Tensor, ...]], *, terms: tuple[Tensor, ...] | None = None
) -> None:
    """Kernel against reference, reference against float64. `terms`: for each result the size of what cancels in it.

    Where a number lies at the edge between two bfloat16 numbers, kernel and reference may round it apart, and what is
    made of it is rounded once more: two roundings, and rarely any. float32 has more room: its sums of squares,
    exponentials and products are themselves rounded to it.
    """
    plain, kernel, truths = results(call(PlainElementwise())), results(call(TritonElementwise())), exact()
    slack = 1.0 if numbers.dtype == torch.bfloat16 else 8.0
    for ours, reference, truth, size in zip(kernel, plain, truths, terms or map(torch.zeros_like, truths), strict=True):
        assert ours.dtype == reference.dtype
        assert_near(ours, reference, steps=2.01 * slack, scale=size, seed=numbers.seed)
        assert_near(reference, truth, steps=2.51 * slack, scale=size, seed=numbers.seed)
        if numbers.dtype == torch.bfloat16:
            different = (ours != reference) & (truth.abs() >= size / 2)
            assert different.sum() <= 1 + 0.01 * different.numel(), "more than chance at rounding boundaries"


def results(result: Result) -> list[Tensor]:
    return [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_gated(gate: Tensor, factor: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate.double(), approximate="tanh") * factor.double()


def shut_gates(gate: Tensor, factor: Tensor) -> tuple[Tensor]:
    """gelu's 1 + tanh(u) cancels far below zero, in float32 whatever the dtype."""
    return ((gate.double() * factor.double()).abs() * (2.0**-8 if gate.dtype == torch.bfloat16 else 1.0),)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(rows: int, width: int, numbers: Numbers) -> None:
    x, weight = numbers.activations(rows, width), numbers.weight(width)
    check(numbers, lambda backend: backend.rms_norm(x, weight, eps=EPS), lambda: (exact_norm(x, weight),))


def test_rms_norm_of_heads_that_lie_apart(numbers: Numbers) -> None:
    x, weight = numbers.activations(3, 1000)[:, 40:808].unflatten(-1, (3, 256)), numbers.weight(256)
    check(numbers, lambda backend: backend.rms_norm(x, weight, eps=EPS), lambda: (exact_norm(x, weight),))


@pytest.mark.parametrize("ends", ["scalar and norm", "norm", "scalar", "neither"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_residual_norm(rows: int, width: int, ends: str, numbers: Numbers) -> None:
    residual, delta = numbers.activations(rows, width), numbers.activations(rows, width, scale=30.0)
    delta_weight = numbers.weight(width)
    scalar = numbers.weight(1) if "scalar" in ends else None
    next_weight = numbers.weight(width) if "norm" in ends else None

    def call(backend: ElementwiseBackend) -> Result:
        return backend.residual_norm(
            residual.clone(), delta, delta_weight, scalar=scalar, next_weight=next_weight, eps=EPS
        )

    def exact() -> tuple[Tensor, ...]:
        """The second norm is that of the rounded sum, which the reference and the kernel must round alike."""
        summed = residual.double() + exact_norm(delta, delta_weight)
        summed = summed if scalar is None else summed * scalar.double()
        if next_weight is None:
            return (summed,)
        return summed, exact_norm(results(call(PlainElementwise()))[0], next_weight)

    size = residual.double().abs() + exact_norm(delta, delta_weight).abs()
    if next_weight is None:
        check(numbers, call, exact, terms=(size,))
    else:
        root = exact()[0].square().mean(-1, keepdim=True).sqrt()
        check(numbers, call, exact, terms=(size, size / root * next_weight.double().abs()))


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_a_delta_in_parts_is_their_sum_rounded_once(parts: int, rows: int, numbers: Numbers) -> None:
    """In the order of the parts, so that the sum has the same bits as what is told of it here."""
    residual, weight = numbers.activations(rows, 112), numbers.weight(112)
    delta = torch.stack([numbers.activations(rows, 112, scale=30.0).float() for _ in range(parts)])
    total = delta[0]
    for part in delta[1:]:
        total = total + part
    for backend in (TritonElementwise(), PlainElementwise()):
        whole, apart = (
            results(backend.residual_norm(residual.clone(), each, weight, scalar=None, next_weight=weight, eps=EPS))
            for each in (total.to(numbers.dtype), delta)
        )
        assert all(torch.equal(*pair) for pair in zip(whole, apart, strict=True))


def a_term(numbers: Numbers, rows: int, parts: tuple[int, ...], rank: int = 6, scale: float = 3.0) -> RowTerm:
    """Of rows of two adapters, and every third without; A x in 3 pieces."""
    sums = numbers.activations(3, rows, len(parts) * rank, scale=scale).float()
    b = numbers.activations(2, sum(parts), rank)
    scales = numbers.activations(2, len(parts)).float()
    slots = torch.tensor([row % 3 - 1 for row in range(1, rows + 1)], dtype=torch.int32, device=numbers.device)
    return RowTerm(sums, SlotFactors(b[..., :1], b, scales, parts), slots)


def nearly(found: Tensor, expected: Tensor, numbers: Numbers) -> None:
    """The term is summed in another order: a sum on the border of two numbers may be rounded to the other."""
    unit = torch.finfo(numbers.dtype).eps
    largest = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= 4 * unit * largest
    assert numbers.dtype is torch.float32 or float((found != expected).double().mean()) < 0.02


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("width", [704, 2560])
def test_a_term_is_added_before_the_delta_is_rounded(parts: int, width: int, numbers: Numbers) -> None:
    residual, weight, rows = numbers.activations(4, width), numbers.weight(width), 4
    delta = numbers.activations(*((parts, rows, width) if parts else (rows, width)), scale=30.0)
    delta = delta.float() if parts else delta
    term = a_term(numbers, rows, (width,))
    whole = ((delta.sum(0) if parts else delta.float()) + term.dense()).to(numbers.dtype)
    options = {"scalar": None, "next_weight": weight, "eps": EPS}
    for backend in (TritonElementwise(), PlainElementwise()):
        expected = results(backend.residual_norm(residual.clone(), whole, weight, **options))
        found = results(backend.residual_norm(residual.clone(), delta, weight, **options, term=term))
        for pair in zip(found, expected, strict=True):
            nearly(*pair, numbers)


@pytest.mark.parametrize("backend", [TritonElementwise(), PlainElementwise(), ExactElementwise()])
def test_terms_are_added_before_gelu(backend: ElementwiseBackend, numbers: Numbers) -> None:
    gate_up, term = numbers.activations(3, 2 * 704, scale=3.0), a_term(numbers, 3, (704, 704))
    total = (gate_up.float() + term.dense()).to(numbers.dtype)
    nearly(backend.gated_gelu(gate_up, term), backend.gated_gelu(total), numbers)
    gate, gate_term = gate_up[:, :256].contiguous(), a_term(numbers, 3, (256,))
    per_layer = numbers.activations(3, 5, 256)[:, 3]
    summed = (gate.float() + gate_term.dense()).to(numbers.dtype)
    nearly(backend.per_layer_gate(gate, per_layer, gate_term), backend.per_layer_gate(summed, per_layer), numbers)


def test_a_row_does_not_depend_on_the_rows_beside_it(numbers: Numbers) -> None:
    residual, delta, weight = numbers.activations(5, 112), numbers.activations(5, 112), numbers.weight(112)

    def run(rows: slice) -> list[Tensor]:
        return results(
            TritonElementwise().residual_norm(
                residual[rows].clone(), delta[rows], weight, scalar=None, next_weight=weight, eps=EPS
            )
        )

    for whole, alone in zip(run(slice(0, 5)), run(slice(4, 5)), strict=True):
        assert torch.equal(whole[4:], alone)


@pytest.mark.parametrize("width", [96, 704, 2112, 10240])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_gelu(rows: int, width: int, numbers: Numbers) -> None:
    gate_up = numbers.activations(rows, 2 * width, scale=3.0)
    check(
        numbers,
        lambda backend: backend.gated_gelu(gate_up),
        lambda: (exact_gated(gate_up[:, :width], gate_up[:, width:]),),
        terms=shut_gates(gate_up[:, :width], gate_up[:, width:]),
    )


def test_far_from_zero_a_gate_is_open_or_shut(numbers: Numbers) -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4] + [2.0] * 5], device=numbers.device, dtype=numbers.dtype)
    gated = TritonElementwise().gated_gelu(gate_up)
    assert gated[0].tolist() == [0.0, 0.0, 0.0, 180.0, float(2 * gate_up[0, 4])]


@pytest.mark.parametrize("rows", ROWS)
def test_per_layer_gate_reads_rows_that_lie_apart(rows: int, numbers: Numbers) -> None:
    gate, inputs = numbers.activations(rows, 256), numbers.activations(rows, 5, 256)
    check(
        numbers,
        lambda backend: backend.per_layer_gate(gate, inputs[:, 3]),
        lambda: (exact_gated(gate, inputs[:, 3]),),
        terms=shut_gates(gate, inputs[:, 3]),
    )


@pytest.mark.parametrize(("layers", "width"), [(35, 256), (7, 8), (5, 48)])
@pytest.mark.parametrize("rows", ROWS)
def test_per_layer_inputs(rows: int, layers: int, width: int, numbers: Numbers) -> None:
    projected, looked_up = numbers.activations(rows, layers * width), numbers.activations(rows, layers * width)
    weight, scale, shape = numbers.weight(width), 1536**-0.5, (rows, layers, width)
    # Scaled and rounded as the model has it: the norm would magnify the difference.
    context = exact_norm((projected * scale).view(shape), weight)
    added = looked_up.view(shape).double()
    check(
        numbers,
        lambda backend: backend.per_layer_inputs(projected, looked_up, weight, projection_scale=scale, eps=EPS),
        lambda: ((context + added) * 0.5**0.5,),
        terms=(context.abs() + added.abs(),),
    )


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [112, 1536, 2560])
@pytest.mark.parametrize("rows", ROWS)
def test_embed(rows: int, width: int, ids_dtype: torch.dtype, numbers: Numbers) -> None:
    table, scale = numbers.activations(40, width), float(torch.tensor(width**0.5).to(numbers.dtype))
    ids = numbers.ids(0, 40, rows, ids_dtype)
    check(
        numbers,
        lambda backend: backend.embed(ids, table, scale=scale),
        lambda: (table[ids.long()].double() * scale,),
    )


@pytest.mark.parametrize("backend", [PlainElementwise(), TritonElementwise()], ids=["plain", "triton"])
def test_ids_outside_the_table_give_zeros_and_their_neighbours_are_unhurt(
    backend: ElementwiseBackend, numbers: Numbers
) -> None:
    table = numbers.activations(40, 112)
    ids = torch.tensor([3, -1, 39, 40, 2**31 - 1], device=numbers.device, dtype=torch.int32)
    rows = backend.embed(ids, table, scale=2.0)
    assert torch.equal(rows[[0, 2]], table[[3, 39]] * 2)
    assert (rows[[1, 3, 4]] == 0).all()


def test_nan_stays_in_its_row(numbers: Numbers) -> None:
    """A request whose activations broke must be seen as broken, and must not touch the others of its step."""
    x, weight = numbers.activations(3, 112), numbers.weight(112)
    x[1, 5] = torch.nan
    broken = TritonElementwise()
    summed, normed = broken.residual_norm(x.clone(), x, weight, scalar=None, next_weight=weight, eps=EPS)
    assert normed is not None
    for rows in (summed, normed, broken.rms_norm(x, weight, eps=EPS)):
        assert rows[1].isnan().all()
        assert rows[[0, 2]].isfinite().all()
