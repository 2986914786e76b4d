"""Prompts that the front end holds back, so that clients stay in turn, and that wait for nothing but steps."""

from __future__ import annotations

_RECENT_TOKENS = 65_536.0  # of prompts that were admitted last, by which it is judged how much is cached


class HeldBack:
    """What the front end said last, less what is likely to be cached: it cannot know, and steps compute only the rest.

    The number is replaced, never counted down: a request that left, there or here, is in no number that comes later.
    """

    def __init__(self) -> None:
        self._told = 0
        self._seen = self._computed = 0.0  # tokens of recent prompts, and those of them that were not cached

    def tell(self, prompt_tokens: int) -> None:
        """So many tokens are held back now, of each prompt at most a step's."""
        self._told = prompt_tokens

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time, with so many of its tokens cached."""
        kept = max(0.0, 1 - prompt_tokens / _RECENT_TOKENS)
        self._seen = kept * self._seen + prompt_tokens
        self._computed = kept * self._computed + prompt_tokens - cached_tokens

    @property
    def rows(self) -> int:
        """Rows that steps will have to compute of them."""
        return int(self._told * self._computed / self._seen) if self._seen else self._told
