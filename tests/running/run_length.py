"""How much of what is drawn by chance runs: a third by `make test`, and all of it by `make test-long`.

A test of which a third is enough in one run says so where it is made: `share` of its examples, or the marker `drawn` of
its parameters. Which of them run is drawn anew each time, but each value that several of them have runs at least once:
formats and kinds have code of their own. pytest started by itself runs all parameters.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import settings

SHARE = 3


def runs_all() -> bool:
    """Whether `make test-long` asks for everything."""
    return settings.get_current_profile_name() == "long"


def share(whole: int) -> int:
    """Of so many examples, or of what all of them find, those of this run."""
    return whole if runs_all() else third(whole)


def share_apart() -> int:
    """How far apart the numbers are of examples that are not drawn: 1 where all of them run."""
    return 1 if runs_all() else SHARE


def third(whole: int) -> int:
    return -(-whole // SHARE)


def left_out(items: Sequence[pytest.Item], seed: str) -> set[pytest.Item]:
    """Of each test that is marked `drawn` two thirds of its parameters. All processes of a run have one `seed`, since
    all have to find the same tests."""
    by_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn"):
            by_test[item.nodeid.partition("[")[0]].append(item)
    return {
        item
        for test, parameters in by_test.items()
        for item in set(parameters) - set(_drawn(parameters, random.Random(f"{seed} {test}")))
    }


def _drawn(items: list[pytest.Item], chance: random.Random) -> list[pytest.Item]:
    """A third of `items`, or more where it takes more to have each value that several of them have."""
    shuffled = chance.sample(items, len(items))
    counts = Counter(value for item in items for value in _values(item))
    wanted = {value for value, count in counts.items() if count > 1}
    found, others = list[pytest.Item](), list[pytest.Item]()
    for item in shuffled:
        new = wanted & _values(item)
        (found if new else others).append(item)
        wanted -= new
    return found + others[: max(0, third(len(items)) - len(found))]


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """Its parameters by name."""
    called = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in called.params.items()} if called else set()


def draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take from `items` what is left out of a run that make starts; all processes of pytest-xdist have one seed."""
    if config.getoption("--hypothesis-profile") != "short":
        return
    left = left_out(items, os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(random.SystemRandom().random()))
    if left:
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
