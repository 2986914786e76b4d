"""Whether a grammar can be compiled, asked in the front end, which answers a refusal: over bytes, not tokens."""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.limits import parser_limits

_CHECKED_GRAMMARS = 128
_BYTE_TOKENS = 256
_SPECIAL_TOKENS = 1024  # ids of markers are below it


def check_grammar(source: str, *, field: str) -> None:
    """Raises InvalidInput with what is wrong. Takes milliseconds, tenths of a second at the limits; not on the loop."""
    error = _error(source)
    if error is not None:
        raise InvalidInput(f"{field}: {error}", field=field)


@lru_cache(maxsize=_CHECKED_GRAMMARS)
def _error(source: str) -> str | None:
    matcher = LLMatcher(_byte_tokenizer(), source, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults show with the first mask only
    if matcher.is_error():
        return _in_our_words(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        return "no text at all matches it"
    return None


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
    return first.partition("; following special tokens are available")[0]


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


class _Bytes:
    """A vocabulary of markers, at the ids that models have them, and behind them a token for each byte."""

    tokens = [b"<%d>" % i for i in range(_SPECIAL_TOKENS)] + [bytes([i]) for i in range(_BYTE_TOKENS)]
    special_token_ids = list(range(_SPECIAL_TOKENS))  # noqa: RUF012
    eos_token_id = 0
    bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return [_SPECIAL_TOKENS + byte for byte in (text if isinstance(text, bytes) else text.encode())]
