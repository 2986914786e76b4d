"""Expected speed against what an H200 did: the engine's own scheduler, over steps that take what the model expects.

docs/expected-speed.md has the table: each row a load, with what was measured and what comes out here. A constant that
was fitted on a row says so there; every other figure is held out. The closed form that plans use is held against
the same.
"""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from replay import CHUNK, SEQUENCES, Arrival, Replay

from modelserve.planning.speed.expected_speed import Load, load_speed

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "expected-speed.md").read_text()
WITHIN = 0.1
# model, cache, prompt / answer, c, rows of mixed steps, requests | figure | measured | expected | use
ROW = re.compile(
    r"^\| ([\w-]+) (\w+) \| ([\d,]+) / (\d+) \| (\d+) \| ([\d,]+) \| (\d+) \| (TTFT|TPOT|req/s|tok/s)[^|]* "
    r"\| ([\d.,]+) \| ([\d.,]+) \| [-+\d.]+ % \| (fitted|held out) \|$",
    re.MULTILINE,
)
ROWS = ROW.findall(DOCUMENT)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _replayed(replay: Replay, *, prompt: int, answer: int, open_: int, requests: int) -> dict[str, float]:
    """Mean TTFT and TPOT in ms, requests and tokens per second, of a closed loop that begins with all its streams."""
    names = count()

    def another(now: float) -> Arrival | None:
        number = next(names)
        return Arrival(now, str(number), prompt, answer) if number < requests else None

    replay.serve([arrival for _ in range(open_) if (arrival := another(0.0))], then=another)
    tokens = replay.tokens
    return {
        "TTFT": 1e3 * np.mean([tokens[name][0] - sent for name, sent in replay.sent.items()]),
        "TPOT": 1e3 * np.mean([(times[-1] - times[0]) / (answer - 1) for times in tokens.values()]),
        "req/s": requests / replay.now,
        "tok/s": requests * answer / replay.now,
    }


LOADS = sorted({row[:7] for row in ROWS})


@pytest.mark.parametrize("load", LOADS, ids=[" ".join(load) for load in LOADS])
def test_what_is_expected_of_a_load_is_what_was_measured(load: tuple[str, ...]) -> None:
    variant, dtype, prompt, answer, open_, mixed, requests = load
    seqs = max(SEQUENCES, int(open_))  # as `serve` plans: at least as many as these loads have open
    replay = Replay(variant, max_num_mixed_tokens=int(_number(mixed)), dtype=dtype, max_num_seqs=seqs)
    found = _replayed(replay, prompt=int(_number(prompt)), answer=int(answer), open_=int(open_), requests=int(requests))
    evenly = load_speed(
        replay.rank,
        Load(int(open_), int(_number(prompt)), int(answer)),
        max_num_batched_tokens=CHUNK,
        max_num_mixed_tokens=int(_number(mixed)),
    )
    planned = {}
    if int(requests) >= 3 * int(open_):  # an even load knows nothing of how one begins and ends
        planned = {"TPOT": evenly.output_token.seconds * 1e3, "req/s": evenly.requests_per_s}
        planned["tok/s"] = evenly.requests_per_s * int(answer)
    if open_ == "1":  # beside others, TTFT hangs on the beginning, too
        planned["TTFT"] = evenly.first_token.seconds * 1e3
    for row in (row for row in ROWS if row[:7] == load):
        figure, measured, written = row[7], _number(row[8]), _number(row[9])
        assert found[figure] == pytest.approx(written, rel=0.005), f"docs/expected-speed.md: {figure}"
        assert found[figure] == pytest.approx(measured, rel=WITHIN), figure
        if figure in planned:
            assert planned[figure] == pytest.approx(measured, rel=WITHIN), f"{figure} in closed form"


def test_figures_are_held_out_at_every_load_of_all_models() -> None:
    held_out = {(row[0], row[4]) for row in ROWS if row[10] == "held out"}
    assert {(model, open_) for model in ("31B", "E4B", "26B-A4B") for open_ in ("1", "8", "32")} <= held_out
    assert {("26B-A4B", "128"), ("E4B", "128"), ("E4B", "256")} <= held_out
    assert sum(row[10] == "fitted" for row in ROWS) <= 4
