"""A third of what is drawn runs, another third each time, and the same one in all processes of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_length import left_out, third

RUNNING = Path(__file__).resolve().parent


def _items(test: str, parameters: int, *, drawn: bool = True) -> list[Any]:
    return [
        _Item(f"tests/test_a.py::{test}[{number}]", drawn=drawn) for number in range(parameters)
    ]  # fmt: skip


class _Item(SimpleNamespace):
    def __init__(self, nodeid: str, *, drawn: bool, **params: object) -> None:
        super().__init__(
            nodeid=nodeid,
            callspec=SimpleNamespace(params=params),
            get_closest_marker=lambda name: (name == "drawn" and drawn) or None,
        )

    __hash__ = object.__hash__


def _run(items: Sequence[Any], seed: str) -> list[str]:
    left = left_out(items, seed)
    return [item.nodeid for item in items if item not in left]


def test_a_third_of_each_drawn_test_runs_and_all_of_the_others() -> None:
    items = [*_items("test_many", 16), *_items("test_few", 2), *_items("test_one", 1), *_items("all", 9, drawn=False)]
    ran = _run(items, "1")
    assert [sum(f"::{test}[" in each for each in ran) for test in ("test_many", "test_few", "test_one", "all")] == [
        6, 1, 1, 9,
    ]  # fmt: skip
    assert [third(count) for count in (1, 2, 3, 4, 16)] == [1, 1, 1, 2, 6]


def test_processes_of_a_run_find_the_same_tests_and_every_one_runs_now_and_then() -> None:
    items = _items("test_many", 16)
    assert _run(items, "7") == _run(_items("test_many", 16), "7")
    assert {each for seed in range(40) for each in _run(items, str(seed))} == {item.nodeid for item in items}


@pytest.mark.parametrize("seed", range(20))
def test_each_value_that_several_have_runs_and_one_of_a_single_case_is_left_to_chance(seed: int) -> None:
    items = [
        _Item(f"tests/test_a.py::test[{kind}-{form}]", drawn=True, kind=kind, form=form, size=4 * kind + form)
        for kind in range(4)
        for form in range(4)
    ]
    left = left_out(items, str(seed))
    ran = [item.callspec.params for item in items if item not in left]
    assert 6 <= len(ran) <= 8
    assert {each["kind"] for each in ran} == {each["form"] for each in ran} == {0, 1, 2, 3}


CONFTEST = "from run_length import draw\ndef pytest_collection_modifyitems(config, items): draw(config, items)\n"
MARKED = """
import pytest
@pytest.mark.drawn
@pytest.mark.parametrize("number", range(9))
def test_it(number): pass
"""


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        ((), 9),
        (("--hypothesis-profile=long",), 9),
        (("--hypothesis-profile=short",), 3),
        (("--hypothesis-profile=short", "-n", "2"), 3),
    ],
    ids=["by itself", "long", "short", "short in two processes"],
)
def test_what_make_starts_alone_leaves_two_thirds_out(options: tuple[str, ...], ran: int, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = drawn\n")
    profiles = "".join(
        f"hypothesis.settings.register_profile('{name}', max_examples=9)\n" for name in ("short", "long")
    )
    (tmp_path / "conftest.py").write_text(f"import hypothesis\n{profiles}{CONFTEST}")
    (tmp_path / "test_nine.py").write_text(MARKED)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(RUNNING)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ran} passed" in done.stdout
