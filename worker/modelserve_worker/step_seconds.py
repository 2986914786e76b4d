"""What steps take on a device whose rates are on no list: from four that were timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_LEAST_SHARE = 0.1  # of a chunk without a context, that its rows take: what noise leaves of a difference


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A chunk of n rows behind s tokens takes `constant` + n `row` + s `key` + n (s + n / 2) `pair`, in s, none
    negative, and `row` is above 0. A key is read once a chunk, and multiplied with each row that attends to it."""

    constant: float
    row: float
    key: float
    pair: float

    @classmethod
    def fitted(cls, seconds: Callable[[int, int], float], *, rows: tuple[int, int], context: int) -> StepSeconds:
        """Through four measured steps: `seconds` of a chunk by its rows and the tokens before it, chunks of a few and
        of many `rows`, each behind nothing and behind `context`."""
        few, many = rows
        first, first_many = seconds(few, 0), seconds(many, 0)
        behind, behind_many = (seconds(few, context), seconds(many, context)) if context else (first, first_many)
        pair = max(0.0, (behind_many - behind) - (first_many - first)) / ((many - few) * max(1, context))
        of_rows = (first_many - first) / (many - few) - pair * (many + few) / 2
        row = max(of_rows, _LEAST_SHARE * first_many / many, 1e-9)
        key = max(0.0, behind - first - pair * few * context) / max(1, context)
        return cls(max(0.0, first - row * few - pair * few * few / 2), row, key, pair)

    def decodes(self, rows: float, context: float) -> float:
        """Of a step of decodes alone, each behind so many tokens."""
        return self.constant + rows * (self.row + (self.key + self.pair) * context)

    def chunk(self, rows: float, keys: float) -> float:
        """What a chunk adds to a step, whose rows attend to so many keys on average."""
        return rows * (self.row + self.pair * keys) + self.key * keys
