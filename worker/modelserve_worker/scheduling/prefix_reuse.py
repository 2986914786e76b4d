"""What a scheduler does for a prefix cache: where requests resume, where their chunks end, which tails they leave.

A chunk costs a step, so chunks are cut only at a position that is worth it: where the front end says that histories
part (`Request.checkpoints`), or where the way of an earlier request ends that has no tail there (a junction, found by
its hashes), and only where it lies more than a few pages behind the resume point. Within a page of the prompt's end
the tail that is left there serves it. Tails inside a long prompt are left where its chunks end anyway, as far apart as
they cost a share of the global rows between them. A tail is put down while the device computes its rows: its hashes
do not delay a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import Int32Array
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import Request
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.cache_events import CacheEvents
from modelserve_worker.scheduling.no_reuse import NO_COPIES, NO_SLOTS, NoReuse
from modelserve_worker.scheduling.pages.arena import Page, PageArena
from modelserve_worker.scheduling.prefix.known_texts import KnownTexts
from modelserve_worker.scheduling.prefix.prefix_cache import PrefixCache
from modelserve_worker.scheduling.prefix.tail_index import LEAST_GAP_PAGES
from modelserve_worker.scheduling.prefix.tails import Hit
from modelserve_worker.scheduling.prefix.token_chain import TokenChain
from modelserve_worker.scheduling.running import RunningRequest, RunningRequests
from modelserve_worker.scheduling.tiers.host_tier import HostCopies, HostTier

_TAIL_SHARE = 4  # a tail inside a prompt costs at most so many times the global rows since the one before it


class PrefixReuse(NoReuse):
    """Between one scheduler's requests and `cache`."""

    keeps_pages = True

    def __init__(
        self, arena: PageArena, geometry: CacheGeometry, limits: SchedulerLimits, *, host_bytes: int = 0,
        looks_up: bool = False,
    ) -> None:  # fmt: skip
        """`host_bytes`: host memory of one rank for what the pool gives up. `looks_up`: drafts are looked up in what
        others went on with."""
        self.cache = PrefixCache(arena, geometry, limits.prompt_cost)
        self.texts = KnownTexts(geometry.global_page.page_tokens) if looks_up else None
        self.events: CacheEvents | None = None
        self.host: HostTier | None = None
        if host_bytes:
            self.host = HostTier(arena, self.cache, geometry, limits.prompt_cost, host_bytes)
        self.queries = self.hits = self.host_queries = self.host_hits = 0
        self._geometry = geometry
        self._exact = limits.exact
        self._chains: dict[str, TokenChain] = {}  # by request
        # Request, its tokens, version of the cache, hit.
        self._found: tuple[str, int, int, Hit[Page] | None] | None = None
        self._in_pool: dict[str, int] = {}  # where requests that waited for host memory would have begun without it
        self._due: list[tuple[RunningRequest, int, bool, bool]] = []  # who, where, whether a junction, or a turn's end
        size = geometry.global_page.page_tokens
        self._least_gap = LEAST_GAP_PAGES * size
        tail_bytes = geometry.sliding_table_entries * geometry.sliding_page.page_bytes
        token_bytes = geometry.global_page.page_bytes / size
        self._tails_apart = max(self._least_gap, int(tail_bytes / (_TAIL_SHARE * token_bytes)) if token_bytes else 0)

    def find(self, request: Request) -> Hit[Page] | None:
        """One whose prompt's tokens are yet to be scored computes all."""
        if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
            return None
        asked = (request.request_id, request.num_tokens, self.cache.version)
        if self._found is None or self._found[:3] != asked:
            self._found = (*asked, self.cache.find(self._chain(request), self._most_shared(request)))
        return self._found[3]

    def _most_shared(self, request: Request) -> int:
        """Rows of a request, from its first on, that may be another's too. Where they are to be exact, rows behind a
        prompt are none: who has the same tokens in its prompt computes other bits of them."""
        most = request.num_tokens - 1
        return min(most, len(request.prompt_token_ids)) if self._exact else most

    def shared_bytes(self, hit: Hit[Page] | None) -> int:
        if hit is None:
            return 0
        spec = self._geometry.global_page
        full = hit.position // spec.page_tokens
        return sum(bool(page.entries) for page in hit.global_pages[:full]) * spec.page_bytes

    def begin(self, running: RunningRequest, hit: Hit[Page] | None) -> int:
        request, table = running.request, running.table
        start = 0 if hit is None else hit.position
        first_stay = not request.admitted
        if first_stay and request.sampling.prompt_logprobs is None:
            self.queries += len(request.prompt_token_ids)
            self.hits += start
            request.cached_tokens = start
            if self.host is not None:
                self.host_queries += len(request.prompt_token_ids) - self._in_pool.get(request.request_id, start)
                request.host_cached_tokens = max(0, start - self._in_pool.get(request.request_id, start))
                self.host_hits += request.host_cached_tokens
        if self.texts is not None and first_stay and not len(request.predicted_token_ids):
            chain, prompt = self._chain(request), len(request.prompt_token_ids)
            request.predicted_token_ids = array("i", self.texts.following(chain, prompt).tobytes())
        trail = running.trail
        trail.checkpoints = self._checkpoints(request, start)
        self.cache.watch(table)  # it may be asked for what it keeps while it resumes
        if hit is None:
            table.reserve(request.num_tokens)
        else:
            self.cache.follow(hit)
            trail.resume(hit)
            if self.events is not None and start >= hit.tail.block.depth * self.cache.page_tokens:
                # It may have come from host memory, which no router was told of.
                self.events.left(hit.tail, self._chain(request), tenant=request.tenant, salt=request.cache_salt)
            table.resume(hit, request.num_tokens)
        if self.host is not None:
            self.host.begun(request.request_id)
        return start

    @property
    def has_host_tier(self) -> bool:  # type: ignore[override]
        return self.host is not None

    @property
    def has_checks(self) -> bool:  # type: ignore[override]
        return self.cache.checks.due

    @property
    def has_errands(self) -> bool:  # type: ignore[override]
        return self.has_checks or (self.host is not None and self.host.queued)

    @property
    def arriving_bytes(self) -> int:  # type: ignore[override]
        return 0 if self.host is None else self.host.restores.arriving_bytes

    def counts(self) -> dict[str, int]:
        counts = {
            "prefix_queries_total": self.queries,
            "prefix_hits_total": self.hits,
            "prefix_evictions_total": self.cache.evictions,
        }
        if self.host is not None:
            counts |= {
                "host_capacity_bytes": self.host.pool.capacity_bytes,
                "host_used_bytes": self.host.pool.used_bytes,
                "host_queries_total": self.host_queries,
                "host_hits_total": self.host_hits,
                "host_evictions_total": self.host.index.evictions,
                "host_stored_bytes_total": self.host.stores.stored_bytes,
                "host_restored_bytes_total": self.host.restores.restored_bytes,
                "host_stores_off": self.host.stores.lane.off,
                "host_loads_off": self.host.restores.lane.off,
            }
        return counts

    def holds_back(self, request: Request, hit: Hit[Page] | None, needed_bytes: int) -> bool:
        if self.host is None:
            return False
        pages = () if hit is None else (*hit.global_pages, *hit.sliding_pages.values())
        cached = sum(self._geometry.page(page.kind).page_bytes for page in pages if not page.entries)
        return self.host.holds_back(request.request_id, needed_bytes - cached)

    def fetch(self, request: Request, hit: Hit[Page] | None) -> bool:
        if (
            self.host is None
            or self.cache.checks.suspects
            or (request.sampling.prompt_logprobs is not None and not request.output_token_ids)
        ):
            return False
        here = 0 if hit is None else hit.position
        chain, least = self._chain(request), here + self._least_gap
        if not self.host.fetch(request.request_id, chain, self._most_shared(request), least=least):
            return False
        self._in_pool.setdefault(request.request_id, here)
        return True

    def copied(self, progress: HostProgress) -> None:
        if self.host is not None:
            self.host.progress(progress)

    def take_ready(self) -> list[str]:
        return [] if self.host is None else self.host.take_ready()

    def prepare(self, needed_bytes: int) -> None:
        if self.host is not None:
            self.host.prepare(needed_bytes)

    def take_errands(self, step: int, *, moves_pages: bool) -> HostCopies:
        copies = NO_COPIES if self.host is None else self.host.take(step, moves_pages=moves_pages)
        checks = self.cache.checks.take(step)
        return copies._replace(checks=checks) if checks else copies

    def cut(self, stays: Sequence[RunningRequest], starts: Int32Array, shares: Int32Array) -> None:
        for i, (running, start) in enumerate(zip(stays, starts.tolist(), strict=True)):
            if checkpoints := running.trail.checkpoints:
                ahead = [at for at in checkpoints if at > start]
                if ahead and ahead[0] < start + shares[i]:
                    shares[i] = ahead[0] - start

    def write(
        self, running: RunningRequests, slots: Int32Array, starts: Int32Array, ends: Int32Array, *, decodes: int
    ) -> Int32Array:
        spare = np.full(len(slots), -1, dtype=np.int32)
        free = running.free_slots
        for i, stay in enumerate(running.stays(slots[decodes:]), decodes):
            if stay.table.write(int(starts[i]), int(ends[i]), free[-1] if free else None):
                spare[i] = free.pop()
            running.counters.note_pages(stay)
        return spare if (spare >= 0).any() else NO_SLOTS

    def computed(
        self,
        running: RunningRequests,
        slots: Int32Array,
        ends: Int32Array,
        samples: NDArray[np.bool_],
        *,
        decodes: int,
    ) -> None:
        last_tokens = np.flatnonzero(ends[:decodes] == running.counters.prompt[slots[:decodes]])
        for i in (*last_tokens.tolist(), *range(decodes, len(slots))):
            (stay,) = running.stays(slots[i : i + 1])
            stay.table.sent()
            end, trail = int(ends[i]), stay.trail
            reached = bool(trail.checkpoints) and trail.checkpoints[0] <= end
            trail.checkpoints = [at for at in trail.checkpoints if at > end]
            if samples[i] or reached or end - trail.joined >= self._tails_apart:
                turn = bool(samples[i]) and any(end - at <= self.cache.page_tokens for at in stay.request.checkpoints)
                self._due.append((stay, end, reached, turn))

    def settle(self) -> None:
        for stay, end, junction, turn in self._due:
            self._leave(stay, end, junction=junction, turn=turn)
        self._due.clear()

    def ended(self, running: RunningRequest, computed: int, *, sound: bool) -> None:
        self.settle()
        if sound and computed:
            end = min(computed, running.request.num_tokens)
            self._leave(running, end, answer=end > len(running.request.prompt_token_ids))
            if self.texts is not None and running.request.output_token_ids:
                self.texts.remember(self._chain(running.request), len(running.request.prompt_token_ids))
        self.cache.unwatch(running.table)
        running.table.forget()

    def distrust(self, running: RunningRequest, *, read: bool = False) -> None:
        """Only what it wrote goes, so that nobody who makes requests fail can empty the cache of others."""
        trail, table = running.trail, running.table
        self._due = [each for each in self._due if each[0] is not running]
        others = trail.read(self._geometry)
        written = {*table.pages, *table.history, *(page for tail in trail.left for page in tail.own_pages)}
        written -= others.keys()
        for tail in trail.left:
            if tail.live:
                self.cache.give_away(tail)
        table.forget()
        self._give_up({page for page in written if page.keepers})  # others have resumed behind its rows
        if read:
            self.cache.checks.ask(others)
            self._found = None

    def checked(self, step: int, unsound: Collection[int]) -> None:
        found = self.cache.checks.answered(step, unsound)
        if found is not None:
            self._give_up(found)
            self._found = None

    def step_failed(self, step: int) -> None:
        self.cache.checks.failed(step)
        if self.host is not None:
            self.host.step_failed()

    def _give_up(self, pages: set[Page]) -> None:
        if pages:
            digests = self.cache.distrust(pages)
            if self.host is not None:
                self.host.distrust(digests)

    def gone(self, request_id: str) -> None:
        self._chains.pop(request_id, None)
        self._found = None  # another one may have its id
        self._in_pool.pop(request_id, None)
        if self.host is not None:
            self.host.gone(request_id)

    def clear(self) -> None:
        self._due.clear()
        self.cache.clear()
        if self.host is not None:
            self.host.clear()

    def tell(self) -> None:
        if self.events is not None:
            self.events.tell(self.cache.take_gone())

    def check_integrity(self) -> None:
        self.cache.check_integrity(arriving=None if self.host is None else self.host.restores.kept())
        if self.host is not None:
            self.host.check_integrity()

    def _chain(self, request: Request) -> TokenChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = TokenChain(request.cache_namespace, request.prompt_token_ids, self.cache.page_tokens, request.spans)
            self._chains[request.request_id] = chain
        chain.extend(request.num_tokens, request.output_token_ids)
        return chain

    def _checkpoints(self, request: Request, start: int) -> list[int]:
        """Behind `start`, and not served by the tail at the end of the known tokens."""
        known = self.cache.known_tokens(self._chain(request))
        latest = request.num_tokens - self.cache.page_tokens
        return sorted({at for at in (*request.checkpoints, known) if start + self._least_gap <= at < latest})

    def _leave(
        self, running: RunningRequest, end: int, *, junction: bool = False, turn: bool = False, answer: bool = False
    ) -> None:
        request, trail = running.request, running.trail
        if self._exact and end > len(request.prompt_token_ids):
            return
        if end < trail.parted + self.cache.page_tokens:
            return  # it would save next to nothing, and keep a window of its own
        known = self.cache.inserted
        tail = self.cache.leave(
            self._chain(request), end, running.table, previous=trail.tail, joined=trail.joined,
            client=request.client, junction=junction, turn=turn, answer=answer,
        )  # fmt: skip
        if tail is not None:
            trail.tail, trail.joined = tail, end
            if tail.number > known:
                trail.left.append(tail)
            if self.events is not None:
                self.events.left(tail, self._chain(request), tenant=request.tenant, salt=request.cache_salt)
