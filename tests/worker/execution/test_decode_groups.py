"""Decoding rows of one step: what they read follows their own contexts, and so do the bits of their attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from paged_projections import POOL, Projections, poisoned_cache, run_steps

from modelserve_worker.attention import paged_attention
from modelserve_worker.cache.kv_cache import KVCache

LONG, SHORT = 590, 20


def decoded(small_architecture, geometry_of, driver_for, variant: str, groups: list[list[str]], *, window: int = 40):
    """The last token of each request of `groups`, prompts first, each group of decodes in a step of its own."""
    architecture = small_architecture(variant, sliding_window=window)
    lengths = {f"short{i}": SHORT + i for i in range(7)} | {"long": LONG}
    projections = Projections(architecture, lengths)
    geometry = geometry_of(architecture)
    prompts = [[(name, lengths[name] - 1)] for name in lengths]
    cache, driver = poisoned_cache(geometry, stamps=False), driver_for(geometry, POOL)
    outputs = run_steps(projections, cache, driver, prompts + [[(name, 1) for name in group] for group in groups])
    return {key: rows[-1] for key, rows in outputs.items()}


SHORTS = [f"short{i}" for i in range(7)]


@pytest.mark.parametrize("variant", ["31b", "12b", "e4b"])
def test_a_long_neighbour_adds_what_it_reads_and_no_more(
    small_architecture, geometry_of, driver_for, variant, monkeypatch
) -> None:
    """Rows of pages that decodes gather, in global and sliding layers, beside a context 25 times as long."""
    read = 0
    original = KVCache.read_pages

    def counting(self, layer, plane, page_rows, compute):
        nonlocal read
        read += page_rows.numel()
        return original(self, layer, plane, page_rows, compute)

    monkeypatch.setattr(KVCache, "read_pages", counting)
    costs = []
    for groups in ([SHORTS], [["long"]], [[*SHORTS, "long"]], []):
        read = 0
        decoded(small_architecture, geometry_of, driver_for, variant, groups)
        costs.append(read)
    shorts, long, together, prompts = costs
    assert together - prompts <= 1.1 * (shorts + long - 2 * prompts)


@pytest.mark.parametrize("variant", ["31b", "12b", "e4b"])
@pytest.mark.parametrize("keys_per_pass", [128, 16_384])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(
    small_architecture, geometry_of, driver_for, variant, keys_per_pass, monkeypatch
) -> None:
    monkeypatch.setattr(paged_attention, "KEYS_PER_PASS", keys_per_pass)
    of = partial(decoded, small_architecture, geometry_of, driver_for, variant)
    alone, together = of([[name] for name in [*SHORTS, "long"]]), of([[*SHORTS, "long"]])
    assert [key for key in alone if not torch.equal(alone[key], together[key])] == []


def test_no_pass_gathers_more_keys_than_are_planned(small_architecture, geometry_of, driver_for, monkeypatch) -> None:
    """Padding of a group counts too."""
    most = 0
    original = KVCache.read_pages

    def watching(self, layer, plane, page_rows, compute):
        nonlocal most
        rows = original(self, layer, plane, page_rows, compute)
        most = max(most, rows.shape[0] * rows.shape[2])
        return rows

    monkeypatch.setattr(KVCache, "read_pages", watching)
    monkeypatch.setattr(paged_attention, "KEYS_PER_PASS", 256)
    decoded(small_architecture, geometry_of, driver_for, "31b", [[*SHORTS, "long"]], window=100)
    assert 0 < most <= 256
