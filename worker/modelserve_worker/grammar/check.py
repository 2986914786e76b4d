"""Tries in the front end, which answers a refusal, whether a grammar can be compiled and followed: over bytes, not
tokens.

The library builds a grammar's states as an answer reaches them, so compiling says little of what following costs. A
walk through the grammar, along bytes that it allows, finds nearly all whose cost grows; the others end while they are
written (`GrammarMatcher.error`).
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.limits import parser_limits

_CHECKED_GRAMMARS = 128
_BYTE_TOKENS = 256
_SPECIAL_TOKENS = 1024  # ids of markers are below it
_EOS = 0
_WALKED_BYTES = 48


def check_grammar(source: str, *, field: str) -> None:
    """Raises InvalidInput with what is wrong. Takes milliseconds, tenths of a second at the limits; not on the loop."""
    error = _error(source)
    if error is not None:
        raise InvalidInput(f"{field}: {error}", field=field)


@lru_cache(maxsize=_CHECKED_GRAMMARS)
def _error(source: str) -> str | None:
    matcher = LLMatcher(_byte_tokenizer(), source, log_level=0, limits=parser_limits(source))
    if not matcher.is_error():
        _walk(matcher)
    if matcher.is_error():
        return _in_our_words(matcher.get_error())
    return None if matcher.is_accepting() or not matcher.is_stopped() else "no text at all matches it"


def _walk(matcher: LLMatcher) -> None:
    """Follow bytes that the grammar allows, the same ones every time, until it ends, errs, or some have passed."""
    rng = random.Random(0)  # noqa: S311 - which bytes is no secret
    mask = np.zeros(-(-(_SPECIAL_TOKENS + _BYTE_TOKENS) // 32), dtype=np.int32)
    for _ in range(_WALKED_BYTES):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_stopped():
            return
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != _EOS]
        if not len(allowed) or not matcher.consume_token(int(rng.choice(allowed))):
            return


def _in_our_words(error: str) -> str:
    first, *others = error.strip().splitlines()
    reasons = [line.strip() for line in others if line.strip().startswith("error: ")]  # of a regular expression
    if reasons:
        return f"{first.removesuffix(':')}: {reasons[0].removeprefix('error: ')}"
    unimplemented, _, keys = first.partition("Unimplemented keys: ")
    if keys:
        return f"{unimplemented}the keywords {keys.strip('[]')} cannot be followed; leave them out"
    if first == "NoExtensionBias":  # the library has no other words for it
        return "a rule leads back to itself and to no text"
    if any(sign in first for sign in _EXCEEDED):
        return f"too expensive to follow: {first}. Make it less ambiguous, or smaller"
    return first.partition("; following special tokens are available")[0]


_EXCEEDED = ("Too many items", "Current row has", "too many states", "too many expressions", "fuel exhausted")


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


class _Bytes:
    """A vocabulary of markers, at the ids that models have them, and behind them a token for each byte."""

    tokens = [b"<%d>" % i for i in range(_SPECIAL_TOKENS)] + [bytes([i]) for i in range(_BYTE_TOKENS)]
    special_token_ids = list(range(_SPECIAL_TOKENS))  # noqa: RUF012
    eos_token_id = _EOS
    bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return [_SPECIAL_TOKENS + byte for byte in (text if isinstance(text, bytes) else text.encode())]
