"""What a router may know of the prefix cache: which global pages a request with the same tokens would find.

Those are the full pages before live prefixes; a page that nothing live stands behind is not told, or routers would send
requests for what they cannot find. A router counts the pages at the start of a prompt, so one that parts from a text
long before its prefix is sent here for less than the router believes: it finds the prefix before that, or the junction.

Each event is what vLLM publishes since its events are maps (vllm/distributed/kv_events.py; vllm-project/vllm#42892), of
group 0, the global layers'. What sliding layers keep is no event of its own. A block's hash is the first 64 bits of the
chain's, which begins with whose tokens they are; a router makes hashes of its own, of tokens and extra keys, so keys of
others than nobody's requests are the extra keys of the first block, and those of images and sounds of the blocks that
have rows of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from modelserve_worker.scheduling.pages.arena import Page
from modelserve_worker.scheduling.prefix.cached_prefix import Block, CachedPrefix
from modelserve_worker.scheduling.prefix.token_chain import TokenChain

Event = dict[str, Any]
GROUP = {"medium": "GPU", "group_idx": 0}


class CacheEvents:
    """Follows the prefixes of one cache, whose pages have `page_tokens` tokens, and hands events to `publish`."""

    def __init__(self, page_tokens: int, publish: Callable[[list[Event]], None]) -> None:
        self._page_tokens = page_tokens
        self._publish = publish
        self._told = 0  # prefixes that are live, or about to be told that they are not
        self._uses: Counter[bytes] = Counter()  # by digest: told prefixes that end there, and told blocks behind it
        self._events: list[Event] = []

    def left(self, prefix: CachedPrefix[Page], chain: TokenChain, *, tenant: str, salt: str) -> None:
        """`prefix` is live, and its request has these tokens and whoever they are shared with."""
        if prefix.told:
            return
        prefix.told, self._told = True, self._told + 1
        new: list[Block[Page]] = []
        for block in _blocks(prefix.block):
            self._uses[block.digest] += 1
            if self._uses[block.digest] > 1:
                break
            new.append(block)
        if not new:
            return
        first, size = new[-1], self._page_tokens
        assert first.parent is not None
        beginning = first.parent.parent is None
        keys = [key for key in (tenant, salt) if key] if beginning else []
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [_hash(block) for block in reversed(new)],
                "parent_block_hash": None if beginning else _hash(first.parent),
                "token_ids": chain.tokens((first.depth - 1) * size, prefix.block.depth * size).tolist(),
                "block_size": size,
                "lora_id": None,
                "lora_name": None,
                "extra_keys": [
                    [*(keys if block is first else ()), *_span_keys(chain, block, size)] or None
                    for block in reversed(new)
                ],
                "kv_cache_spec_kind": "full_attention",
                **GROUP,
            }
        )

    def tell(self, gone: Sequence[CachedPrefix[Page]]) -> None:
        """Publish what has changed; of the prefixes told of, `gone` are no longer live."""
        self._told -= len(gone)
        removed: list[int] = []
        for prefix in gone:
            for block in _blocks(prefix.block):
                self._uses[block.digest] -= 1
                if self._uses[block.digest]:
                    break
                del self._uses[block.digest]
                removed.append(_hash(block))
        if gone and not self._told:
            self._events.append({"type": "AllBlocksCleared"})
        elif removed:
            self._events.append({"type": "BlockRemoved", "block_hashes": removed, **GROUP})
        if self._events:
            events, self._events = self._events, []
            self._publish(events)


def _blocks(last: Block[Page]) -> Iterator[Block[Page]]:
    """From `last` to the first block of its chain, without the root, which has no tokens."""
    block: Block[Page] | None = last
    while block is not None and block.parent is not None:
        yield block
        block = block.parent


def _span_keys(chain: TokenChain, block: Block[Page], size: int) -> list[str]:
    return [mark.key.hex() for mark in chain.marks((block.depth - 1) * size, block.depth * size)]


def _hash(block: Block[Page]) -> int:
    return int.from_bytes(block.digest[:8], "big")
