"""Paged attention equals dense attention, whatever the pages, the chunks, the batch and the storage format."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_projections import POOL, Projections, poisoned_cache, run_steps, tables_for

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.attention.page_groups import page_groups
from modelserve_worker.attention.paged_attention import PagedAttention


def random_steps(lengths: dict[str, int], rng: random.Random, *, most: int) -> list[list[tuple[str, int]]]:
    left, steps = dict(lengths), []
    while any(left.values()):
        step = []
        for name in rng.sample(sorted(left), k=rng.randint(1, len(left))):
            if left[name]:
                count = min(left[name], rng.choice([1, 1, rng.randint(1, most)]))
                step.append((name, count))
                left[name] -= count
        if step:
            steps.append(step)
    return steps


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    variant=st.sampled_from(["31b", "26b-a4b", "12b", "e4b", "e2b"]),
    layout=st.sampled_from([None, "kv"]),
    window=st.sampled_from([1, 2, 9, 31, 32, 33, 64, 100]),
    lengths=st.lists(st.integers(1, 210), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 20),
)
def test_paged_equals_dense(
    small_architecture, geometry_of, driver_for, variant, layout, window, lengths, seed
) -> None:
    architecture = small_architecture(variant, sliding_window=window)
    wanted = {f"r{i}": length for i, length in enumerate(lengths)}
    projections = Projections(architecture, wanted, seed=seed)
    geometry = geometry_of(architecture, layout=layout)
    driver = driver_for(geometry, POOL, seed=seed)
    steps = random_steps(wanted, random.Random(seed), most=120)
    outputs = run_steps(projections, poisoned_cache(geometry), driver, steps)
    for (name, layer), output in outputs.items():
        torch.testing.assert_close(output.double(), projections.dense(name, layer), atol=1e-5, rtol=0)


def test_sliding_pages_are_reused_in_place(small_architecture, geometry_of, driver_for) -> None:
    """The fixture does exercise the dangerous case: a written row lies in a page whose old rows are being read."""
    architecture = small_architecture("e4b", sliding_window=40)
    projections = Projections(architecture, {"a": 300})
    geometry = geometry_of(architecture)
    driver = driver_for(geometry, POOL)
    outputs = run_steps(projections, poisoned_cache(geometry), driver, [[("a", n)] for n in [50, 1, 90, 1, 70, 88]])
    assert driver.reused_in_place >= 4
    for (name, layer), output in outputs.items():
        torch.testing.assert_close(output.double(), projections.dense(name, layer), atol=1e-5, rtol=0)


def test_many_passes_give_the_same(small_architecture, geometry_of, driver_for) -> None:
    """Small pass limits: keys in several passes, queries in several blocks, decodes in several groups."""

    class ManyPasses(PagedAttention):
        keys_per_pass, scores_per_pass = 128, 4096

    architecture = small_architecture("12b", sliding_window=20)
    lengths = {f"r{i}": 150 + 37 * i for i in range(5)}
    projections = Projections(architecture, lengths)
    geometry = geometry_of(architecture)
    steps = [[(n, length - 3) for n, length in lengths.items()]] + [[(n, 1) for n in lengths]] * 3
    outputs = run_steps(projections, poisoned_cache(geometry), driver_for(geometry, POOL), steps, backend=ManyPasses)
    for (name, layer), output in outputs.items():
        torch.testing.assert_close(output.double(), projections.dense(name, layer), atol=1e-5, rtol=0)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "dtype", [KVCacheDtype.BFLOAT16, KVCacheDtype.INT8, KVCacheDtype.FP8_E4M3, KVCacheDtype.FP8_E5M2]
)
@pytest.mark.parametrize(("variant", "layout"), [("31b", "v_only"), ("31b", "kv"), ("e4b", "kv")])
def test_quantised_rows_read_the_same_from_chunk_and_page(
    small_architecture, geometry_of, driver_for, dtype, variant, layout
) -> None:
    """Attention over stored values, however the prompt is cut; the dense reference quantises each row once."""
    architecture = small_architecture(variant, sliding_window=40)
    projections = Projections(architecture, {"a": 130})
    geometry = geometry_of(architecture, dtype, layout)
    for cuts in ([130], [1] * 130, [50, 1, 79]):
        cache, driver = poisoned_cache(geometry), driver_for(geometry, POOL)
        outputs = run_steps(projections, cache, driver, [[("a", n)] for n in cuts])
        for (name, layer), output in outputs.items():
            expected = projections.dense(name, layer, dtype, derived=layout == "v_only")
            torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


def test_stamps_catch_a_wrong_page(small_architecture, geometry_of, driver_for) -> None:
    architecture = small_architecture("31b", sliding_window=40)
    projections = Projections(architecture, {"a": 100, "b": 100})
    geometry = geometry_of(architecture)
    cache, driver = poisoned_cache(geometry), driver_for(geometry, POOL)
    tables = tables_for(cache)
    run_steps(projections, cache, driver, [[("a", 90), ("b", 90)]], tables=tables)
    table, a, b = tables.host[LayerKind.GLOBAL], driver.tables["a"].slot, driver.tables["b"].slot
    table[[a, b], 0] = table[[b, a], 0]
    with pytest.raises(AssertionError, match=r"position 90 of request #\d+ read 91 rows .* of request #"):
        run_steps(projections, cache, driver, [[("a", 1)]], tables=tables)


def test_stamps_catch_an_early_overwrite(small_architecture, geometry_of, driver_for) -> None:
    """A producer that writes its sliding rows before the layers that share them have read."""
    architecture = small_architecture("e4b", sliding_window=40)
    projections = Projections(architecture, {"a": 200})
    geometry = geometry_of(architecture)

    class KeepingDict(dict):
        def __delitem__(self, key) -> None:
            """Keep the fresh rows for the sharing layers: only the time of the write is wrong."""

    class Eager(PagedAttention):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self._last_reader = {producer: producer for producer in self._last_reader}
            self._fresh = KeepingDict()

    cache, driver = poisoned_cache(geometry), driver_for(geometry, POOL)
    with pytest.raises(AssertionError, match="may read positions"):
        run_steps(projections, cache, driver, [[("a", 90)], [("a", 90)]], backend=Eager)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("last", [1, 60])
def test_stamps_catch_a_wrong_window(small_architecture, geometry_of, driver_for, shift, last) -> None:
    architecture = small_architecture("31b", sliding_window=40)
    projections = Projections(architecture, {"a": 200})
    geometry = geometry_of(architecture)

    class Shifted(PagedAttention):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self._window = geometry.window + shift

    cache, driver = poisoned_cache(geometry), driver_for(geometry, POOL)
    with pytest.raises(AssertionError, match=r"may read positions \d+\.\."):
        run_steps(projections, cache, driver, [[("a", 90)], [("a", last)]], backend=Shifted)


def test_tables_of_decodes_have_few_widths(small_architecture, geometry_of, driver_for) -> None:
    """Pages rounded up to two significant bits, so that rows of nearly as many are read together."""
    geometry = geometry_of(small_architecture("31b"))
    widths = {}
    for pages in range(1, 10):
        cache, driver = poisoned_cache(geometry), driver_for(geometry, POOL)
        tables, start = tables_for(cache), 64 * pages - 1
        for share in (driver.share("a", [5] * start), driver.share("a", [5])):
            batch = driver.batch(share)
            for kind, updates in ((LayerKind.GLOBAL, batch.global_updates), (LayerKind.SLIDING, batch.sliding_updates)):
                tables.apply({kind: updates})
            (group,) = page_groups(batch, cache, tables).groups[LayerKind.GLOBAL]
        widths[pages] = group.table.shape[1]
    assert widths == {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 8, 8: 8, 9: 12}


def test_a_table_that_names_a_page_outside_the_arena_is_refused(small_architecture, geometry_of, driver_for) -> None:
    """And the same step is taken when the table is right again."""
    geometry = geometry_of(small_architecture("31b", sliding_window=40))
    cache, driver = poisoned_cache(geometry), driver_for(geometry, POOL)
    tables, share = tables_for(cache), driver.share("a", [5] * 104)
    batch = driver.batch(share)
    for kind, updates in ((LayerKind.GLOBAL, batch.global_updates), (LayerKind.SLIDING, batch.sliding_updates)):
        tables.apply({kind: updates})
    entries = {LayerKind.GLOBAL: 1, LayerKind.SLIDING: 3 % geometry.sliding_table_entries}  # of the last token's page
    for kind, entry in entries.items():
        table, right = tables.host[kind], int(tables.host[kind][share.slot, entry])
        for wrong in (-1, cache.num_pages[kind]):
            table[share.slot, entry] = wrong
            with pytest.raises(
                InvalidInput, match=f"{kind.value} page .* outside the arena's 0..{cache.num_pages[kind] - 1}"
            ):
                page_groups(batch, cache, tables)
        table[share.slot, entry] = right
    found = page_groups(batch, cache, tables)
    assert found.positions.tolist() == list(range(104))
    assert found.sliding_tokens.tolist() == list(range(64, 104)), "the window, which begins with a page"
