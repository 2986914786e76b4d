"""Where kernels run: on the GPU if there is one, else in Triton's interpreter, made to round to bfloat16 as GPUs do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels that run on whatever there is run on the GPU where there is one: `-m gpu` selects them there."""
    if not torch.cuda.is_available():
        return
    for item in items:
        here = isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents
        if here and ("device" in item.fixturenames or hasattr(item.module, "DEVICE")):
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


ROUNDED = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}


@pytest.fixture(scope="session", autouse=True)
def narrow_floats_round_to_nearest_even() -> Iterator[None]:
    """As hardware does. The interpreter cuts float32 off to bfloat16, and loses a carry into the exponent of float8."""
    original = interpreter._convert_float

    def convert(values: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
        if source == tl.float32 and target in ROUNDED:
            number, bits = ROUNDED[target]
            wide = torch.from_numpy(np.ascontiguousarray(values))
            return wide.to(number).view(bits).numpy().reshape(values.shape)
        return original(values, source, target, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture(autouse=True)
def exponentials_overflow_to_infinity() -> Iterator[None]:
    """As on a GPU, without numpy's warning."""
    with np.errstate(over="ignore"):
        yield
