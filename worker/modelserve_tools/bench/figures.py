"""The figures of one load, from its records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from modelserve_tools.bench.driver import Load
from modelserve_tools.bench.goodput import Goals, Goodput
from modelserve_tools.bench.record import Record

_BUSY_SHARE = 0.7


class Distribution(BaseModel):
    """In milliseconds, over `n` samples."""

    model_config = ConfigDict(frozen=True)

    n: int
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        """None without samples."""
        if not seconds:
            return None
        ms = sorted(round(1e3 * each, 4) for each in seconds)
        return cls(n=len(ms), mean=round(fmean(ms), 4), p50=percentile(ms, 50), p99=percentile(ms, 99), max=ms[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest of the ordered samples, linearly (type 7 of Hyndman and Fan, 1996)."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (position - low), 4)


class Fault(BaseModel):
    """One kind of failure: how many requests ended so, and what the first of them said."""

    model_config = ConfigDict(frozen=True)

    kind: str
    count: int
    first: str


class TurnFigures(BaseModel):
    """Requests that were the same turn of their sessions. `cached_tokens_mean` is None where the server tells none."""

    model_config = ConfigDict(frozen=True)

    turn: int
    ok: int
    input_tokens_mean: float
    cached_tokens_mean: float | None
    ttft_ms: Distribution | None

    @classmethod
    def of(cls, turn: int, records: Sequence[Record]) -> TurnFigures:
        cached = [record.cached_tokens for record in records if record.cached_tokens is not None]
        return cls(
            turn=turn,
            ok=len(records),
            input_tokens_mean=round(fmean(map(_input_tokens, records)), 1),
            cached_tokens_mean=round(fmean(cached), 1) if cached else None,
            ttft_ms=Distribution.of([record.ttft_s for record in records if record.ttft_s is not None]),
        )


class Figures(BaseModel):
    """One load. Rates are per second of `duration_s`, from the first request sent to the last answer's end, and count
    requests that succeeded only; so do all times. The tokens of `total_tokens_per_s` are prompts and answers.

    `tokens_per_event` above 1 says that the server sent several tokens in one event: `itl_ms`, the time between events
    that brought tokens, is then not between single tokens, while `tpot_ms` still is per token. `driver_cpu_share` is
    the share of one core that this process took. `late_ms` is how late an open loop sent its requests.
    """

    model_config = ConfigDict(frozen=True)

    concurrency: int | None
    rate: float | None
    requests: int
    ok: int
    failed: int
    unfinished: int
    wrong_length: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    tokens_per_event: float | None
    counted_by_usage: bool
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    late_ms: Distribution | None
    goodput: Goodput | None = None  # where goals were set
    turns: tuple[TurnFigures, ...] = ()  # of sessions of several
    driver_cpu_share: float
    faults: tuple[Fault, ...]
    warmup_requests: int
    warmup_faults: tuple[Fault, ...]
    records: list[Record] | None = None

    @property
    def sound(self) -> bool:
        """Every request that was sent was answered, with the tokens that were asked for."""
        return not self.faults and not self.warmup_faults

    @property
    def driver_is_busy(self) -> bool:
        return self.driver_cpu_share > _BUSY_SHARE


def figures(load: Load, *, with_records: bool, goals: Goals | None = None) -> Figures:
    """What is known of the load, also when it was stopped before its end."""
    good = [record for record in load.records if record.error_kind is None]
    seconds = load.duration_s or math.inf
    inputs = [_input_tokens(record) for record in good]
    turns = sorted({record.turn for record in good})
    outputs = [record.output_tokens for record in good]
    events = sum(len(record.event_s) for record in good)
    return Figures(
        concurrency=load.concurrency,
        rate=load.rate,
        requests=load.requests,
        ok=len(good),
        failed=len(load.records) - len(good),
        unfinished=load.requests - len(load.records),
        wrong_length=sum(record.wrong_length is not None for record in good),
        duration_s=round(load.duration_s, 6),
        requests_per_s=round(len(good) / seconds, 4),
        output_tokens_per_s=round(sum(outputs) / seconds, 2),
        total_tokens_per_s=round((sum(inputs) + sum(outputs)) / seconds, 2),
        input_tokens_mean=round(fmean(inputs), 1) if good else None,
        output_tokens_mean=round(fmean(outputs), 1) if good else None,
        tokens_per_event=round(sum(outputs) / events, 3) if events else None,
        counted_by_usage=all(record.usage_sent for record in good),
        ttft_ms=Distribution.of([record.ttft_s for record in good if record.ttft_s is not None]),
        tpot_ms=Distribution.of([record.tpot_s for record in good if record.tpot_s is not None]),
        itl_ms=Distribution.of([gap for record in good for gap in record.gaps_s]),
        e2e_ms=Distribution.of([record.end_s for record in good]),
        late_ms=None if load.rate is None else Distribution.of([record.late_s for record in load.records]),
        goodput=None if goals is None else Goodput.of(goals, load.records, seconds=seconds),
        turns=tuple(TurnFigures.of(turn, [record for record in good if record.turn == turn]) for turn in turns)
        if turns[-1:] > [1]
        else (),
        driver_cpu_share=round(load.cpu_s / seconds, 3),
        faults=_faults(load.records),
        warmup_requests=len(load.warmup),
        warmup_faults=_faults(load.warmup),
        records=load.records if with_records else None,
    )


def _input_tokens(record: Record) -> int:
    return record.input_tokens if record.prompt_tokens is None else record.prompt_tokens


def _faults(records: Sequence[Record]) -> tuple[Fault, ...]:
    """By kind, in the order in which the kinds came; an answer of the wrong length is a kind of its own."""
    found: dict[str, list[str]] = {}
    for record in records:
        if record.error_kind is not None:
            found.setdefault(record.error_kind, []).append(f"request {record.number}: {record.error}")
        elif record.wrong_length is not None:
            found.setdefault("wrong length", []).append(f"request {record.number}: {record.wrong_length}")
    return tuple(Fault(kind=kind, count=len(texts), first=texts[0]) for kind, texts in found.items())
