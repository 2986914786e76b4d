"""Figures of known records, by hand."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from modelserve_tools.bench.driver import Load
from modelserve_tools.bench.figures import Distribution, figures, percentile
from modelserve_tools.bench.goodput import goals
from modelserve_tools.bench.record import Record
from modelserve_tools.bench.report import Report, report_table


def _record(number: int, *event_s: float, tokens: int, **fields: Any) -> Record:
    given = {"sent_s": 0.0, "end_s": event_s[-1] if event_s else 9.0, "usage_sent": True, "prompt_tokens": 101} | fields
    return Record(number=number, input_tokens=100, output_tokens=tokens, event_s=list(event_s), **given)


def _load(**fields: Any) -> Load:
    load = Load(2, None, 4, duration_s=4.0, cpu_s=1.0)
    load.records += [
        _record(0, 1.0, 1.5, 2.0, tokens=3),
        _record(1, 2.0, 2.25, 4.0, tokens=5),
        _record(2, 0.1, 0.2, tokens=2, error_kind="timeout", error="late"),
    ]
    for name, value in fields.items():
        setattr(load, name, value)
    return load


def test_figures_count_what_succeeded() -> None:
    found = figures(_load(), with_records=False)
    assert (found.requests, found.ok, found.failed, found.unfinished, found.wrong_length) == (4, 2, 1, 1, 0)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (0.5, 2.0, 52.5)
    assert (found.input_tokens_mean, found.output_tokens_mean) == (101, 4)
    assert found.tokens_per_event == round(8 / 6, 3)
    assert found.ttft_ms == Distribution(n=2, mean=1500, p50=1500, p99=1990, max=2000)
    assert found.tpot_ms == Distribution(n=2, mean=500, p50=500, p99=500, max=500)
    assert found.itl_ms == Distribution(n=4, mean=750, p50=500, p99=1712.5, max=1750)
    assert found.e2e_ms == Distribution(n=2, mean=3000, p50=3000, p99=3980, max=4000)
    assert found.driver_cpu_share == 0.25
    assert [(fault.kind, fault.count, fault.first) for fault in found.faults] == [("timeout", 1, "request 2: late")]
    assert (found.sound, found.driver_is_busy, found.records) == (False, False, None)
    assert figures(_load(), with_records=True).records == _load().records


def test_a_load_without_an_answer_has_no_times() -> None:
    found = figures(Load(1, None, 4), with_records=False)
    assert (found.ok, found.unfinished, found.requests_per_s) == (0, 4, 0.0)
    assert (found.ttft_ms, found.itl_ms, found.output_tokens_mean, found.tokens_per_event) == (None, None, None, None)


def test_percentiles_lie_between_the_nearest_samples() -> None:
    ordered = [10.0, 20.0, 40.0, 80.0]
    assert [percentile(ordered, percent) for percent in (0, 50, 100)] == [10.0, 30.0, 80.0]
    assert percentile(ordered, 99) == pytest.approx(78.8)
    assert percentile([7.0], 99) == 7.0


def test_the_table_comes_last_and_doubts_before_it() -> None:
    loads = (
        figures(_load(cpu_s=3.0), with_records=False),
        figures(Load(None, 2.5, 8), with_records=False),
    )
    report = Report(
        command=[], started="", base_url="http://h/v1", model="m", seed=3, complete=True, loads=loads
    )  # fmt: skip
    assert report_table(report) == (
        "c=2: 1 x timeout, first: request 2: late\n"
        "c=2: 1 of 4 requests were not finished\n"
        "c=2: 1.33 tokens an event: ITL is between events, TPOT per token\n"
        "c=2: this driver took 75% of a core: its own delays are in the figures\n"
        "2.5/s: 8 of 8 requests were not finished\n"
        "\n"
        "m at http://h/v1, seed 3\n"
        "\n"
        "LOAD   OK  FAILED   IN  OUT  REQ/S  OUT TOK/S  ALL TOK/S  TTFT MS mean/p50/p99  TPOT MS mean/p50/p99"
        "  ITL MS p50/p99/max  E2E MS p50/p99\n"
        "c=2     2       1  101    4    0.5        2.0       52.5        1500/1500/1990           500/500/500"
        "       500/1712/1750       3000/3980\n"
        "2.5/s   0       0    -    -      0        0.0        0.0                     -                     -"
        "                   -               -"
    )


def test_goodput_counts_what_was_sent_and_kept_both_goals() -> None:
    load = Load(None, 2.0, 9, duration_s=4.0)
    load.records += [
        _record(0, 1.0, 1.5, 2.0, tokens=3),  # TTFT 1,000 ms, TPOT 500
        _record(0, 1.0, 1.5, 2.0, tokens=3, turn=2),
        _record(1, 1.001, 1.5, 2.0, tokens=3),  # first token too late
        _record(2, 0.5, 2.5, tokens=4),  # 667 ms a token
        _record(3, 0.5, tokens=1),  # no time per token
        _record(4, 0.1, 0.2, tokens=2, error_kind="timeout", error="late"),
        _record(5, 0.1, 0.2, tokens=2, wrong_length="2 tokens instead of 3"),
        _record(6, tokens=0),  # an answer without a token
    ]
    found = figures(load, with_records=False, goals=goals("ttft:1000,tpot:500")).goodput
    assert found is not None
    assert (found.sent, found.ttft_kept, found.tpot_kept, found.good) == (8, 4, 4, 3)
    assert (found.share, found.good_requests_per_s) == (0.375, 0.75)
    only = figures(load, with_records=False, goals=goals("tpot:700")).goodput
    assert only is not None
    assert only.good == 5
    assert figures(load, with_records=False).goodput is None


def test_the_table_of_goodput_has_a_line_for_each_rate() -> None:
    wanted = goals("ttft:1000,tpot:500")
    loads = []
    for rate in (1.0, 2.5):
        load = _load(concurrency=None, rate=rate)
        loads.append(figures(load, with_records=False, goals=wanted))
    loads.append(figures(Load(None, 4.0, 8), with_records=False, goals=wanted))
    report = Report(command=[], started="", base_url="u", model="m", seed=3, complete=False, loads=tuple(loads))
    assert [line.split() for line in report_table(report).splitlines()[-5:]] == [
        ["good:", "TTFT", "at", "most", "1000", "ms", "and", "TPOT", "at", "most", "500", "ms"],
        ["LOAD", "SENT", "GOOD", "GOOD/S", "TTFT", "KEPT", "TPOT", "KEPT"],
        ["1/s", "3", "33.3%", "0.25", "33.3%", "66.7%"],
        ["2.5/s", "3", "33.3%", "0.25", "33.3%", "66.7%"],
        ["4/s", "0", "-", "0", "-", "-"],
    ]


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "e2e:4", "ttft:1,ttft:2", "ttft:-1", "tpot:nan", "ttft:1;tpot:2"]
)
def test_goals_that_are_none_say_so(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"ttft:MS|no number"):
        goals(text)
