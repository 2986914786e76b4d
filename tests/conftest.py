"""Kernels run in Triton's interpreter where there is no GPU; it must be chosen before any kernel module is imported.

No example of Hypothesis is held to a time: a busy machine is no fault. A property gets 100 examples, and 300 by
`--hypothesis-profile=long`, unless it says itself that it can afford fewer. By `--hypothesis-profile=short`, as make
says, tests that are marked `drawn` run a third of their parameters. Reports have the CPU seconds of each test.
"""

import os

import hypothesis
import pytest

# Read when torch is loaded, here and by programs that tests start. Tests run side by side on every core: threads that
# wait for each other there take three times the CPU, and longer. A test of what threads share says how many it wants.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from cpu_of_tests import pytest_runtest_setup, pytest_runtest_teardown  # noqa: F401
from run_length import draw

hypothesis.settings.register_profile(
    "short", deadline=None, max_examples=100, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("long", hypothesis.settings.get_profile("short"), max_examples=300)
hypothesis.settings.load_profile("short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The slowest begin first, so that no process is still at one of them when nothing is left for the others."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    draw(config, items)


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1":
        import quick_interpreter

        quick_interpreter.install()
