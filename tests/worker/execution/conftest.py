"""A page driver for tests: hands out pages at random, as a scheduler under memory pressure would, and builds steps."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_tools.tiny.variants import config_json
from modelserve_worker.batch import AdmittedRequest, ScheduledBatch, TableUpdates
from modelserve_worker.request import SamplingParams


@pytest.fixture(autouse=True)
def _released_replicas(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU gets back what a test's replicas held: the next one, or its process, would count it as memory in use."""
    yield
    if request.node.get_closest_marker("gpu") is not None and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@dataclass
class Tables:
    slot: int
    computed: int = 0
    global_pages: list[int] = field(default_factory=list)
    sliding_pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Share:
    """One request's part of a step."""

    request_id: str
    slot: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    output_count: int
    admitted: AdmittedRequest | None
    updates: tuple[tuple[LayerKind, int, int], ...]  # kind, table entry, page


_STEPS = itertools.count(1)
"""No two steps of a process have one number, as none of an engine's have: a runner may outlive a driver, and ranks and
audits know a step by it."""


class StepDriver:
    """Page tables of several requests over one arena; each kind uses its half of the bytes, in random order."""

    def __init__(self, geometry: CacheGeometry, pool_bytes: int, *, seed: int = 0) -> None:
        self.geometry = geometry
        self.rng = random.Random(seed)
        self.free = {}
        for spec in (geometry.global_page, geometry.sliding_page):
            ids = list(range(pool_bytes // 2 // spec.page_bytes)) if spec.page_bytes else []
            self.rng.shuffle(ids)
            self.free[spec.kind] = ids
        self.tables: dict[str, Tables] = {}
        self.reused_in_place = 0

    def share(
        self, request_id: str, token_ids: list[int], *, samples: bool = False, slot: int | None = None,
        sampling: SamplingParams | None = None, prompt: tuple[int, ...] = (), outputs: tuple[int, ...] = (),
        num_output_tokens: int = 0,
    ) -> Share:  # fmt: skip
        """The next len(token_ids) positions of a request, with the table entries that they need."""
        admitted = None
        if request_id not in self.tables:
            taken = {tables.slot for tables in self.tables.values()}
            slot = next(i for i in range(64) if i not in taken) if slot is None else slot
            self.tables[request_id] = Tables(slot)
            params = sampling or SamplingParams(seed=0, max_tokens=1, temperature=0.0)
            admitted = AdmittedRequest(slot, request_id, params, prompt, outputs)
        tables = self.tables[request_id]
        start, end = tables.computed, tables.computed + len(token_ids)
        updates = []
        for kind, pages, needed in (
            (LayerKind.GLOBAL, tables.global_pages, self.geometry.global_pages(end)),
            (LayerKind.SLIDING, tables.sliding_pages, self.geometry.sliding_pages(end)),
        ):
            while len(pages) < needed:
                updates.append((kind, len(pages), self.free[kind].pop()))
                pages.append(updates[-1][2])
        if self.geometry.sliding_page.layers:
            entries, size = self.geometry.sliding_table_entries, self.geometry.sliding_page.page_tokens
            self.reused_in_place += sum(at % size == 0 and at // size >= entries for at in range(start, end))
        tables.computed = end
        return Share(
            request_id, tables.slot, start, tuple(token_ids), samples, num_output_tokens, admitted, tuple(updates)
        )

    def batch(self, *shares: Share) -> ScheduledBatch:
        ordered = sorted(shares, key=lambda share: len(share.token_ids) > 1)

        def ints(values) -> np.ndarray:
            return np.array(list(values), dtype=np.int32)

        def updates(kind: LayerKind) -> TableUpdates:
            found = [(s.slot, entry, page) for s in ordered for of, entry, page in s.updates if of is kind]
            return TableUpdates(*(ints(row[i] for row in found) for i in range(3)))

        return ScheduledBatch(
            step=next(_STEPS),
            slots=ints(s.slot for s in ordered),
            starts=ints(s.start for s in ordered),
            lengths=ints(len(s.token_ids) for s in ordered),
            sampled=ints(s.samples for s in ordered),
            output_counts=ints(s.output_count for s in ordered),
            token_ids=ints(token for s in ordered for token in s.token_ids),
            admitted=tuple(s.admitted for s in ordered if s.admitted is not None),
            page_moves=(),
            global_updates=updates(LayerKind.GLOBAL),
            sliding_updates=updates(LayerKind.SLIDING),
        )

    @staticmethod
    def ordered(*shares: Share) -> list[Share]:
        """The shares in the order of their batch."""
        return sorted(shares, key=lambda share: len(share.token_ids) > 1)

    def release(self, request_id: str) -> None:
        tables = self.tables.pop(request_id)
        self.free[LayerKind.GLOBAL] += tables.global_pages
        self.free[LayerKind.SLIDING] += tables.sliding_pages
        for ids in self.free.values():
            self.rng.shuffle(ids)


@pytest.fixture
def driver_for():
    return StepDriver


@pytest.fixture
def small_architecture():
    """A variant's geometry at test size, with the window and heads a test asks for."""

    def build(variant: str, **changes) -> ModelArchitecture:
        config = config_json(variant)
        config["text_config"] |= changes
        return ModelArchitecture.from_config(config)

    return build


@pytest.fixture
def geometry_of():
    def build(
        architecture: ModelArchitecture,
        dtype: KVCacheDtype = KVCacheDtype.FLOAT32,
        layout: str | None = None,
        draft: DraftCache | None = None,
    ) -> CacheGeometry:
        chosen = KVCacheLayout(layout or KVCacheLayout.least(architecture))
        return cache_geometry(architecture, dtype=dtype, layout=chosen, tensor_parallel_size=1, draft=draft)

    return build
