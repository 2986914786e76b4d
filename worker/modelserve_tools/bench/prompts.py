"""Seeded prompts: token ids or words, of one length or of drawn lengths, with or without a prefix that all share."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass, field

from modelserve_tools.evaluation.publishing import BadInput
from modelserve_tools.evaluation.words import SORTABLE_WORDS, VALUES

UNIFORM, LOG_UNIFORM = "uniform", "log-uniform"
_WORDS = (*SORTABLE_WORDS, *VALUES)
_ATTEMPTS = 100


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths in tokens, from `low` to `high`, both included; `distribution` is UNIFORM or LOG_UNIFORM."""

    low: int
    high: int
    distribution: str = UNIFORM

    def draw(self, rng: random.Random) -> int:
        if self.distribution == UNIFORM:
            return rng.randint(self.low, self.high)
        # Over low..high+1, rounded down: each whole number has the weight log((n + 1) / n).
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high + 1)))
        return min(self.high, max(self.low, int(drawn)))


@dataclass(frozen=True)
class Prompt:
    """`tokens` is the length that was asked for. Words are about one token each; the server's usage says how many."""

    tokens: int
    content: list[int] | str


@dataclass
class PromptSource:
    """Prompts number 0, 1, ...: the same seed and number give the same prompt, and no two of a source are equal.

    Token ids are drawn from `token_ids`; None draws words instead. The first `shared_prefix_tokens` are the same in
    every prompt.
    """

    seed: int
    lengths: Lengths
    token_ids: range | None
    shared_prefix_tokens: int = 0
    _seen: set[bytes] = field(default_factory=set)
    _prefix: list[int] | list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(f"bench {self.seed} prefix")  # noqa: S311 - prompts are no secrets
        self._prefix = self._drawn(rng, self.shared_prefix_tokens)

    def prompt(self, number: int) -> Prompt:
        """Raises BadInput when the lengths and ids allow too few different prompts."""
        for attempt in range(_ATTEMPTS):
            rng = random.Random(f"bench {self.seed} {number} {attempt}")  # noqa: S311
            tokens = self.lengths.draw(rng)
            parts = [*self._prefix, *self._drawn(rng, tokens - len(self._prefix))]
            digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
            if digest not in self._seen:
                self._seen.add(digest)
                content = [int(part) for part in parts] if self.token_ids is not None else " ".join(map(str, parts))
                return Prompt(tokens, content)
        raise BadInput(
            f"prompts of {self.lengths.low} to {self.lengths.high} tokens, {len(self._prefix)} of them shared: after "
            f"{len(self._seen)} prompts no new one was found; ask for longer prompts or fewer requests"
        )

    def continuation(self, number: int, turn: int, tokens: int) -> list[int] | str:
        """What is new in a later turn of session `number`."""
        parts = self._drawn(random.Random(f"bench {self.seed} {number} turn {turn}"), tokens)  # noqa: S311
        return [int(part) for part in parts] if self.token_ids is not None else " ".join(map(str, parts))

    def _drawn(self, rng: random.Random, count: int) -> list[int] | list[str]:
        return rng.choices(_WORDS if self.token_ids is None else self.token_ids, k=count)  # type: ignore[return-value]
