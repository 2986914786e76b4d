"""Pages go to host memory and come back into other pages byte for byte, neighbours in one copy."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.batch import HostCopy
from modelserve_worker.cache.host_memory import HostMemory
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.cache.memory_copies import Stretches

PAGES = 12  # of each kind


@pytest.fixture
def cache(small_architecture: Any, geometry_of: Any) -> KVCache:
    geometry = geometry_of(small_architecture("31b"), KVCacheDtype.INT8)
    pool = 2 * PAGES * sum(geometry.page(kind).page_bytes for kind in LayerKind)
    cache = KVCache(geometry, pool, device=torch.device("cpu"))
    cache.arena.random_()
    return cache


class Noting(HostMemory):
    """Notes the sizes of the stretches of each call."""

    def __init__(self, *given: Any) -> None:
        self.calls: list[list[int]] = []
        super().__init__(*given)

    def copy(self, stretches: Stretches) -> None:
        self.calls.append(stretches.sizes.tolist())
        super().copy(stretches)


@pytest.fixture
def memory(cache: KVCache) -> Noting:
    memory, there = Noting(cache, 4 * cache.pool_bytes), threading.Event()
    memory.start(lambda progress: there.set() if progress.pieces == memory.layout.num_pieces else None)
    assert there.wait(60)
    return memory


def launch(memory: HostMemory, step: int, **copies: list[HostCopy]) -> None:
    memory.launch(SimpleNamespace(step=step, stores=copies.get("stores", ()), loads=copies.get("loads", ())))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_scattered_pages_come_back_into_others(cache: KVCache, memory: HostMemory, seed: int) -> None:
    dice = random.Random(seed)
    places = {kind: dice.sample(range(memory.layout.per_piece[kind] * 3), 2) for kind in LayerKind}
    # Each kind has pieces of its own.
    places[LayerKind.GLOBAL] = [
        place + 4 * memory.layout.per_piece[LayerKind.GLOBAL] for place in places[LayerKind.GLOBAL]
    ]
    pages = {kind: dice.sample(range(PAGES), 4) for kind in LayerKind}
    before = cache.arena.clone()
    stores = [HostCopy(kind, *pair) for kind in LayerKind for pair in zip(pages[kind], places[kind], strict=False)]
    loads = [HostCopy(kind, *pair) for kind in LayerKind for pair in zip(pages[kind][2:], places[kind], strict=True)]
    dice.shuffle(stores)
    launch(memory, 3, stores=stores)
    launch(memory, 4, loads=loads)
    assert memory.progress[1:] == (3, 4)
    changed = cache.arena.clone()
    cache.arena.copy_(before)
    for kind in LayerKind:
        rows = cache.page_rows(kind, pages[kind])
        cache.pages(kind)[rows[2:]] = cache.pages(kind)[rows[:2]]
    assert torch.equal(changed, cache.arena), "these pages, all of them and no others"


def test_neighbours_are_one_copy_and_all_are_started_by_one_call(cache: KVCache, memory: Noting) -> None:
    size = {kind: cache.geometry.page(kind).page_bytes for kind in LayerKind}
    per = memory.layout.per_piece
    first = 2 * per[LayerKind.GLOBAL]
    edge = first + per[LayerKind.GLOBAL]
    stores = [
        *(HostCopy(LayerKind.SLIDING, page, place) for page, place in ((4, 0), (5, 1), (7, 2))),  # a gap in the pool
        # Global pages lie in the arena from its top: these are rising rows, over the end of a piece.
        *(HostCopy(LayerKind.GLOBAL, 9 - i, edge - 2 + i) for i in range(4)),
        HostCopy(LayerKind.GLOBAL, 5, edge + 3),  # a gap in host memory
    ]
    launch(memory, 1, stores=stores)
    expected = {LayerKind.SLIDING: [2, 1], LayerKind.GLOBAL: [2, 2, 1]}
    assert memory.calls == [[count * size[kind] for kind in LayerKind for count in expected[kind]]]
