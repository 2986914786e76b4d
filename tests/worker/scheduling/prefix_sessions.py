"""Requests one after the other, or beside each other, on a scheduler with a prefix cache and a device that checks what
is read; what each of them found computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from stamped_device import StampedDevice, StampedModel

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import Request, RequestOutput, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.cache_events import CacheEvents
from modelserve_worker.scheduling.prefix_reuse import PrefixReuse
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers.host_tier import host_tiers
from modelserve_worker.scheduling.tiers.tier import TierOf

MODEL = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL))
PUBLISHED = MODEL.geometry(window=1024, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1)
LONGEST = 14_000


class Sessions:
    """An engine whose requests say what they are told to. Texts are token ids from 1 on. Without `stamped` nothing is
    read, which is faster."""

    def __init__(
        self,
        geometry: CacheGeometry = PUBLISHED,
        *,
        chunk: int = 2048,
        longest: int = LONGEST,
        pool_bytes: int | None = None,
        slots: int = 4,
        stamped: bool = True,
        drafts: int = 0,
        host_bytes: int = 0,
        tiers: Sequence[TierOf] = (),
        events: CacheEvents | None = None,
    ) -> None:
        limits = SchedulerLimits(chunk, slots, longest, (), max_num_mixed_tokens=chunk)
        pool_bytes = pool_bytes or 20 * geometry.held_bytes(longest)
        self.scheduler = Scheduler(
            limits,
            geometry,
            pool_bytes,
            draft_tokens=drafts,
            prefix_caching=True,
            tiers=[*host_tiers(host_bytes), *tiers],
            events=events,
        )
        self.roomy = True  # whether nothing needs to be given up
        self.texts: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.stamped = stamped
        self.last_step = 0
        self.holders: dict[int, str] = {}  # requests by slot
        self.device = StampedDevice(
            MODEL, geometry, pool_bytes if stamped else 0, self._token_at, slots=slots, longest=longest,
            whose=lambda name: self.requests[name].cache_namespace, drafts=drafts,
        )  # fmt: skip

    @property
    def reuse(self) -> PrefixReuse:
        return self.scheduler.prefixes

    def add(
        self, prompt: Sequence[int], answer: Sequence[int] = (5,), *, checkpoints: Sequence[int] = (), **fields: str
    ) -> Request:
        name = f"r{len(self.requests)}"
        request = Request(
            name,
            tuple(prompt),
            SamplingParams(seed=0, max_tokens=len(answer)),
            checkpoints=tuple(checkpoints),
            **fields,
        )
        self.texts[name] = [*prompt, *answer]
        self.requests[name] = request
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduledBatch | None:
        """Without a device copies to and from host memory end with the step that brought them."""
        for tier in () if self.stamped else self.reuse.tiers:
            tier.progress(HostProgress(tier.pool.layout.num_pieces, self.last_step, self.last_step))
        batch = self.scheduler.schedule()
        if batch is not None:
            self.last_step = batch.step
            self.answer(batch)
        return batch

    def answer(self, batch: ScheduledBatch) -> list[RequestOutput]:
        if self.stamped:
            outputs = self.scheduler.update(self.device.execute(batch))
            self.scheduler.check_integrity()
            return outputs
        self.holders |= {each.slot: each.request_id for each in batch.admitted}
        ends = (batch.starts + batch.lengths)[batch.drawn > 0].tolist()
        names = [self.holders[slot] for slot in batch.slots[batch.drawn > 0].tolist()]
        tokens = [self._token_at(name, end) for name, end in zip(names, ends, strict=True)]
        return self.scheduler.update(SampledTokens(batch.step, np.array(tokens, dtype=np.int32), {}))

    def ask(self, prompt: Sequence[int], answer: Sequence[int] = (5,), **fields: object) -> int:
        """Run one request to its end: how many tokens of its prompt were not computed."""
        request = self.add(prompt, answer, **fields)  # type: ignore[arg-type]
        while self.scheduler.has_requests:
            self.step()
        return request.cached_tokens

    def _token_at(self, name: str, position: int) -> int:
        text = self.texts[name]
        return text[position] if position < len(text) else 0


def text(seed: int, length: int) -> list[int]:
    """Tokens that no other seed has."""
    return [1 + seed * 100_000 + at % 99_991 for at in range(length)]
