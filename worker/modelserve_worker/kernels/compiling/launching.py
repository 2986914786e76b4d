"""Switches launches off for whoever notes them, to compile kernels ahead without a GPU (`kernel_trace`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_noting: list[Callable[[Any], None]] = []  # at most one


@contextmanager
def noted_by(note: Callable[[Any], None]) -> Iterator[None]:
    """For the whole process: no kernel is launched, and `note` hears of every source in CUDA C++ that would be."""
    assert not _noting, "somebody notes launches already"
    _noting.append(note)
    try:
        yield
    finally:
        _noting.clear()


def noting() -> Callable[[Any], None] | None:
    """Who hears of launches in the place of the GPU; None: kernels are launched."""
    return _noting[0] if _noting else None
