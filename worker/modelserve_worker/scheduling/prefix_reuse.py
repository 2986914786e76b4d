"""What a scheduler does for a prefix cache: where requests resume, where their chunks end, what they leave cached.

A chunk costs a step, so chunks are cut only at a position that is worth it: where the front end says that histories
part (`Request.checkpoints`), or where the path of an earlier request ends that has no prefix there (a junction, found
by its hashes), and only where it lies more than a few pages behind the resume point. Within a page of the prompt's end
the prefix that is left there serves it. Prefixes inside a long prompt are left where its chunks end anyway, as far
apart as they cost a share of the global rows between them. A prefix is put down while the device computes its rows: its
hashes do not delay a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import Int32Array
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import Request
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.cache_events import CacheEvents
from modelserve_worker.scheduling.pages.arena import Page, PageArena
from modelserve_worker.scheduling.prefix.cached_prefix import Hit
from modelserve_worker.scheduling.prefix.known_texts import KnownTexts
from modelserve_worker.scheduling.prefix.prefix_cache import PrefixCache
from modelserve_worker.scheduling.prefix.prefix_index import LEAST_GAP_PAGES
from modelserve_worker.scheduling.prefix.token_chain import TokenChain
from modelserve_worker.scheduling.running import RunningRequest, RunningRequests
from modelserve_worker.scheduling.stats import TierCounters
from modelserve_worker.scheduling.tiers.tier import StepCopies, Tier, TierOf

_NO_SLOTS = np.zeros(0, dtype=np.int32)
_WINDOW_SHARE = 4  # a prefix inside a prompt costs at most so many times the global rows since the one before it


class PrefixReuse:
    """A prefix reuse stands between one scheduler's requests and `cache`, with the `tiers` behind that."""

    def __init__(
        self, arena: PageArena, geometry: CacheGeometry, limits: SchedulerLimits, *, keeps_pages: bool = True,
        tiers: Iterable[TierOf] = (), looks_up: bool = False, events: CacheEvents | None = None,
    ) -> None:  # fmt: skip
        """Without `keeps_pages` every request computes all of its prompt, and leaves nothing. `tiers`: for what the
        pool gives up, the nearest first. `looks_up`: drafts are looked up in what others went on with. `events` hear of
        what is cached."""
        self.keeps_pages = keeps_pages
        self.cache = PrefixCache(arena, geometry, limits.prompt_cost)
        self.texts = KnownTexts(geometry.global_page.page_tokens) if looks_up else None
        self.tiers = [make(arena, self.cache, geometry, limits.prompt_cost) for make in tiers if keeps_pages]
        self._events = events
        self.queries = self.hits = 0
        self._geometry = geometry
        self._exact = limits.exact
        self._chains: dict[str, TokenChain] = {}  # by request
        # Request, its tokens, version of the cache, hit.
        self._found: tuple[str, int, int, Hit[Page] | None] | None = None
        # Requests that waited for rows: where they would have begun without, and what tier they waited for last.
        self._waited: dict[str, tuple[int, Tier]] = {}
        self._due: list[tuple[RunningRequest, int, bool, bool]] = []  # who, where, whether a junction, or a turn's end
        size = geometry.global_page.page_tokens
        self._least_gap = LEAST_GAP_PAGES * size
        # Of the model's rows alone: a drafter changes no hit.
        window_bytes = geometry.sliding_table_entries * geometry.sliding_page.page_bytes
        token_bytes = (geometry.global_page.page_bytes - geometry.global_page.draft_bytes) / size
        worth_it = int(window_bytes / (_WINDOW_SHARE * token_bytes)) if token_bytes else 0
        self._prefixes_apart = max(self._least_gap, worth_it)

    def find(self, request: Request) -> Hit[Page] | None:
        """Where a waiting request would resume. One whose prompt's tokens are yet to be scored computes all."""
        if not self.keeps_pages or _is_scored(request):
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
        """Bytes of its pages that running requests hold already, and that it will not write."""
        if hit is None:
            return 0
        spec = self._geometry.global_page
        full = hit.position // spec.page_tokens
        return sum(bool(page.entries) for page in hit.global_pages[:full]) * spec.page_bytes

    def begin(self, running: RunningRequest, hit: Hit[Page] | None) -> int:
        """Reserve the pages of a request. The position at which it begins."""
        request, table = running.request, running.table
        if not self.keeps_pages:
            table.reserve(request.num_tokens)
            return 0
        start = 0 if hit is None else hit.position
        first_time = not request.admitted
        if first_time and request.sampling.prompt_logprobs is None:
            self._count(request, start)
        if self.texts is not None and first_time and not len(request.predicted_token_ids):
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
            if self._events is not None and start >= hit.prefix.block.depth * self.cache.page_tokens:
                # It may have come from another tier, which no router was told of.
                self._events.left(hit.prefix, self._chain(request), tenant=request.tenant, salt=request.cache_salt)
            table.resume(hit, request.num_tokens)
        for tier in self.tiers:
            tier.begun(request.request_id)
        return start

    def _count(self, request: Request, start: int) -> None:
        """A request begins there for the first time."""
        self.queries += len(request.prompt_token_ids)
        self.hits += start
        request.cached_tokens = start
        here, waited_for = self._waited.get(request.request_id, (start, None))
        request.host_cached_tokens = max(0, start - here)
        for tier in self.tiers:
            tier.queries += len(request.prompt_token_ids) - here
            tier.hits += request.host_cached_tokens if tier is waited_for else 0

    @property
    def has_checks(self) -> bool:
        """Whether there are pages to look at."""
        return self.cache.checks.due

    @property
    def has_errands(self) -> bool:
        """Whether there are copies to or from a tier, or pages to look at, for the next step."""
        return self.has_checks or any(tier.queued for tier in self.tiers)

    @property
    def arriving_bytes(self) -> int:
        """Of pages whose rows are on their way from a tier."""
        return sum(tier.restores.coming_bytes(awaited=True) for tier in self.tiers)

    def counts(self) -> dict[str, int | tuple[TierCounters, ...]]:
        """What `EngineStats` says of it."""
        return {
            "prefix_queries_total": self.queries,
            "prefix_hits_total": self.hits,
            "prefix_evictions_total": self.cache.evictions,
            "tiers": tuple(tier.counters() for tier in self.tiers),
        }

    def holds_back(self, request: Request, hit: Hit[Page] | None, needed_bytes: int) -> bool:
        """Whether an admission that needs so many bytes, those of its hit included, waits for what is being stored in a
        tier."""
        if not self.tiers:
            return False
        pages = () if hit is None else hit.pages
        cached = sum(self._geometry.page(page.kind).page_bytes for page in pages if not page.entries)
        return any(tier.holds_back(request.request_id, needed_bytes - cached) for tier in self.tiers)

    def fetch(self, request: Request, hit: Hit[Page] | None) -> bool:
        """Whether a request that would be admitted with this hit waits for rows from a tier first: from the one that
        has most of them, of several the nearest."""
        if not self.tiers or self.cache.checks.suspects or _is_scored(request):
            return False
        here, chain, most = 0 if hit is None else hit.position, self._chain(request), self._most_shared(request)
        found = [(tier, there) for tier in self.tiers if (there := tier.find(request.request_id, chain, most))]
        for tier, there in sorted(found, key=lambda each: -each[1].position):
            if there.position >= here + self._least_gap and tier.restore(request.request_id, there):
                self._waited[request.request_id] = self._waited.get(request.request_id, (here,))[0], tier
                return True
        return False

    def copied(self, device: HostProgress) -> None:
        """How far the device's copies to and from host memory have come; a step is about to be scheduled."""
        for tier in self.tiers:
            tier.progress(device)

    def take_ready(self) -> list[str]:
        """Requests that wait for a tier no longer."""
        return [request_id for tier in self.tiers for request_id in tier.take_ready()]

    def prepare(self, needed_bytes: int) -> None:
        """The first in the queue needs so many bytes."""
        for tier in self.tiers:
            tier.prepare(needed_bytes)

    def take_errands(self, step: int, *, moves_pages: bool) -> StepCopies:
        """What goes out with a step, whose moves and page numbers are fixed."""
        taken = [tier.take(step, moves_pages=moves_pages) for tier in self.tiers]
        return StepCopies(
            tuple(copy for each in taken for copy in each.stores), tuple(copy for each in taken for copy in each.loads),
            max((each.loads_awaited for each in taken), default=0), self.cache.checks.take(step),
        )  # fmt: skip

    def cut(self, holders: Sequence[RunningRequest], starts: Int32Array, shares: Int32Array) -> None:
        """End chunks at checkpoints that lie inside them; `shares` [P] are changed in place."""
        for i, (running, start) in enumerate(zip(holders, starts.tolist(), strict=True)):
            if checkpoints := running.trail.checkpoints:
                ahead = [at for at in checkpoints if at > start]
                if ahead and ahead[0] < start + shares[i]:
                    shares[i] = ahead[0] - start

    def write(
        self, running: RunningRequests, slots: Int32Array, starts: Int32Array, ends: Int32Array, *, decodes: int
    ) -> Int32Array:
        """Prepare the tables of a step's requests [R] behind its decodes. The slots through which they store rows for a
        prefix: [R], -1 for none, or empty where nobody has one."""
        if not self.keeps_pages:
            return _NO_SLOTS
        spare = np.full(len(slots), -1, dtype=np.int32)
        free = running.free_slots
        for i, holder in enumerate(running.holders(slots[decodes:]), decodes):
            if holder.table.write(int(starts[i]), int(ends[i]), free[-1] if free else None):
                spare[i] = free.pop()
            running.counters.note_pages(holder)
        return spare if (spare >= 0).any() else _NO_SLOTS

    def computed(
        self,
        running: RunningRequests,
        slots: Int32Array,
        ends: Int32Array,
        samples: NDArray[np.bool_],
        *,
        decodes: int,
    ) -> None:
        """A step is scheduled, and its updates are taken: prefixes are due where they are worth it."""
        if not self.keeps_pages:
            return
        last_tokens = np.flatnonzero(ends[:decodes] == running.counters.prompt[slots[:decodes]])
        for i in (*last_tokens.tolist(), *range(decodes, len(slots))):
            (holder,) = running.holders(slots[i : i + 1])
            holder.table.sent()
            end, trail = int(ends[i]), holder.trail
            reached = bool(trail.checkpoints) and trail.checkpoints[0] <= end
            trail.checkpoints = [at for at in trail.checkpoints if at > end]
            if samples[i] or reached or end - trail.joined >= self._prefixes_apart:
                turn = bool(samples[i]) and any(end - at <= self.cache.page_tokens for at in holder.request.checkpoints)
                self._due.append((holder, end, reached, turn))

    def settle(self) -> None:
        """Leave the prefixes that are due, before the next step is scheduled."""
        for holder, end, junction, turn in self._due:
            self._leave(holder, end, junction=junction, turn=turn)
        self._due.clear()

    def ended(self, running: RunningRequest, computed: int, *, sound: bool) -> None:
        """A request ends with so many rows computed, which others may read where they are `sound`."""
        if not self.keeps_pages:
            return
        self.settle()
        if sound and computed:
            end = min(computed, running.request.num_tokens)
            self._leave(running, end, answer=end > len(running.request.prompt_token_ids))
            if self.texts is not None and running.request.output_token_ids:
                self.texts.remember(self._chain(running.request), len(running.request.prompt_token_ids))
        self.cache.unwatch(running.table)
        running.table.forget()

    def distrust(self, running: RunningRequest, *, read: bool = False) -> None:
        """What this request has written is no numbers, or unknown: that alone goes, so that nobody who makes requests
        fail can empty the cache of others. Where `read`, what it has read is looked at."""
        trail, table = running.trail, running.table
        self._due = [each for each in self._due if each[0] is not running]
        others = trail.read(self._geometry)
        written = {*table.pages, *table.history, *(page for prefix in trail.left for page in prefix.own_pages)}
        written -= others.keys()
        for prefix in trail.left:
            if prefix.live:
                self.cache.give_away(prefix)
        table.forget()
        self._give_up({page for page in written if page.keepers})  # others have resumed behind its rows
        if read:
            self.cache.checks.ask(others)
            self._found = None

    def checked(self, step: int, unsound: Collection[int]) -> None:
        """A step has looked at the pages that it took along, and found rows in these that are not finite."""
        found = self.cache.checks.answered(step, unsound)
        if found is not None:
            self._give_up(found)
            self._found = None

    def step_failed(self, step: int) -> None:
        """It may not have done what it took along."""
        self.cache.checks.failed(step)
        for tier in self.tiers:
            tier.step_failed()

    def _give_up(self, pages: set[Page]) -> None:
        if pages:
            digests = self.cache.distrust(pages)
            for tier in self.tiers:
                tier.distrust(digests)

    def gone(self, request_id: str) -> None:
        """The request has ended."""
        self._chains.pop(request_id, None)
        self._found = None  # another one may have its id
        self._waited.pop(request_id, None)
        for tier in self.tiers:
            tier.gone(request_id)

    def clear(self) -> None:
        """What cached pages hold is unknown."""
        self._due.clear()
        self.cache.clear()
        for tier in self.tiers:
            tier.clear()

    def tell(self) -> None:
        """Tell whoever listens what is cached since the last call, and what no longer is."""
        if self._events is not None:
            self._events.tell(self.cache.take_gone())

    def check_integrity(self) -> None:
        """Raise AssertionError unless every keeper of a page is known."""
        self.cache.check_integrity(arriving=[page for tier in self.tiers for page in tier.restores.kept()])
        for tier in self.tiers:
            tier.check_integrity()

    def _chain(self, request: Request) -> TokenChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = TokenChain(request.cache_namespace, request.prompt_token_ids, self.cache.page_tokens, request.spans)
            self._chains[request.request_id] = chain
        chain.extend(request.num_tokens, request.output_token_ids)
        return chain

    def _checkpoints(self, request: Request, start: int) -> list[int]:
        """Behind `start`, and not served by the prefix at the end of the known tokens."""
        known = self.cache.known_tokens(self._chain(request))
        latest = request.num_tokens - self.cache.page_tokens
        return sorted({at for at in (*request.checkpoints, known) if start + self._least_gap <= at < latest})

    def _leave(
        self, running: RunningRequest, end: int, *, junction: bool = False, turn: bool = False, answer: bool = False
    ) -> None:
        request, trail = running.request, running.trail
        if request.trial is not None or (self._exact and end > len(request.prompt_token_ids)):
            return
        if end < trail.parted + self.cache.page_tokens:
            return  # it would save next to nothing, and keep a window of its own
        known = self.cache.inserted
        prefix = self.cache.leave(
            self._chain(request), end, running.table, previous=trail.prefix, joined=trail.joined,
            client=request.client, junction=junction, turn=turn, answer=answer,
        )  # fmt: skip
        if prefix is not None:
            trail.prefix, trail.joined = prefix, end
            if prefix.number > known:
                trail.left.append(prefix)
            if self._events is not None:
                self._events.left(prefix, self._chain(request), tenant=request.tenant, salt=request.cache_salt)


def _is_scored(request: Request) -> bool:
    """Whether its prompt's tokens are yet to be scored, for which they are computed."""
    return request.sampling.prompt_logprobs is not None and not request.output_token_ids
