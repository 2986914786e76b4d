"""What came of one request."""

from __future__ import annotations

from itertools import pairwise

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Seconds count from the moment the request was sent, `sent_s` from the start of its load.

    `input_tokens` is what was asked for, `prompt_tokens` what the server counted (None where it does not tell).
    `output_tokens` is the server's count, or the number of events where it sends no usage. `event_s` has one time per
    event that brought tokens. `late_s` is how long after its planned arrival an open loop sent it. A record with an
    `error_kind` is of a failed request and counts for nothing else. `turn` is its place in its session, `cached_tokens`
    what the server says that it found in its prefix cache.
    """

    model_config = ConfigDict(frozen=True)

    number: int
    turn: int = 1
    input_tokens: int
    sent_s: float
    late_s: float = 0.0
    end_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    usage_sent: bool = False
    event_s: list[float] = []
    finish_reason: str | None = None
    wrong_length: str | None = None
    error_kind: str | None = None
    error: str | None = None
    answer: str = Field(default="", exclude=True)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.event_s[0] if self.event_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, (last - first) / (n - 1); None below two tokens."""
        if self.output_tokens < 2 or not self.event_s:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive events that brought tokens."""
        return [later - earlier for earlier, later in pairwise(self.event_s)]
