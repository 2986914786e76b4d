"""Which of several new tokens are a request's own, and what they end."""

from __future__ import annotations

import pytest

from modelserve_worker.batch import NOT_A_NUMBER
from modelserve_worker.request import FinishReason, Request, SamplingParams
from modelserve_worker.scheduling.stopping import Stopping, Verdict

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


class Constraint:
    """An answer that is whole behind `end`, and wrong behind `wrong`."""

    def __init__(self, *, end: int | None = None, wrong: int | None = None) -> None:
        self.end, self.wrong = end, wrong
        self.heard: list[int] = []

    @property
    def complete(self) -> bool:
        return self.heard[-1:] == [self.end]

    @property
    def error(self) -> str | None:
        return "it does not match" if self.heard[-1:] == [self.wrong] else None

    def consume(self, token_id: int) -> None:
        self.heard.append(token_id)

    def propose(self, token_id: int) -> bool: ...

    def roll_back(self, count: int) -> None: ...


def request(outputs: int = 0, *, min_tokens: int = 0, constraint: Constraint | None = None) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=99, min_tokens=min_tokens)
    return Request("r", (5, 6, 7), sampling, output_token_ids=[8] * outputs, constraint=constraint)


@pytest.mark.parametrize(
    ("outputs", "min_tokens", "tokens", "verdict"),
    [
        (0, 0, [30], Verdict(1)),
        (0, 0, [30, 31, 32], Verdict(3)),
        (0, 0, [30, 1, 32], Verdict(2, STOP, 1)),
        (0, 0, [1, 30, 1], Verdict(1, STOP, 1)),
        (2, 3, [1, 2, 30], Verdict(2, STOP, 2)),  # the third token may stop nothing, the fourth may
        (2, 9, [1, 2, 30], Verdict(3)),
        (5, 0, [30, 31, 32, 33], Verdict(2, LENGTH)),  # 3 + 5 + 2 tokens
        (6, 0, [1], Verdict(1, STOP, 1)),  # and not LENGTH, which it would be as well
        (6, 0, [30, 1], Verdict(1, LENGTH)),
    ],
)
def test_tokens_count_up_to_the_first_that_ends_the_request(outputs, min_tokens, tokens, verdict) -> None:
    stopping = Stopping(request(outputs, min_tokens=min_tokens), frozenset((1, 2)), 10)
    assert stopping.take(tokens) == verdict
    assert stopping.banned_token_ids == (1, 2)


def test_a_constraint_hears_what_counts_and_nothing_behind_it() -> None:
    constraint = Constraint(end=40, wrong=50)
    stopping = Stopping(request(constraint=constraint), frozenset((1,)), 100)
    assert stopping.banned_token_ids == (), "its masks see to that"
    assert stopping.take([30, 31]) == Verdict(2)
    assert stopping.take([32, 1, 33]) == Verdict(2, STOP, 1)
    assert constraint.heard == [30, 31, 32], "not the token that ended it"
    assert stopping.take([34, 40, 35]) == Verdict(2, STOP)
    assert constraint.heard == [30, 31, 32, 34, 40]
    assert stopping.take([36, 50, 37]) == Verdict(1, ERROR, error="it does not match")


def test_a_row_that_is_no_number_ends_the_request_behind_the_tokens_before_it() -> None:
    verdict = Stopping(request(4), frozenset(), 100).take([30, NOT_A_NUMBER])
    assert (verdict.count, verdict.reason) == (1, ERROR)
    assert "not numbers (NaN) at position 8" in (verdict.error or "")
