"""Chats beside prompts of 126,000 tokens, one after the other for a minute: who waits for whom on an H200, as expected.

docs/expected-speed.md has the table, which was not measured; what each step takes was (test_expected_load.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from replay import Arrival, Replay

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "expected-speed.md").read_text()
# model, rows of mixed steps | chats a second | TTFT of chats p50 / p99 | ITL of chats p99 | TTFT of long prompts, ms
ROW = re.compile(r"^\| (31B|E4B), ([\d,]+) \| ([\d.]+) \| (\d+) / (\d+) \| (\d+) \| ([\d,]+) \|$", re.MULTILINE)
ROWS = ROW.findall(DOCUMENT)
LONG, CHAT, ANSWER, SECONDS = 126_000, 200, 150, 60.0


def _beside_long_prompts(variant: str, mixed: int, rate: float) -> list[float]:
    """In ms: median and 99th percentile of the chats' TTFT, that of their ITL, mean TTFT of the long prompts."""
    replay, random = Replay(variant, max_num_mixed_tokens=mixed), np.random.default_rng(0)
    times = np.cumsum(random.exponential(1 / rate, int(2 * SECONDS * rate) + 9))
    chats = [Arrival(at, f"chat {i}", CHAT, ANSWER) for i, at in enumerate(times.tolist()) if at < SECONDS]

    longs = ["long 0"]

    def next_long(now: float) -> Arrival | None:
        if now >= SECONDS or not replay.tokens[longs[-1]]:
            return None
        longs.append(f"long {len(longs)}")
        return Arrival(now, longs[-1], LONG, 1)

    replay.serve([*chats, Arrival(0.0, longs[0], LONG, 1)], then=next_long)
    first = {name: replay.tokens[name][0] - sent for name, sent in replay.sent.items()}
    waits = [wait for name, wait in first.items() if name.startswith("chat")]
    between = np.concatenate([np.diff(t) for n, t in replay.tokens.items() if n.startswith("chat") and t[-1] < SECONDS])
    long = np.mean([first[name] for name in longs])
    return [1e3 * each for each in (np.median(waits), np.percentile(waits, 99), np.percentile(between, 99), long)]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]} {row[2]}" for row in ROWS])
def test_who_waits_for_whom_is_what_the_table_says(row: tuple[str, ...]) -> None:
    variant, mixed, rate, *written = (text.replace(",", "") for text in row)
    found = _beside_long_prompts(variant, int(mixed), float(rate))
    assert found == pytest.approx([float(each) for each in written], rel=0.01, abs=1)


def test_the_table_has_both_models_at_low_and_at_high_load() -> None:
    assert {(row[0], row[2]) for row in ROWS} == {
        (model, rate) for model in ("31B", "E4B") for rate in ("0.3", "1", "4")
    }
