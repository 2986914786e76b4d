"""The special tokens that give an answer its structure: thoughts, tool calls, and the quotes of a call's strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

THOUGHT_OPEN, THOUGHT_CLOSE = "<|channel>", "<channel|>"
_CLOSED_BY = (THOUGHT_CLOSE, "<|turn>", "<turn|>", "<tool_response|>")


@dataclass(frozen=True)
class Markers:
    """Token ids by role, taken from a vocabulary by name; None where the vocabulary lacks the token or its partner.

    Structure is read from ids alone: text that spells a marker in ordinary tokens is text.
    """

    thought_open: int | None
    thought_close: int | None
    call_open: int | None
    call_close: int | None
    quote: int | None
    response_open: int | None
    ends_thought: frozenset[int]  # tokens of a prompt behind which no thought is open

    @classmethod
    def of(cls, ids: Mapping[str, int]) -> Markers:
        """Markers of the vocabulary `ids` (token text to id)."""
        thought_open, thought_close = _pair(ids, THOUGHT_OPEN, THOUGHT_CLOSE)
        call_open, call_close = _pair(ids, "<|tool_call>", "<tool_call|>")
        return cls(
            thought_open=thought_open,
            thought_close=thought_close,
            call_open=call_open,
            call_close=call_close,
            quote=ids.get('<|"|>'),
            response_open=ids.get("<|tool_response>"),
            ends_thought=frozenset(ids[name] for name in _CLOSED_BY if name in ids),
        )

    def around_parts(self) -> Iterator[int]:
        """Tokens with which a thought or a call may begin or end, in no order."""
        for each in (self.thought_open, self.thought_close, self.call_open, self.call_close, self.response_open):
            if each is not None:
                yield each

    def tail_of_open_thought(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """What a prompt wrote into a thought that it left for the model to go on with; None when none is open."""
        for position in range(len(prompt) - 1, -1, -1):
            if prompt[position] == self.thought_open:
                return prompt[position + 1 :]
            if prompt[position] in self.ends_thought:
                return None
        return None


def _pair(ids: Mapping[str, int], opening: str, closing: str) -> tuple[int | None, int | None]:
    return (ids[opening], ids[closing]) if opening in ids and closing in ids else (None, None)


def without_thoughts(text: str) -> str:
    """What an answer says beside its thoughts, from its raw text: as Gemma's template takes them out of older turns."""
    if THOUGHT_OPEN not in text and THOUGHT_CLOSE not in text:
        return text
    return "".join(piece.split(THOUGHT_OPEN, 1)[0] for piece in text.split(THOUGHT_CLOSE))
