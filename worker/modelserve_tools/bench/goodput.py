"""Goodput: how many requests were answered as fast as their users need it, of all that were sent."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from modelserve_tools.bench.record import Record
from modelserve_tools.evaluation.flag_values import number

_MOST_MS = 86_400_000.0


class Goals(BaseModel):
    """Most milliseconds of one request's TTFT and TPOT; None: as long as it takes."""

    model_config = ConfigDict(frozen=True)

    ttft_ms: float | None = None
    tpot_ms: float | None = None


def goals(text: str) -> Goals:
    """Reads ttft:MS, tpot:MS or both, with a comma between them. Raises argparse.ArgumentTypeError."""
    read, found = number(0.001, _MOST_MS), {}
    for part in text.split(","):
        name, colon, value = part.partition(":")
        if name not in ("ttft", "tpot") or not colon or f"{name}_ms" in found:
            raise argparse.ArgumentTypeError(f"{part!r} is no goal; write ttft:MS, tpot:MS or both: ttft:500,tpot:50")
        found[f"{name}_ms"] = read(value)
    return Goals(**found)


class Goodput(BaseModel):
    """Of `sent` requests, how many kept the TTFT, how many the TPOT, and how many both, which are `good`.

    A request that failed, brought no token, or had not the length that was asked for kept nothing. An answer of one
    token has no TPOT, and keeps it. `share` is good / sent, None before the first request has ended.
    """

    model_config = ConfigDict(frozen=True)

    goals: Goals
    sent: int
    ttft_kept: int
    tpot_kept: int
    good: int
    share: float | None
    good_requests_per_s: float

    @classmethod
    def of(cls, wanted: Goals, records: Sequence[Record], *, seconds: float) -> Goodput:
        answered = [each for each in records if each.event_s and each.error_kind is None and each.wrong_length is None]
        kept = [(_within(each.ttft_s, wanted.ttft_ms), _within(each.tpot_s, wanted.tpot_ms)) for each in answered]
        good = sum(ttft and tpot for ttft, tpot in kept)
        return cls(
            goals=wanted,
            sent=len(records),
            ttft_kept=sum(ttft for ttft, _ in kept),
            tpot_kept=sum(tpot for _, tpot in kept),
            good=good,
            share=round(good / len(records), 4) if records else None,
            good_requests_per_s=round(good / seconds, 4),
        )


def _within(seconds: float | None, most_ms: float | None) -> bool:
    return seconds is None or most_ms is None or 1e3 * seconds <= most_ms
