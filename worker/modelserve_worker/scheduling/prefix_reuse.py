# ruff: noqa: ARG002 - NoReuse has the signatures of PrefixReuse
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
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import Int32Array
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import Request
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.arena import Page, PageArena
from modelserve_worker.scheduling.cache_events import CacheEvents
from modelserve_worker.scheduling.host_tier import HostCopies, HostTier
from modelserve_worker.scheduling.known_texts import KnownTexts
from modelserve_worker.scheduling.prefix_cache import PrefixCache
from modelserve_worker.scheduling.running import RunningRequest, RunningRequests
from modelserve_worker.scheduling.tail_index import LEAST_GAP_PAGES
from modelserve_worker.scheduling.tails import Hit
from modelserve_worker.scheduling.token_chain import TokenChain

_TAIL_SHARE = 4  # a tail inside a prompt costs at most so many times the global rows since the one before it
NO_SLOTS = np.zeros(0, dtype=np.int32)
NO_COPIES = HostCopies()


class NoReuse:
    """Every request computes all of its prompt, and leaves nothing."""

    keeps_pages = False
    has_host_tier = False
    has_copies = False  # to or from host memory, for the next step
    arriving_bytes = 0  # of pages whose rows are on their way from host memory

    def counts(self) -> dict[str, int]:
        """What `EngineStats` says of it."""
        return {}

    def find(self, request: Request) -> Hit[Page] | None:
        """Where a waiting request would resume."""
        return None

    def shared_bytes(self, hit: Hit[Page] | None) -> int:
        """Bytes of its pages that running requests hold already, and that it will not write."""
        return 0

    def begin(self, running: RunningRequest, hit: Hit[Page] | None) -> int:
        """Reserve the pages of a stay. The position at which it begins."""
        running.table.reserve(running.request.num_tokens)
        return 0

    def holds_back(self, request: Request, hit: Hit[Page] | None, needed_bytes: int) -> bool:
        """Whether an admission that needs so many bytes, those of its hit included, waits for what is being stored in
        host memory."""
        return False

    def fetch(self, request: Request, hit: Hit[Page] | None) -> bool:
        """Whether a request that would be admitted with this hit waits for rows from host memory first."""
        return False

    def copied(self, progress: HostProgress) -> None:
        """How far copies to and from host memory have come."""

    def take_ready(self) -> list[str]:
        """Requests that wait for host memory no longer."""
        return []

    def prepare(self, needed_bytes: int) -> None:
        """The first in the queue needs so many bytes."""

    def take_copies(self, step: int, *, moves_pages: bool) -> HostCopies:
        """What goes out with a step, whose moves and page numbers are fixed."""
        return NO_COPIES

    def cut(self, stays: Sequence[RunningRequest], starts: Int32Array, shares: Int32Array) -> None:
        """End chunks at checkpoints that lie inside them; `shares` [P] are changed in place."""

    def write(
        self, running: RunningRequests, slots: Int32Array, starts: Int32Array, ends: Int32Array, *, decodes: int
    ) -> Int32Array:
        """Prepare the tables of a step's requests [R] behind its decodes. The slots through which they store rows for a
        tail: [R], -1 for none, or empty where nobody has one."""
        return NO_SLOTS

    def computed(
        self,
        running: RunningRequests,
        slots: Int32Array,
        ends: Int32Array,
        samples: NDArray[np.bool_],
        *,
        decodes: int,
    ) -> None:
        """A step is scheduled, and its updates are taken: tails are due where they are worth it."""

    def settle(self) -> None:
        """Leave the tails that are due, before the next step is scheduled."""

    def ended(self, running: RunningRequest, computed: int, *, sound: bool) -> None:
        """A stay ends with so many rows computed, which others may read where they are `sound`."""

    def gone(self, request_id: str) -> None:
        """The request has ended."""

    def clear(self) -> None:
        """What cached pages hold is unknown."""

    def tell(self) -> None:
        """Tell whoever listens what is cached since the last call, and what no longer is."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless every keeper of a page is known."""


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
        running.checkpoints = self._checkpoints(request, start)
        self.cache.watch(table)  # it may be asked for what it keeps while it resumes
        if hit is None:
            table.reserve(request.num_tokens)
        else:
            self.cache.follow(hit)
            running.tail, running.joined = hit.tail, start
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
    def has_copies(self) -> bool:  # type: ignore[override]
        return self.host is not None and self.host.queued

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
        if self.host is None or (request.sampling.prompt_logprobs is not None and not request.output_token_ids):
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

    def take_copies(self, step: int, *, moves_pages: bool) -> HostCopies:
        return NO_COPIES if self.host is None else self.host.take(step, moves_pages=moves_pages)

    def cut(self, stays: Sequence[RunningRequest], starts: Int32Array, shares: Int32Array) -> None:
        for i, (running, start) in enumerate(zip(stays, starts.tolist(), strict=True)):
            if running.checkpoints:
                ahead = [at for at in running.checkpoints if at > start]
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
            end, checkpoints = int(ends[i]), stay.checkpoints
            reached = bool(checkpoints) and checkpoints[0] <= end
            stay.checkpoints = [at for at in checkpoints if at > end]
            if samples[i] or reached or end - stay.joined >= self._tails_apart:
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
            self.events.tell()

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
        request = running.request
        if self._exact and end > len(request.prompt_token_ids):
            return
        tail = self.cache.leave(
            self._chain(request), end, running.table, previous=running.tail, joined=running.joined,
            client=request.client, junction=junction, turn=turn, answer=answer,
        )  # fmt: skip
        if tail is not None:
            running.tail, running.joined = tail, end
            if self.events is not None:
                self.events.left(tail, self._chain(request), tenant=request.tenant, salt=request.cache_salt)
