"""What dense products of many decodes take beside reading and multiplying, by the kernels that the table chooses."""

from __future__ import annotations

from functools import lru_cache

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.planning.speed.engine_rates import Capability, EngineRates
from modelserve.sizing.backends.launches import dense_products
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import Choice


@lru_cache(maxsize=256)
def many_decodes_seconds(
    architecture: ModelArchitecture,
    rates: EngineRates,
    capability: Capability,
    *,
    ranks: int,
    weight_format: WeightFormat | None,
) -> tuple[tuple[int, float], ...]:
    """(decodes, seconds): what a step of more decodes than that takes longer; the first pair that it exceeds holds.
    None where `rates` count that with each launch."""
    if not rates.library_seconds:
        return ()
    major, minor = capability
    table = resolve(10 * major + minor, architecture, Formats(weight_format), ranks=ranks)
    bounds = {0}
    for choice in table.choices:
        bounds |= {choice.most_rows} if choice.most_rows is not None else set()
        bounds |= {choice.extra[0] - 1} if choice.extra is not None else set()
    return tuple(
        (rows, sum(_extra(choice, rates, rows + 1) * layers for choice, layers in dense_products(
            table, architecture, rows=rows + 1, ranks=ranks
        )))
        for rows in sorted(bounds, reverse=True)
    )  # fmt: skip


def _extra(choice: Choice, rates: EngineRates, rows: int) -> float:
    """Seconds of one product of so many rows."""
    if choice.extra is None or rows < choice.extra[0]:
        return 0.0
    seconds: float = getattr(rates, choice.extra[1])
    return seconds
