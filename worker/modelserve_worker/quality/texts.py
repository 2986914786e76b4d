"""The texts that caches are compared over: the same in every worker of a release, made from seeds. Torch-free.

Four registers, since caches lose on some what they keep on others: prose, instructions with answers, code, and tables
of numbers. The fifth is as long as the plan allows: prose with facts, of some tokens each, that its end asks for, so
that a row far back counts. What is compared are tokens that stand there, so no text is generated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Encode = Callable[[str], Sequence[int]]

SHORT_TOKENS, LONG_TOKENS = 768, 32_768
LEAST_TOKENS = 32  # fewer say nothing
COMPARED_TOKENS = 1024  # of the long text, the last ones: they see all of it
FACTS, FACT_TOKENS = 4, 6
DEPTHS = (0.05, 0.3, 0.55, 0.8)  # of the long text, where its facts stand

_WHO = ("the harbour office", "her brother", "a retired engineer", "the council", "our neighbour", "the night train")
_DOES = ("finds", "describes", "repairs", "forgets", "sends back", "measures", "argues about", "pays for")
_WHAT = ("an old map", "the second bridge", "a box of letters", "the water pump", "three small rooms", "a long report")
_HOW = ("before the winter", "without a word", "in the rain", "for the third time", "at noon", "as agreed in May")
_NAMES = ("total", "index", "path", "values", "left", "limit", "record", "buffer")
_CALLS = ("read", "append", "merge", "split", "check", "close")
_PLACES = ("northern", "southern", "eastern", "western")


@dataclass(frozen=True)
class TrialText:
    """`tokens`, of which those from `compared` on are compared; `facts`: first positions of facts that are asked for,
    of FACT_TOKENS tokens each."""

    tokens: tuple[int, ...]
    compared: int
    facts: tuple[int, ...] = ()


def trial_texts(encode: Encode, *, first: Sequence[int], max_model_len: int) -> list[TrialText]:
    """The texts in tokens: `encode` knows words, `first` begins each. What a tokenizer or the context leaves fewer than
    LEAST_TOKENS of is no text. Room for one token more is left."""
    room = max_model_len - 1
    made = []
    for seed, sentences in enumerate((_prose, _instructions, _code, _numbers)):
        tokens = (*first, *_words(encode, sentences(_seeded(seed)), SHORT_TOKENS))[:room]
        made.append(TrialText(tokens, 1))
    made.append(_long_text(encode, first, min(LONG_TOKENS, room)))
    return [text for text in made if len(text.tokens) >= LEAST_TOKENS]


def _long_text(encode: Encode, first: Sequence[int], length: int) -> TrialText:
    """Facts are a beginning in words and some of the text's own tokens, drawn: nothing but the text itself tells how
    they go on."""
    rng = _seeded(5)
    begins = [tuple(encode(f" The number of the {place} archive is")) for place in _PLACES]
    size = sum(map(len, begins)) + FACTS * FACT_TOKENS
    filler = list(_words(encode, _prose(rng), max(0, length - len(first) - 2 * size)))
    known = sorted(set(filler))
    if len(known) <= FACT_TOKENS:  # of a tokenizer that has none of these words
        return TrialText((*first, *filler), 1)
    facts = [(begin, tuple(rng.choices(known, k=FACT_TOKENS))) for begin in begins]
    tokens, at = list(first), 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        end = int(depth * len(filler))
        tokens += [*filler[at:end], *fact[0], *fact[1]]
        at = end
    tokens += filler[at:]
    asked = []
    for begin, number in facts:
        tokens += begin
        asked.append(len(tokens))
        tokens += number
    return TrialText(tuple(tokens), max(1, len(tokens) - COMPARED_TOKENS), tuple(asked))


def _seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - the same texts everywhere


def _words(encode: Encode, sentences: Iterator[str], count: int) -> tuple[int, ...]:
    """So many tokens of these sentences; fewer of a tokenizer that has nothing for most."""
    tokens: list[int] = []
    for _, sentence in zip(range(count), sentences, strict=False):
        if len(tokens) >= count:
            break
        tokens += encode(sentence)
    return tuple(tokens[:count])


def _prose(rng: random.Random) -> Iterator[str]:
    while True:
        who, other = rng.sample(_WHO, 2)
        sentence = f"{who} {rng.choice(_DOES)} {rng.choice(_WHAT)} {rng.choice(_HOW)}, and {other} {rng.choice(_DOES)} "
        yield f" {sentence[0].upper()}{sentence[1:]}{rng.choice(_WHAT)}."


def _instructions(rng: random.Random) -> Iterator[str]:
    while True:
        what, who = rng.choice(_WHAT), rng.choice(_WHO)
        yield f"\nQuestion: Who {rng.choice(_DOES)} {what}?\nAnswer: It is {who}, {rng.choice(_HOW)}.\n"


def _code(rng: random.Random) -> Iterator[str]:
    while True:
        one, other = rng.sample(_NAMES, 2)
        call = rng.choice(_CALLS)
        yield f"def {call}_{one}({other}):\n    {one} = {other}.{call}({rng.randint(0, 99)})\n    return {one}\n\n"


def _numbers(rng: random.Random) -> Iterator[str]:
    while True:
        a, b = rng.randint(10, 999), rng.randint(10, 999)
        yield f"| {rng.choice(_NAMES)} | {a} | {b} | {a + b} |\n"
