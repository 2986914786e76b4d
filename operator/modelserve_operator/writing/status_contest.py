"""Another writer of our statuses, such as an operator with other settings: each waits longer before it writes. Pure.

Two that answer each other at once would keep the API server busy for ever. A status that was wiped or forged once is
written again at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from modelserve_operator import labels
from modelserve_operator.process.work_queue import Key

logger = logging.getLogger(__name__)

LONGEST_WAIT = timedelta(minutes=1)
QUIET = 2 * LONGEST_WAIT


class StatusContestedError(Exception):
    """Somebody else has written the status since we did; `delay` seconds are left before it is our turn."""

    def __init__(self, delay: float) -> None:
        super().__init__(f"somebody else writes the status, too; ours follows in {delay:.0f} s")
        self.delay = delay


@dataclass(frozen=True)
class _Written:
    digest: str
    at: datetime
    overwritten: int = 0  # times in a row


class StatusContests:
    """What was last written of each ModelServe's status, by this operator."""

    def __init__(self) -> None:
        self._written: dict[Key, _Written] = {}

    def forget(self, key: Key) -> None:
        """A ModelServe is gone."""
        self._written.pop(key, None)

    def turn(self, key: Key, live: Mapping[str, Any], now: datetime) -> None:
        """Before a write over `live`. Raises StatusContestedError while it is not our turn."""
        last = self._written.get(key)
        if last is None or not last.overwritten or last.digest == _digest(live):
            return
        wait = min(timedelta(seconds=1 << min(last.overwritten, 10)), LONGEST_WAIT)
        if now < last.at + wait:
            raise StatusContestedError((last.at + wait - now).total_seconds() + 0.1)

    def wrote(self, key: Key, status: Mapping[str, Any], *, over: Mapping[str, Any], now: datetime) -> None:
        """`status` was written in place of `over`. All statuses here are as the store has them."""
        last, times = self._written.get(key), 0
        if last is not None and now - last.at < QUIET:
            times = last.overwritten + (last.digest != _digest(over))
            if times == 2 and last.overwritten == 1:
                logger.warning("somebody else writes the status of %s/%s, too: another operator?", *key)
        self._written[key] = _Written(_digest(status), now, times)


def _digest(status: Mapping[str, Any]) -> str:
    """Of all but times: they follow from who wrote last."""
    conditions = [
        {name: value for name, value in each.items() if name != "lastTransitionTime"}
        for each in status.get("conditions") or ()
    ]
    return labels.short_hash({**status, "conditions": conditions})
