"""Log probabilities of tokens that share a text: parts of characters are all written U+FFFD."""

from __future__ import annotations

import math

from modelserve_worker.request import TokenLogprobs
from modelserve_worker.server.logprobs import CompletionLogprobs
from modelserve_worker.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary((b"a", b"\xf0", b"\xf1", b"\xf2"), frozenset(), {})
A, F0, F1, F2 = range(4)
LIKELY, POSSIBLE, RARE = math.log(0.6), math.log(0.3), math.log(0.1)


def _top(chosen: int, logprob: float, *alternatives: tuple[int, float]) -> dict[str, float]:
    told = CompletionLogprobs(VOCABULARY).take([(chosen, TokenLogprobs(logprob, 1, alternatives))])
    assert told["token_logprobs"] == [logprob]
    return told["top_logprobs"][0]


def test_the_likeliest_of_tokens_with_one_text_is_listed() -> None:
    assert _top(A, RARE, (F0, LIKELY), (F1, POSSIBLE), (A, RARE)) == {"a": RARE, "\ufffd": LIKELY}


def test_the_chosen_token_keeps_its_own_log_probability() -> None:
    """Whoever looks for a greedy token compares it with the largest of the list."""
    assert _top(F0, LIKELY, (F0, LIKELY), (F1, POSSIBLE), (A, RARE)) == {"\ufffd": LIKELY, "a": RARE}
    assert _top(F2, RARE, (A, LIKELY), (F1, POSSIBLE)) == {"\ufffd": RARE, "a": LIKELY}
