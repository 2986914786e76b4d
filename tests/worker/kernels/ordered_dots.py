"""Matrix products of Triton's interpreter as matrix units add them: each output by itself, from the first input on.

NumPy's own take other ways for the columns at an edge, so that a row's bits depend on its place.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
