"""The requests of a load: bodies ready to send, made before the clock starts, and when they are sent."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from modelserve_worker.bench.prompts import PromptSource


@dataclass(frozen=True)
class Ask:
    """One request. Lengths in tokens; `exact` says that the answer must have exactly `output_tokens`, not at most."""

    number: int
    input_tokens: int
    output_tokens: int
    exact: bool
    body: bytes


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


def asks(prompts: PromptSource, options: AskOptions, *, first: int, count: int) -> list[Ask]:
    """Requests number `first` to `first + count - 1`. Raises BadInput."""
    return [_ask(prompts, options, number) for number in range(first, first + count)]


def _ask(prompts: PromptSource, options: AskOptions, number: int) -> Ask:
    prompt = prompts.prompt(number)
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": options.output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.chat:
        body["messages"] = [{"role": "user", "content": prompt.content}]
    else:
        body["prompt"] = prompt.content
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.min_tokens:
        body["min_tokens"] = options.output_tokens
    return Ask(
        number=number,
        input_tokens=prompt.tokens,
        output_tokens=options.output_tokens,
        exact=options.ignore_eos or options.min_tokens,
        body=json.dumps(body, separators=(",", ":")).encode(),
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
