"""Hooks of pytest: a report has the CPU seconds of each test as its property `cpu`."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

_BEFORE = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Of this process, and of those that it has started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[_BEFORE] = cpu_seconds()
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Set-up and clean-up are the test's, too."""
    yield
    item.user_properties.append(("cpu", f"{cpu_seconds() - item.stash[_BEFORE]:.2f}"))
