"""What `objective` moves: settings of a plan, and what the engine's own scheduler makes of them over expected steps.

docs/sizing.md has the table, which this holds.
"""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from replay import Arrival, Replay

from modelserve.api import ModelServeSpec
from modelserve.api.status import EnginePlan
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, plan
from modelserve.published import published_model

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "sizing.md").read_text()
# model | objective | settings | load | TTFT | TPOT | ITL p99 | req/s
ROW = re.compile(
    r"^\| ([\w-]+) \| (Throughput|Latency) \| ([\d,]+) / ([\d,]+) / (\d+) \| ([\d,]+) / (\d+), c=(\d+) "
    r"\| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
    re.MULTILINE,
)
ROWS = [tuple(each.replace(",", "") for each in row) for row in ROW.findall(DOCUMENT)]


def planned(variant: str, objective: str) -> EnginePlan:
    document = {"model": {"uri": f"hf://google/gemma-4-{variant}-it"}, "objective": objective}
    spec = ModelServeSpec.model_validate(document)
    facts = published_model(spec.model.uri)
    assert facts is not None
    found = plan(spec, facts.architecture, [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1)]).engine
    assert found is not None
    return found


def replayed(engine: EnginePlan, variant: str, *, prompt: int, answer: int, open_: int) -> Replay:
    """A closed loop of two requests a stream, all streams at once."""
    assert engine.max_num_mixed_tokens is not None
    replay = Replay(variant, max_num_mixed_tokens=engine.max_num_mixed_tokens, max_num_seqs=engine.max_num_seqs)
    requests, names = 2 * open_, count()

    def another(now: float) -> Arrival | None:
        number = next(names)
        return Arrival(now, str(number), prompt, answer) if number < requests else None

    replay.serve([arrival for _ in range(open_) if (arrival := another(0.0))], then=another)
    return replay


def served(engine: EnginePlan, variant: str, *, prompt: int, answer: int, open_: int) -> tuple[float, ...]:
    """Mean TTFT and TPOT and the 99th percentile of gaps between tokens, in ms, and requests per second."""
    replay = replayed(engine, variant, prompt=prompt, answer=answer, open_=open_)
    times = replay.tokens
    first = np.mean([times[name][0] - sent for name, sent in replay.sent.items()])
    token = np.mean([(each[-1] - each[0]) / (answer - 1) for each in times.values()])
    gap = np.percentile(np.concatenate([np.diff(each) for each in times.values()]), 99)
    return float(1e3 * first), float(1e3 * token), float(1e3 * gap), len(times) / replay.now


@pytest.mark.parametrize("row", ROWS, ids=[" ".join((*row[:2], *row[5:8])) for row in ROWS])
def test_an_objective_moves_what_the_table_says(row: tuple[str, ...]) -> None:
    variant, objective, batched, mixed, seqs, prompt, answer, open_, *written = row
    engine = planned(variant, objective)
    settings = (engine.max_num_batched_tokens, engine.max_num_mixed_tokens, engine.max_num_seqs)
    assert settings == (int(batched), int(mixed), int(seqs))
    found = served(engine, variant, prompt=int(prompt), answer=int(answer), open_=int(open_))
    assert found == pytest.approx([float(each) for each in written], rel=0.01, abs=0.05)


@pytest.mark.parametrize("load", sorted({(row[0], *row[5:8]) for row in ROWS}), ids=" ".join)
def test_latency_shortens_the_gaps_of_whoever_decodes_and_throughput_serves_as_many(load: tuple[str, ...]) -> None:
    both = {row[1]: [float(each) for each in row[8:]] for row in ROWS if (row[0], *row[5:8]) == load}
    assert set(both) == {"Latency", "Throughput"}
    assert both["Latency"][2] < 0.7 * both["Throughput"][2]
    assert both["Latency"][0] > both["Throughput"][0], "who waits for a first token pays for it"
    assert both["Latency"][3] > 0.9 * both["Throughput"][3]


@pytest.mark.parametrize(("objective", "mixed", "expected"), [
    ("Throughput", None, (7.8, 1858)), ("Latency", None, (13.8, 1741)), ("Throughput", 1024, (6.9, 1862)),
])  # fmt: skip
def test_the_last_of_a_crowd_waits_as_long_as_the_page_says(objective, mixed, expected) -> None:
    """128 requests of 512 / 256 at once: 99th percentile of TTFT in s, tokens a second; the page has both."""
    engine = planned("31B", objective)
    engine = engine.model_copy(update={"max_num_mixed_tokens": mixed}) if mixed else engine
    replay = replayed(engine, "31B", prompt=512, answer=256, open_=128)
    last = np.percentile([replay.tokens[name][0] - sent for name, sent in replay.sent.items()], 99)
    assert (round(last, 1), round(256 * 256 / replay.now)) == expected
    crowd = DOCUMENT[DOCUMENT.index("A crowd is the clearest case") :].partition("\n\n")[0]
    assert f"{expected[0]} s" in crowd


def test_what_is_asked_stays_as_asked() -> None:
    spec = ModelServeSpec.model_validate(
        {"model": {"uri": "hf://google/gemma-4-31B-it"}, "objective": "Latency", "engine": {"maxNumMixedTokens": 768}}
    )
    facts = published_model(spec.model.uri)
    assert facts is not None
    found = plan(spec, facts.architecture, [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1)]).engine
    assert found is not None
    assert found.max_num_mixed_tokens == 768
