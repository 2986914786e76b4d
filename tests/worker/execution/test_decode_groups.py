"""Decoding rows of one step: what they read follows their own contexts, and so do the bits of their attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from paged_projections import POOL, Projections, poisoned_cache, run_steps

from modelserve.sizing.memory import KEYS_PER_PASS
from modelserve_worker.attention.paged_attention import PagedAttention
from modelserve_worker.cache.kv_cache import KVCache

LONG, SHORT = 590, 20


def decoded(
    small_architecture, geometry_of, driver_for, variant: str, groups: list[list[str]], *, window: int = 40,
    of: type[KVCache] = KVCache, keys_per_pass: int = KEYS_PER_PASS,
):  # fmt: skip
    """The last token of each request of `groups`, prompts first, each group of decodes in a step of its own."""
    architecture = small_architecture(variant, sliding_window=window)
    lengths = {f"short{i}": SHORT + i for i in range(7)} | {"long": LONG}
    projections = Projections(architecture, lengths)
    geometry = geometry_of(architecture)
    prompts = [[(name, lengths[name] - 1)] for name in lengths]

    class Backend(PagedAttention):
        pass

    Backend.keys_per_pass = keys_per_pass
    cache, driver = poisoned_cache(geometry, stamps=False, of=of), driver_for(geometry, POOL)
    steps = prompts + [[(name, 1) for name in group] for group in groups]
    outputs = run_steps(projections, cache, driver, steps, backend=Backend)
    return {key: rows[-1] for key, rows in outputs.items()}


SHORTS = [f"short{i}" for i in range(7)]


@pytest.mark.parametrize("variant", ["31b", "12b", "e4b"])
def test_a_long_neighbour_adds_what_it_reads_and_no_more(small_architecture, geometry_of, driver_for, variant) -> None:
    """Rows of pages that decodes gather, in global and sliding layers, beside a context 25 times as long."""
    read = 0

    class Counting(KVCache):
        def read_pages(self, layer, plane, page_rows, compute):
            nonlocal read
            read += page_rows.numel()
            return super().read_pages(layer, plane, page_rows, compute)

    costs = []
    for groups in ([SHORTS], [["long"]], [[*SHORTS, "long"]], []):
        read = 0
        decoded(small_architecture, geometry_of, driver_for, variant, groups, of=Counting)
        costs.append(read)
    shorts, long, together, prompts = costs
    assert together - prompts <= 1.1 * (shorts + long - 2 * prompts)


@pytest.mark.parametrize("variant", ["31b", "12b", "e4b"])
@pytest.mark.parametrize("keys_per_pass", [128, 16_384])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(
    small_architecture, geometry_of, driver_for, variant, keys_per_pass
) -> None:
    of = partial(decoded, small_architecture, geometry_of, driver_for, variant, keys_per_pass=keys_per_pass)
    alone, together = of([[name] for name in [*SHORTS, "long"]]), of([[*SHORTS, "long"]])
    assert [key for key in alone if not torch.equal(alone[key], together[key])] == []


def test_no_pass_gathers_more_keys_than_are_planned(small_architecture, geometry_of, driver_for) -> None:
    """Padding of a group counts too."""
    most = 0

    class Watching(KVCache):
        def read_pages(self, layer, plane, page_rows, compute):
            nonlocal most
            rows = super().read_pages(layer, plane, page_rows, compute)
            most = max(most, rows.shape[0] * rows.shape[2])
            return rows

    decoded(
        small_architecture, geometry_of, driver_for, "31b", [[*SHORTS, "long"]], window=100, of=Watching,
        keys_per_pass=256,
    )  # fmt: skip
    assert 0 < most <= 256
