"""The requests of a load: bodies ready to send, and when they are sent. Those of a session's first turn are made before
the clock starts, the others from the answers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from modelserve_tools.bench.prompts import PromptSource


@dataclass(frozen=True)
class Ask:
    """One request. Lengths in tokens; `exact` says that the answer must have exactly `output_tokens`, not at most.

    `follow` makes the next request of its session from the text of the answer; None where it is the last.
    """

    number: int
    input_tokens: int
    output_tokens: int
    exact: bool
    body: bytes
    turn: int = 1
    follow: Callable[[str], Ask] | None = None


@dataclass(frozen=True)
class AskOptions:
    """What all requests of a run share.

    `ignore_eos` and `min_tokens` make an answer as long as asked; neither is in OpenAI's own API. Without both an
    answer may end earlier.
    """

    model: str
    chat: bool
    output_tokens: int
    temperature: float
    ignore_eos: bool
    min_tokens: bool
    turns: int = 1  # requests of a session
    turn_tokens: int = 512  # new ones of each request behind the first


def asks(prompts: PromptSource, options: AskOptions, *, first: int, count: int) -> list[Ask]:
    """The first requests of sessions number `first` to `first + count - 1`. Raises BadInput."""
    return [_first(prompts, options, number) for number in range(first, first + count)]


def _first(prompts: PromptSource, options: AskOptions, number: int) -> Ask:
    prompt = prompts.prompt(number)
    turns = [prompts.continuation(number, turn, options.turn_tokens) for turn in range(2, options.turns + 1)]
    return _ask(options, number, [prompt.content], prompt.tokens, turns)


def _ask(
    options: AskOptions, number: int, said: list[list[int] | str], tokens: int, later: list[list[int] | str]
) -> Ask:
    """`said` are the user's parts and the answers between them, `later` what the user will say behind them.

    A prompt of token ids goes on behind the prompt before it: the API does not tell the ids of an answer.
    """
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": options.output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.chat:
        roles = itertools.cycle(("user", "assistant"))
        body["messages"] = [{"role": role, "content": part} for role, part in zip(roles, said, strict=False)]
    elif isinstance(said[0], str):
        body["prompt"] = " ".join(str(part).strip() for part in said)
    else:
        body["prompt"] = [token_id for part in said[::2] for token_id in part]
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.min_tokens:
        body["min_tokens"] = options.output_tokens

    def follow(answer: str) -> Ask:
        more = tokens + options.turn_tokens + (options.output_tokens if isinstance(said[0], str) else 0)
        return _ask(options, number, [*said, answer, later[0]], more, later[1:])

    return Ask(
        number=number,
        input_tokens=tokens,
        output_tokens=options.output_tokens,
        exact=options.ignore_eos or options.min_tokens,
        body=json.dumps(body, separators=(",", ":")).encode(),
        turn=options.turns - len(later),
        follow=follow if later else None,
    )


def arrivals(rate: float, *, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests arrive, without end: a Poisson process of `rate` per second.

    The gaps are drawn from the exponential distribution of mean 1 / rate; the first request arrives at 0.
    """
    rng = random.Random(f"bench {seed} arrivals {rate}")  # noqa: S311
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)
