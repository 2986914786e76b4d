"""Two workers behind a gateway: a session that is led back to its worker finds there what it has said so far."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localcluster.binaries import install_packages
from localcluster.settings import ClusterError

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, list[tuple[int, int]]]]:
    """(prompt tokens, cached tokens) of every turn, by session, by the way in which the gateway chooses."""
    if shutil.which("haproxy") is None and shutil.which("haproxy", path="/usr/sbin") is None:
        try:
            install_packages({"haproxy": "haproxy"}, print)
        except ClusterError as error:
            pytest.skip(f"HAProxy is not here and cannot be installed: {error}")
    done = subprocess.run(
        [sys.executable, str(BENCH), "gateway_sessions", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, list[tuple[int, int]]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("way", ["cookie", "header"])
def test_every_turn_of_a_session_finds_the_turns_before(
    way: str, measured: dict[str, dict[str, list[tuple[int, int]]]]
) -> None:
    for turns in measured[way].values():
        assert turns[0][1] == 0
        for (before, _), (prompt, cached) in itertools.pairwise(turns):
            assert before <= cached < prompt, turns


def test_without_persistence_a_turn_finds_no_more_than_the_one_before_the_last(
    measured: dict[str, dict[str, list[tuple[int, int]]]],
) -> None:
    for turns in measured["none"].values():
        assert turns[1][1] < turns[0][0], "the second is the first of its session there"
        for (before, _), (_, cached) in itertools.pairwise(turns[1:]):
            assert cached < before, turns
