"""What a prefix cache should say, from texts alone: live ones are compared with every request, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from prefix_sessions import MODEL, Sessions

from modelserve_worker.request import Request
from modelserve_worker.scheduling.pages.arena import Page
from modelserve_worker.scheduling.prefix.cached_prefix import CachedPrefix, Hit
from modelserve_worker.scheduling.prefix.eviction_order import NOTHING
from modelserve_worker.scheduling.prefix.prefix_cache import PrefixCache
from modelserve_worker.scheduling.prefix.token_chain import TokenChain


@dataclass
class Left:
    """A prefix as the oracle knows it."""

    namespace: str
    tokens: bytes  # all before its end


class Oracle:
    """Watches the cache of `sessions`, whose prefixes it knows by what their requests have said.

    Raises AssertionError where the cache says anything else, or gives up a prefix before one that should go first.
    """

    def __init__(self, sessions: Sessions, patch: pytest.MonkeyPatch) -> None:
        self.sessions = sessions
        self.cache: PrefixCache = sessions.reuse.cache
        self.left: dict[CachedPrefix[Page], Left] = {}
        self.asked = self.found = 0
        for name in ("find", "leave", "evict"):
            patch.setattr(self.cache, name, getattr(self, name)(getattr(self.cache, name)))

    def leave(self, honest: Callable[..., CachedPrefix[Page] | None]) -> Callable[..., CachedPrefix[Page] | None]:
        def leave(chain: TokenChain, end: int, *rest: object, **named: object) -> CachedPrefix[Page] | None:
            prefix = honest(chain, end, *rest, **named)
            if prefix is not None:
                request = next(each for each in self.sessions.requests.values() if self._is_of(chain, each))
                text = bytes(self.sessions.texts[request.request_id][:end])
                self.left[prefix] = Left(request.cache_namespace, text)
                size = self.cache.page_tokens
                assert prefix.end == end == len(text)
                if self._roomy() and not request.cached_tokens:
                    assert prefix.lowest <= max(size, end - size + 1), "it serves a page of positions before its end"
            return prefix

        return leave

    def find(
        self, honest: Callable[[TokenChain, int], Hit[Page] | None]
    ) -> Callable[[TokenChain, int], Hit[Page] | None]:
        def find(chain: TokenChain, most: int) -> Hit[Page] | None:
            hit = honest(chain, most)
            request = next(each for each in self.sessions.requests.values() if self._is_of(chain, each))
            tokens = bytes((*request.prompt_token_ids, *request.output_token_ids))[:most]
            expected = 0
            for prefix in self.cache.prefixes:
                left = self.left[prefix]
                if left.namespace == request.cache_namespace:
                    expected = max(expected, self._resume(prefix, left.tokens, tokens))
            assert (hit.position if hit else 0) == expected
            self.asked += 1
            self.found += expected > 0
            return hit

        return find

    def evict(self, honest: Callable[[CachedPrefix[Page]], None]) -> Callable[[CachedPrefix[Page]], None]:
        def evict(prefix: CachedPrefix[Page]) -> None:
            rank = self._rank(prefix)
            before = [other for other in self.cache.prefixes if self._rank(other) < rank]
            assert not any(self.cache._frees(other) for other in before), "another one should go first"
            honest(prefix)

        return evict

    def _rank(self, prefix: CachedPrefix) -> tuple[int, float]:
        """Those that nobody misses; those of clients beyond an equal share; the cheapest."""
        if self.cache._loss(prefix) == NOTHING:
            return 0, 0.0
        used: dict[str, int] = {}
        for other in self.cache.prefixes:
            used[other.client] = used.get(other.client, 0) + other.bytes
        beyond = used[prefix.client] > sum(used.values()) / len(used)
        return 1 if beyond else 2, prefix.priority

    def _resume(self, prefix: CachedPrefix[Page], kept: bytes, tokens: bytes) -> int:
        least = max(prefix.lowest, self.cache.page_tokens)
        if kept[:least] != tokens[:least] or len(tokens) < least:
            return 0
        same = (at for at, (one, other) in enumerate(zip(kept, tokens, strict=False)) if one != other)
        return next(same, min(len(kept), len(tokens)))

    def _is_of(self, chain: TokenChain, request: Request) -> bool:
        return self.sessions.reuse._chains.get(request.request_id) is chain

    def _roomy(self) -> bool:
        """Nothing had to be given up so far, and no slot was wanting."""
        return not self.cache.evictions and self.sessions.roomy


def sequence(seed: int, patch: pytest.MonkeyPatch, *, requests: int, roomy: bool) -> Oracle:
    """Random requests over a random tree of texts of two tokens; `roomy`: memory and slots for all of them."""
    random = Random(seed)
    geometry = MODEL.geometry(
        window=random.randint(2, 9), global_tokens=random.choice([2, 4]), sliding_tokens=random.randint(1, 3),
        global_row=random.randint(1, 4), sliding_row=random.randint(1, 4),
    )  # fmt: skip
    longest = 60
    pool = geometry.held_bytes(longest) * (2_000 if roomy else random.randint(11, 40)) // 10
    sessions = Sessions(
        geometry, chunk=random.choice([3, 7, 60]), longest=longest, pool_bytes=pool, slots=4, stamped=False
    )
    sessions.roomy = roomy
    oracle = Oracle(sessions, patch)
    oracle.cache._most_unused = most_known = random.choice([3, 4096])
    texts: list[list[int]] = [[]]
    for _ in range(requests):
        base = random.choice(texts[-8:])
        prompt = base[: random.randint(0, len(base))] + [random.randint(1, 2) for _ in range(random.randint(1, 9))]
        prompt = prompt[: longest - 12]
        answer = [random.randint(1, 2) for _ in range(random.randint(1, 10))]
        tenant = random.choice(["", "", "", "other"])
        checkpoints = random.sample(range(1, len(prompt) + 1), k=min(len(prompt), random.choice([0, 0, 1])))
        sessions.add(prompt, answer, checkpoints=sorted(checkpoints), tenant=tenant, client=tenant)
        texts.append(prompt + answer)
        while sessions.scheduler.has_requests and (roomy or random.random() < 0.8):
            sessions.step()
    while sessions.scheduler.has_requests:
        sessions.step()
    sessions.scheduler.check_integrity()
    assert len(oracle.cache._unused) <= max(most_known, longest), "what is known by its hash alone is bounded"
    return oracle
