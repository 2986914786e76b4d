"""Teacher forcing through the real scheduler, page tables and paged cache: logits of computed positions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from full_logits import compute_logits, forward_hidden
from model_checkpoints import WINDOW, load_checkpoint, random_tokens, reference_logits
from torch import Tensor

from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.cache.host_memory import HostMemory
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers.host_tier import host_tiers

# 70 and 140 cross global pages and reuse sliding ones.
SCARCE_PROMPT = 60  # tokens
FIRST_PROMPT = 200  # tokens of a session's first prompt, whose answer makes them 230
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5, 70, 140)


@dataclass(frozen=True)
class Forced:
    """One request: `token_ids` are its prompt (the first `prompt` of them) and the tokens it is made to sample.

    Logits of positions before `kept_from` are not computed.
    """

    token_ids: tuple[int, ...]
    prompt: int
    arrives: int = 0  # step before which it is added
    kept_from: int = 0
    spans: tuple[EmbeddedSpan, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """Requests and the limits they run under. `pool_bytes` None: enough for any `max_num_seqs` of them at once."""

    requests: tuple[Forced, ...]
    chunk: int = 512
    max_num_seqs: int = 8
    steps_in_flight: int = 1
    pool_bytes: int | None = None
    prefix_caching: bool = False
    host_bytes: int = 0


@dataclass
class Replay:
    """Logits float32 [len(positions), vocab] per request, on the CPU: of all from kept_from on, unless narrowed.

    A position that is computed again is compared with its last value.
    """

    logits: list[Tensor]
    positions: list[list[int]]
    preemptions: int
    recomputed: int
    hits: int  # prompt tokens that were not computed
    host_hits: int  # of these, those that came from host memory
    largest_disagreement: float  # between two computations of one position


@cache
def expected(directory: Path, ids: tuple[int, ...]) -> Tensor:
    """float32 [len(ids), vocab]: what transformers says of a checkpoint in one pass."""
    return reference_logits(directory, list(ids))


@cache
def model_of(directory: Path) -> Gemma4ForCausalLM:
    """In float32 on the CPU."""
    return load_checkpoint(directory)


def geometry_of(
    model: Gemma4ForCausalLM,
    *,
    dtype: KVCacheDtype = KVCacheDtype.FLOAT32,
    layout: KVCacheLayout | None = None,
) -> CacheGeometry:
    """Page geometry of one rank. Layout None: rows of V alone on global layers, where the model allows it."""
    architecture = model.architecture
    exact = KVCacheLayout.least(architecture)
    return cache_geometry(architecture, dtype=dtype, layout=layout or exact, tensor_parallel_size=model.parallel.size)


def replay(
    model: Gemma4ForCausalLM,
    traffic: Traffic,
    *,
    geometry: CacheGeometry | None = None,
    audited: bool = True,
    narrowed: bool = False,
    table: KernelTable | None = None,
) -> Replay:
    """Run `traffic` to its end on the model's device, forcing each sampled token.

    `geometry` None: float32 rows. `audited`: every row is stamped, every read and the page accounts are checked.
    `narrowed`: the last row of each request and step alone, as the product computes it. `table` None: the model's.
    """
    return _Replayer(
        model, traffic, geometry or geometry_of(model), audited=audited, narrowed=narrowed, table=table
    ).run()


class _Replayer:
    def __init__(
        self,
        model: Gemma4ForCausalLM,
        traffic: Traffic,
        geometry: CacheGeometry,
        *,
        audited: bool,
        narrowed: bool,
        table: KernelTable | None,
    ) -> None:
        longest = max(len(r.token_ids) for r in traffic.requests)
        held = sorted((geometry.held_bytes(len(r.token_ids)) for r in traffic.requests), reverse=True)
        pool_bytes = traffic.pool_bytes or sum(held[: traffic.max_num_seqs])
        device = model.embedding.weight.device
        cache = KVCache(geometry, pool_bytes, device=device, debug_stamps=audited)
        limits = SchedulerLimits(traffic.chunk, traffic.max_num_seqs, longest + 1, ())
        self.traffic = traffic
        self.audited = audited
        self.narrowed = narrowed
        self.scheduler = Scheduler(
            limits, geometry, pool_bytes, prefix_caching=traffic.prefix_caching, tiers=host_tiers(traffic.host_bytes)
        )
        self.runner = GPUModelRunner(
            model,
            cache,
            max_num_batched_tokens=traffic.chunk,
            max_num_seqs=traffic.max_num_seqs,
            max_model_len=longest + 1,
            table=table,
        )
        if traffic.host_bytes:
            self.runner.host = HostMemory(cache, traffic.host_bytes)
            self.runner.host.start()
        self.seen: list[dict[int, Tensor]] = [{} for _ in traffic.requests]
        self.held: dict[int, int] = {}  # request by slot
        self.recomputed = 0
        self.disagreement = 0.0

    def run(self) -> Replay:
        waiting = sorted(range(len(self.seen)), key=lambda i: self.traffic.requests[i].arrives)
        pending: deque[SampledTokens] = deque()
        step = 0
        while waiting or pending or self.scheduler.has_requests:
            while waiting and self.traffic.requests[waiting[0]].arrives <= step:
                self._add(waiting.pop(0))
            self.scheduler.prefixes.copied(self.runner.host_progress())
            batch = self.scheduler.schedule()
            if batch is not None:
                pending.append(self._compute(batch) if batch.num_requests else self.runner.execute(batch).result())
            if pending and (batch is None or len(pending) >= self.traffic.steps_in_flight):
                self.scheduler.update(pending.popleft())
            if self.audited:
                self.scheduler.check_integrity()
            step += 1
            assert step < 1_000_000, "the traffic makes no progress"
        assert self.scheduler.arena.held_bytes == 0
        return Replay(
            [torch.stack([rows[p] for p in sorted(rows)]) for rows in self.seen],
            [sorted(rows) for rows in self.seen],
            self.scheduler.stats().preemptions_total,
            self.recomputed,
            self.scheduler.stats().prefix_hits_total,
            self.scheduler.stats().tier("host").hits_total,
            self.disagreement,
        )

    def _add(self, index: int) -> None:
        forced = self.traffic.requests[index]
        sampling = SamplingParams(seed=0, max_tokens=len(forced.token_ids) - forced.prompt)
        self.scheduler.add(Request(str(index), forced.token_ids[: forced.prompt], sampling, spans=forced.spans))

    @torch.inference_mode()
    def _compute(self, batch: ScheduledBatch) -> SampledTokens:
        hidden = forward_hidden(self.runner, batch, every_row=not self.narrowed)
        self.held |= {admitted.slot: int(admitted.request_id) for admitted in batch.admitted}
        tokens: list[int] = []
        kept: list[tuple[int, int]] = []  # request, position
        rows: list[int] = []  # of the step
        offset = 0
        arrays = (batch.slots, batch.starts, batch.lengths, batch.drawn > 0)
        if self.narrowed:
            assert len(hidden) == batch.num_requests
            arrays = (batch.slots, batch.starts + batch.lengths - 1, np.ones_like(batch.lengths), batch.drawn > 0)
        for slot, start, length, samples in zip(*(array.tolist() for array in arrays), strict=True):
            index, end = self.held[slot], start + length
            forced = self.traffic.requests[index]
            positions = range(max(start, forced.kept_from), end)
            kept += [(index, position) for position in positions]
            rows += [offset + position - start for position in positions]
            offset += length
            if samples:
                tokens.append(forced.token_ids[end])
                self.runner.slot_tokens[slot, 0] = tokens[-1]
        if rows:
            self._keep(kept, compute_logits(self.runner.model, hidden[rows]).cpu())
        return SampledTokens(batch.step, np.array(tokens, dtype=np.int32), {})

    def _keep(self, places: list[tuple[int, int]], logits: Tensor) -> None:
        for (index, position), row in zip(places, logits, strict=True):
            seen = self.seen[index]
            if position in seen:
                self.recomputed += 1
                self.disagreement = max(self.disagreement, float((row - seen[position]).abs().max()))
            seen[position] = row


def sequences() -> list[tuple[int, ...]]:
    return [tuple(random_tokens(length, seed=length)) for length in LENGTHS]


def scarce(model: Gemma4ForCausalLM) -> Traffic:
    """Two long requests that both start and cannot both end: the older one takes its last page from the younger."""
    ids = [tuple(random_tokens(length, seed=length)) for length in (140, 139, WINDOW, 3 * WINDOW + 5)]
    geometry = geometry_of(model)
    pool = 2 * (geometry.held_bytes(140) - geometry.global_page.page_bytes)
    requests = tuple(Forced(one, min(SCARCE_PROMPT, len(one) - 1), arrives=i) for i, one in enumerate(ids))
    return Traffic(requests, chunk=24, steps_in_flight=2, pool_bytes=pool)


def scarce_logits(directories: list[Path], parallel: TensorParallel) -> list[Tensor]:
    """Logits of the scarce traffic on one rank, for every checkpoint in turn, and then those of a session whose
    requests share rows, for the last of them."""
    logits: list[Tensor] = []
    for directory in directories:
        model = load_checkpoint(directory, parallel=parallel)
        done = replay(model, scarce(model))
        assert done.preemptions > 0
        logits += done.logits
    done = replay(model, session(chunk=64))
    assert done.hits > 1000
    return logits + done.logits


def session(*, gap: int = 60, **limits: int) -> Traffic:
    """One prompt and answer, and then requests that begin like it: the same prompt, the next turn, histories that part
    1, 11 and 64 tokens before the end of the prompt or in the middle, and two siblings of those."""
    text = tuple(random_tokens(230, seed=1))
    others = [tuple(random_tokens(30, seed=seed)) for seed in range(2, 10)]
    texts = [
        (text, FIRST_PROMPT),
        (text, FIRST_PROMPT),
        (text + others[0], 240),
        (text[: FIRST_PROMPT - 1] + others[1], FIRST_PROMPT + 5),
        (text[: FIRST_PROMPT - 11] + others[2], FIRST_PROMPT + 5),
        (text[: FIRST_PROMPT - 64] + others[3], FIRST_PROMPT - 44),
        (text[:100] + others[4], 110),
        (text[:100] + others[5], 110),
        (text[:100] + others[6], 110),
    ]
    requests = tuple(Forced(ids, prompt, arrives=gap * i) for i, (ids, prompt) in enumerate(texts))
    return Traffic(requests, prefix_caching=True, **limits)
