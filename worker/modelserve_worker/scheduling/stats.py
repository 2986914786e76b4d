"""What the engine is doing, as one consistent snapshot for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from modelserve.measured_speed import StepKind
from modelserve_worker.batch import NOTHING_ASKED, Asked
from modelserve_worker.request import Request


class TimedStep(NamedTuple):
    """A step that ended: how long the device had it, and what was in it."""

    seconds: float
    decodes: int
    context: float  # tokens in the cache of each of them, on average
    prompt_rows: int
    prompt_context: float  # keys that one of those rows attends to, on average
    drafts: int = 0  # rows of decodes beyond their first
    asked: Asked = NOTHING_ASKED  # drafts made behind the step, of each request that it drew a token for

    @property
    def kind(self) -> StepKind:
        if not self.prompt_rows:
            return "Decode"
        return "Mixed" if self.decodes else "Prefill"


@dataclass(slots=True)
class StepEvents:
    """What happened since the last report: requests first admitted, with the time.monotonic() of it and the prompt
    tokens that were cached, the tokens of each step that was scheduled (of prompts, and those that it samples), and the
    time of each that ended.
    """

    admitted: list[tuple[str, float, int]] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    timed_steps: list[TimedStep] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """Since the start: what requests came to, as EngineStats has it."""

    preemptions_total: int = 0
    failed_steps_total: int = 0
    generation_tokens_total: int = 0
    prompt_tokens_total: int = 0
    prompt_tokens_cached_total: int = 0
    prompt_tokens_host_total: int = 0

    def begin_answer(self, request: Request) -> None:
        """Its first token was sampled; what is recomputed later is not counted again, nor what nobody asked for."""
        if request.trial is not None:
            return
        self.prompt_tokens_total += len(request.prompt_token_ids)
        self.prompt_tokens_cached_total += request.cached_tokens
        self.prompt_tokens_host_total += request.host_cached_tokens


class TierCounters(NamedTuple):
    """What a tier behind the prefix cache holds, and what it has come to since the start. Bytes are per rank."""

    name: str
    capacity_bytes: int = 0  # of memory that is there for cached pages
    used_bytes: int = 0
    queries_total: int = 0  # prompt tokens that the pool did not have
    hits_total: int = 0  # of these, those that came from the tier
    evictions_total: int = 0  # prefixes that it gave up
    stored_bytes_total: int = 0  # copied there
    restored_bytes_total: int = 0  # and back
    stores_off: bool = False  # an error has ended the copies to it
    loads_off: bool = False  # and those from it


class AdapterDrafts(NamedTuple):
    """Drafts that were verified of requests with an adapter, named by its digest, and those of them that were right."""

    adapter: str
    tokens: int = 0
    accepted: int = 0


class EngineStats(NamedTuple):
    """Gauges at the end of a step, and counters since the start. Bytes and pages are per rank.

    A kind's `_total` is the pages it would have if it took every free byte now: the kinds share one pool.
    """

    num_running: int = 0
    num_waiting: int = 0
    global_pages_used: int = 0
    global_pages_total: int = 0
    sliding_pages_used: int = 0
    sliding_pages_total: int = 0
    pool_bytes: int = 0
    held_bytes: int = 0
    page_moves_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0  # of requests whose first token was sampled; recomputed tokens are not counted again
    generation_tokens_total: int = 0
    failed_steps_total: int = 0
    cached_bytes: int = 0  # of pages that only the prefix cache keeps
    page_copies_total: int = 0
    prompt_tokens_cached_total: int = 0  # of prompt_tokens_total, those that were not computed
    prefix_queries_total: int = 0  # prompt tokens that were looked up, once for each request
    prefix_hits_total: int = 0  # prompt tokens behind which a request began
    prefix_evictions_total: int = 0  # prefixes that were given up for memory
    drafts_total: int = 0  # proposals that were verified, of a request in a step
    draft_tokens_total: int = 0  # their tokens
    accepted_per_position: tuple[int, ...] = ()  # accepted ones, by place in their proposal; empty without a drafter
    low_acceptance: bool = False  # of drafts for minutes: the drafter does not fit
    proposals_judged_total: int = 0  # verified or not
    draft_acceptance: float = 0.0  # of recent drafts, those that were right where the ones before them were
    judged_by_drafter: tuple[int, ...] = ()  # proposals that were compared, of each drafter that is asked
    acceptance_by_drafter: tuple[float, ...] = ()  # `draft_acceptance` of each
    adapter_drafts: tuple[AdapterDrafts, ...] = ()  # of those that are loaded and had some
    prompt_tokens_host_total: int = 0  # of prompt_tokens_cached_total, those that came from a tier behind the pool
    tiers: tuple[TierCounters, ...] = ()  # those behind the prefix cache

    def tier(self, name: str) -> TierCounters:
        """The counters of a tier, all zero where there is none of this name."""
        return next((tier for tier in self.tiers if tier.name == name), TierCounters(name))

    @property
    def kv_cache_usage(self) -> float:
        """Held over pool bytes, 0.0 to 1.0."""
        return self.held_bytes / self.pool_bytes if self.pool_bytes else 0.0
