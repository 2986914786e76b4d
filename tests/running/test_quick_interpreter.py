"""What kernels' tests do to Triton's interpreter changes no result, and leaves Triton as it was behind a launch."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled")


@triton.jit
def _scaled(x, factor):
    return tl.where(x > 0, x * factor, x) - tl.max(x, axis=0)[None, :]


@triton.jit
def _rows(source, target, width, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = rows[:, None] * width + columns[None, :]
    inside = columns[None, :] < width
    x = tl.load(source + places, mask=inside, other=-1.0)
    for step in tl.range(0, 2):
        x = _scaled(x, 2.0 + step)
    tl.store(target + places, x.to(tl.bfloat16), mask=inside)


@triton.jit
def _broken(target):
    tl.store(target, tl.arange(0, 3))


def launch(source: torch.Tensor, width: int) -> torch.Tensor:
    target = torch.full_like(source, 7.0, dtype=torch.bfloat16)
    _rows[(1,)](source, target, width, WIDTH=16, ROWS=4)
    return target


def language() -> list[object]:
    return [vars(of)[name] for of, name in (
        (core.tensor, "__add__"), (core.tensor, "__index__"), (core.tensor, "to"), (core.dtype, "to_ir"),
        (tl, "range"), (tl, "load"), (tl, "reduce"), (core, "reduce"), (tl.math, "exp2"),
    ) if name in vars(of)]  # fmt: skip


def test_a_launch_computes_what_its_functions_say() -> None:
    source = torch.randn(4, 13, generator=torch.Generator().manual_seed(1))
    padded = torch.full((4, 16), -1.0)
    padded[:, :13] = source
    for factor in (2.0, 3.0):
        padded = torch.where(padded > 0, padded * factor, padded) - padded.max(dim=0).values
    torch.testing.assert_close(launch(source, 13), padded[:, :13].bfloat16())


def test_triton_is_as_before_behind_a_launch_and_behind_one_that_fails() -> None:
    before = language()
    launch(torch.zeros(4, 13), 13)
    assert language() == before
    with pytest.raises(Exception, match="power of"):
        _broken[(1,)](torch.zeros(3, dtype=torch.int32))
    assert language() == before
    launch(torch.zeros(4, 13), 13)
