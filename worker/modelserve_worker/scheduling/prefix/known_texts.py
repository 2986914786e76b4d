"""What earlier requests went on with behind the tokens of a prompt: what prompt lookup looks in beside the prompt.

Found by the hashes that a prefix cache knows texts by (token_chain.py), so a request hears nothing of those that it
shares no rows with. The same prompt is followed by its latest answer; one that parts from a text within
PAGES_BEFORE of the end of its prompt, as one whose question was edited does, by what is behind the place where they
part. Tokens alone are kept, of the last pages of a prompt and of its answer: 4 bytes each, so many in all, as which
the keys count too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from modelserve_worker.batch import Int32Array
from modelserve_worker.scheduling.prefix.token_chain import TokenChain

MOST_TOKENS = 1 << 23  # 32 MiB
PAGES_BEFORE = 32  # of a prompt's end, in which others may part from it
LONGEST = 4096  # tokens that a request is given: its answer seldom comes to more of them
_KEY_TOKENS = 64  # that a key takes the memory of, in two tables and by itself
_NOTHING = np.zeros(0, dtype=np.int32)


class _Text:
    """Tokens from position `first` on, and `keys` that it is found by."""

    __slots__ = ("cost", "first", "keys", "tokens")

    def __init__(self, first: int, tokens: Int32Array, keys: Iterable[bytes]) -> None:
        self.first = first
        self.tokens = tokens
        self.keys = set(keys)
        self.cost = len(tokens) + _KEY_TOKENS * len(self.keys)


class KnownTexts:
    """Of one engine, whose chains have pages of `page_tokens`. One thread calls it."""

    def __init__(self, page_tokens: int, most_tokens: int = MOST_TOKENS) -> None:
        self._size, self._most_tokens = page_tokens, most_tokens
        self._texts: OrderedDict[_Text, None] = OrderedDict()  # the oldest first
        self._by_key: dict[bytes, _Text] = {}
        self.num_tokens = 0  # with those that keys count as

    def remember(self, chain: TokenChain, prompt: int) -> None:
        """A request with these tokens has ended, `prompt` of which it was sent."""
        last = prompt // self._size
        first = max(0, last - PAGES_BEFORE)
        end = min(len(chain), prompt + LONGEST)
        keys = [self._exact_key(chain, prompt), *(chain.digest(pages) for pages in range(max(1, first), last + 1))]
        text = _Text(first * self._size, chain.tokens(first * self._size, end).copy(), keys)
        for key in text.keys:
            if (earlier := self._by_key.get(key)) is not None:
                self._lose(earlier, key)
            self._by_key[key] = text
        self._texts[text] = None
        self.num_tokens += text.cost
        while self.num_tokens > self._most_tokens:
            oldest = next(iter(self._texts))
            for key in list(oldest.keys):
                del self._by_key[key]
                self._lose(oldest, key)

    def following(self, chain: TokenChain, prompt: int) -> Int32Array:
        """What may follow the first `prompt` tokens, or what is like what may follow: [0 to LONGEST]."""
        last = prompt // self._size
        earlier = (chain.digest(pages) for pages in range(last, max(0, last - PAGES_BEFORE), -1))
        for text in filter(None, map(self._by_key.get, (self._exact_key(chain, prompt), *earlier))):
            own = chain.tokens(text.first, prompt)
            length = min(len(own), len(text.tokens))
            differ = np.flatnonzero(own[:length] != text.tokens[:length])
            same = int(differ[0]) if len(differ) else length
            if same < len(text.tokens):
                return text.tokens[same : same + LONGEST]
        return _NOTHING

    def _exact_key(self, chain: TokenChain, prompt: int) -> bytes:
        """Of all of a prompt: no hash of pages begins like it and is as long."""
        pages = prompt // self._size
        return b"=" + chain.digest(pages) + chain.tokens(pages * self._size, prompt).tobytes()

    def _lose(self, text: _Text, key: bytes) -> None:
        text.keys.remove(key)
        if not text.keys:
            del self._texts[text]
            self.num_tokens -= text.cost
