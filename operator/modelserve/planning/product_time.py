"""What dense products of many decodes take beside reading and multiplying, by the kernels that the table chooses."""

from __future__ import annotations

from functools import lru_cache

from modelserve.architecture import ModelArchitecture
from modelserve.planning.engine_rates import Capability, EngineRates
from modelserve.sizing.backends.launches import dense_products
from modelserve.sizing.backends.products import CLUSTER_TILE_ROWS
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import LIBRARY
from modelserve.weight_format import WeightFormat


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
    bounds = {0, CLUSTER_TILE_ROWS, *(choice.most_rows for choice in table.choices if choice.most_rows is not None)}
    found = []
    for rows in sorted(bounds, reverse=True):
        products = dense_products(table, architecture, rows=rows + 1, ranks=ranks)
        wide = products["cluster_rows"] if rows >= CLUSTER_TILE_ROWS else 0
        found.append((rows, products[LIBRARY] * rates.library_seconds + wide * rates.wide_seconds))
    return tuple(found)
