"""What an endpoint takes, found by asking it: an API, token ids or text, the size of its vocabulary, whether answers
can be made as long as asked, and lengths that fit its context.

Only what no flag says is asked for. A probe is a request for one token; most endpoints take the first one as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from modelserve_tools.bench.flags import CHAT, COMPLETIONS, TEXT, TOKEN_IDS

DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 1024, 128
FIRST_TOKEN_ID = 1000  # the ids below are marks in many vocabularies
VOCAB_SIZE = 255_000  # of Gemma's 262,144 ids those that stand for text
_WORD = "apple"
_NO_ROUTE = (404, 405, 501)
_TEXT_SHARE = 2  # words and a chat's template take up to so many times the tokens that were asked for

Probe = Callable[[str, dict[str, Any]], Awaitable[tuple[int, str]]]
"""(api, fields of the body) -> status and what an error says. Raises NoEndpoint where nothing can be learned."""


class NothingTaken(Exception):  # noqa: N818 - reads as the reason it states
    """The endpoint refused every kind of request."""


@dataclass(frozen=True)
class Taken:
    """What requests are made of; `vocab_size` is one above the largest id that is sent."""

    api: str
    prompt: str
    first_token_id: int
    vocab_size: int
    ignore_eos: bool


async def find(flags: argparse.Namespace, probe: Probe) -> tuple[Taken, tuple[str, ...]]:
    """What the endpoint takes of what `flags` leave open, and what was found other than the defaults, in words.

    Raises NothingTaken.
    """
    first = Taken(
        api=flags.api or COMPLETIONS,
        prompt=flags.prompt or (TEXT if flags.api == CHAT else TOKEN_IDS),
        first_token_id=FIRST_TOKEN_ID if flags.first_token_id is None else flags.first_token_id,
        vocab_size=VOCAB_SIZE if flags.vocab_size is None else flags.vocab_size,
        ignore_eos=True if flags.ignore_eos is None else flags.ignore_eos,
    )
    if None not in (flags.api, flags.ignore_eos) and (first.prompt == TEXT or flags.vocab_size is not None):
        return first, ()
    refusals: list[str] = []
    for taken in _candidates(first, flags):
        status, said = await probe(taken.api, _fields(taken, taken.vocab_size - 1))
        if status == 200:
            return taken, _told(first, taken)
        refusals.append(said)
        if status in _NO_ROUTE and flags.api is None and taken.api == COMPLETIONS:
            continue
        if taken.prompt == TOKEN_IDS and flags.vocab_size is None:
            status, said = await probe(taken.api, _fields(taken, 1))
            if status == 200:
                found = await _with_vocabulary(taken, flags, probe)
                return found, _told(first, found)
            refusals.append(said)
    raise NothingTaken(f"it took no request; the first was refused with: {refusals[0]}")


def _candidates(first: Taken, flags: argparse.Namespace) -> list[Taken]:
    """Kinds of requests in the order in which they are tried: the nearest to what was wanted first."""
    kinds = [first]
    if flags.prompt is None and first.prompt == TOKEN_IDS:
        kinds.append(replace(first, prompt=TEXT))
    if flags.api is None and flags.prompt in (None, TEXT):
        kinds.append(replace(first, api=CHAT, prompt=TEXT))
    if flags.ignore_eos is None:
        kinds = [replace(kind, ignore_eos=value) for kind in kinds for value in (True, False)]
    return kinds


async def _with_vocabulary(taken: Taken, flags: argparse.Namespace, probe: Probe) -> Taken:
    """`taken` with the largest id that the endpoint takes; it takes id 1, and not the largest of `taken`."""
    low, high = 1, taken.vocab_size - 1
    while high - low > 1:
        middle = (low + high) // 2
        status, _ = await probe(taken.api, _fields(taken, middle))
        low, high = (middle, high) if status == 200 else (low, middle)
    first = min(taken.first_token_id, low // 2) if flags.first_token_id is None else taken.first_token_id
    if first > low:
        raise NothingTaken(f"it takes token ids up to {low}; --first-token-id {first} is above")
    return replace(taken, first_token_id=first, vocab_size=low + 1)


def _fields(taken: Taken, token_id: int) -> dict[str, Any]:
    if taken.api == CHAT:
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": _WORD}]}
    else:
        fields = {"prompt": _WORD if taken.prompt == TEXT else [token_id]}
    return fields | ({"ignore_eos": True} if taken.ignore_eos else {})


def _told(first: Taken, taken: Taken) -> tuple[str, ...]:
    told = []
    if taken.api != first.api:
        told.append("it has no completions: requests are chats")
    elif taken.prompt != first.prompt:
        told.append("it takes no token ids: prompts are words")
    if taken.vocab_size != first.vocab_size:
        told.append(f"it takes token ids up to {taken.vocab_size - 1}: prompts are of {taken.first_token_id} and above")
    if taken.ignore_eos != first.ignore_eos:
        told.append("it does not take ignore_eos: answers may be shorter than asked")
    return tuple(told)


def fitting(
    input_tokens: int | None, output_tokens: int | None, max_model_len: int | None, *, text: bool
) -> tuple[int, int, tuple[str, ...]]:
    """Lengths of prompts and answers: those that were asked for, else the defaults as far as the context has room for
    both, and what was found in words."""
    wanted = input_tokens or DEFAULT_INPUT_TOKENS, output_tokens or DEFAULT_OUTPUT_TOKENS
    if max_model_len is None or (input_tokens and output_tokens):
        return *wanted, ()
    answer = output_tokens or max(1, min(DEFAULT_OUTPUT_TOKENS, max_model_len // 4))
    room = max(1, (max_model_len - answer) // (_TEXT_SHARE if text else 1))
    prompt = input_tokens or min(DEFAULT_INPUT_TOKENS, room)
    if (prompt, answer) == wanted:
        return prompt, answer, ()
    return prompt, answer, (f"its context has {max_model_len} tokens: prompts of {prompt}, answers of {answer}",)
