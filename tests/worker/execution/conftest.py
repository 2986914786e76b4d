"""A page driver for tests: hands out pages at random, as a scheduler under memory pressure would, and builds steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import ScheduledBatch, ScheduledRequest, SlidingTable
from modelserve_worker.request import SamplingParams
from modelserve_worker.tiny.variants import config_json


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Tables:
    computed: int = 0
    global_pages: list[int] = field(default_factory=list)
    sliding: dict[int, int] = field(default_factory=dict)  # logical -> physical


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
        self.step = 0
        self.reused_in_place = 0

    def share(
        self, request_id: str, token_ids: list[int], *, samples: bool = False, slot: int = 0,
        sampling: SamplingParams | None = None, prompt: tuple[int, ...] = (), outputs: tuple[int, ...] = (),
        num_output_tokens: int = 0,
    ) -> ScheduledRequest:  # fmt: skip
        """The next len(token_ids) positions of a request, with the tables that the batch's contract asks for."""
        first_in_slot = request_id not in self.tables
        tables = self.tables.setdefault(request_id, Tables())
        start, end = tables.computed, tables.computed + len(token_ids)
        window, size = self.geometry.window, self.geometry.sliding_page.page_tokens
        while len(tables.global_pages) < self.geometry.global_pages(end):
            tables.global_pages.append(self.free[LayerKind.GLOBAL].pop())
        oldest = max(0, start - window + 1)
        read = range(oldest // size, -(-start // size)) if start > oldest else range(0)
        kept_from = max(0, end - window + 1)
        write = range(kept_from // size, -(-end // size)) if end > kept_from else range(0)
        read_table = SlidingTable(read.start, tuple(tables.sliding[i] for i in read))
        expired = [tables.sliding.pop(i) for i in sorted(tables.sliding) if i not in write]
        for logical in write:
            if logical not in tables.sliding:
                self.reused_in_place += bool(expired)
                tables.sliding[logical] = expired.pop() if expired else self.free[LayerKind.SLIDING].pop()
        for page in expired:
            self.free[LayerKind.SLIDING].insert(self.rng.randrange(len(self.free[LayerKind.SLIDING]) + 1), page)
        tables.computed = end
        return ScheduledRequest(
            request_id=request_id,
            slot=slot,
            sampling=sampling or SamplingParams(seed=0, max_tokens=1, temperature=0.0),
            start=start,
            token_ids=tuple(token_ids),
            global_pages=tuple(tables.global_pages),
            sliding_read=read_table,
            sliding_write=SlidingTable(write.start, tuple(tables.sliding[i] for i in write)),
            samples=samples,
            num_output_tokens=num_output_tokens,
            first_in_slot=first_in_slot,
            prompt_token_ids=prompt if first_in_slot else (),
            output_token_ids=outputs if first_in_slot else (),
        )

    def batch(self, *requests: ScheduledRequest) -> ScheduledBatch:
        self.step += 1
        return ScheduledBatch(self.step, tuple(sorted(requests, key=lambda r: len(r.token_ids) > 1)))

    def release(self, request_id: str) -> None:
        tables = self.tables.pop(request_id)
        self.free[LayerKind.GLOBAL] += tables.global_pages
        self.free[LayerKind.SLIDING] += tables.sliding.values()
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
        architecture: ModelArchitecture, dtype: KVCacheDtype = KVCacheDtype.FLOAT32, layout: str | None = None
    ) -> CacheGeometry:
        chosen = layout or ("v_only" if architecture.attention_k_eq_v else "kv")
        return cache_geometry(architecture, dtype=dtype, layout=KVCacheLayout(chosen), tensor_parallel_size=1)

    return build
