"""Requests that arrive at random, as many as are in time: the load driver's own arrivals, over expected steps.

docs/expected-speed.md has the table and the commands, which this holds: each rate's seed is its place in its command.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from replay import Arrival, Replay
from test_objectives import planned

from modelserve_tools.bench.workload import arrivals

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "expected-speed.md").read_text()
SECTION = DOCUMENT[DOCUMENT.index("\n## Goodput\n") :].partition("\n## Chats")[0]
COMMANDS = dict(
    re.findall(r"^    python tests/bench serve_and_bench --variant (\S+) (--poisson .*)$", SECTION, re.MULTILINE)
)
# model | a second | requests | in time | TTFT kept | TPOT kept | TTFT mean / p99 | TPOT
ROW = re.compile(
    r"^\| (31B|26B-A4B|E4B) \| ([\d.]+) \| (\d+) \| (\d+) % \| (\d+) % \| (\d+) % "
    r"\| ([\d,]+) / ([\d,]+) \| ([\d.]+) \|$",
    re.MULTILINE,
)
ROWS = [tuple(each.replace(",", "") for each in row) for row in ROW.findall(SECTION)]
FIRST_SEED, PROMPT, ANSWER, TTFT_S, TPOT_S = 50, 2048, 256, 2.0, 0.05


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_who_is_in_time_is_what_the_table_says(row: tuple[str, ...]) -> None:
    variant, rate, number, *written = row
    point = f"--poisson {PROMPT}/{ANSWER}/{rate}/{number}"
    points = re.findall(r"--poisson \S+", COMMANDS[variant])
    engine = planned(variant, "Throughput")
    assert engine.max_num_mixed_tokens is not None
    replay = Replay(variant, max_num_mixed_tokens=engine.max_num_mixed_tokens, max_num_seqs=engine.max_num_seqs)
    times = arrivals(float(rate), seed=FIRST_SEED + points.index(point))
    replay.serve([Arrival(next(times), str(index), PROMPT, ANSWER) for index in range(int(number))])
    first = np.array([replay.tokens[name][0] - sent for name, sent in replay.sent.items()])
    token = np.array([(each[-1] - each[0]) / (ANSWER - 1) for each in (replay.tokens[name] for name in replay.sent)])
    shares = [np.mean(kept) for kept in ((first <= TTFT_S) & (token <= TPOT_S), first <= TTFT_S, token <= TPOT_S)]
    found = [100 * float(share) for share in shares]
    assert found == pytest.approx([float(each) for each in written[:3]], abs=1)
    figures = [1e3 * float(each) for each in (first.mean(), np.percentile(first, 99), token.mean())]
    assert figures == pytest.approx([float(each) for each in written[3:]], rel=0.01, abs=0.5)


def test_every_model_has_a_rate_that_all_keep_and_one_that_is_too_much() -> None:
    assert len(ROWS) == 10
    for variant in COMMANDS:
        shares = [int(row[3]) for row in ROWS if row[0] == variant]
        assert shares[0] == 100 > shares[-1]
