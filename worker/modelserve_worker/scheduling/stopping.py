"""Decides when a request ends by what it says. Nothing else decides it, but for stop strings, which need text: the
front end finds them and cuts the answer there (`server/answers/sequences.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelserve.errors import InvalidInput
from modelserve_worker.batch import NOT_A_NUMBER
from modelserve_worker.request import FinishReason, PromptLogprobs, Request, RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of some new tokens belong to the request, and what ended it, if anything did."""

    count: int
    reason: FinishReason | None = None
    stop_token_id: int | None = None  # the last of the tokens, where it ended the request
    error: str | None = None
    error_field: str | None = None  # of the request, where the error is its client's doing

    def outputs(
        self,
        request_id: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: PromptLogprobs | None,
        drafts: int,
    ) -> list[RequestOutput]:
        """What is said of the `count` tokens of a step that verified `drafts`. Those before the one that a request
        fails at are said first, as if each had come with a step of its own."""
        said = RequestOutput(
            request_id, tuple(token_ids), self.reason, self.stop_token_id, self.error, self.error_field,
            tuple(logprobs), prompt_logprobs=prompt_logprobs, drafts=drafts,
        )  # fmt: skip
        if self.reason is not FinishReason.ERROR or not token_ids:
            return [said]
        failed = RequestOutput(request_id, (), self.reason, error=self.error, error_field=self.error_field)
        return [said._replace(finish_reason=None, error=None, error_field=None), failed]


class Stopping:
    """The rules of one request: stop tokens behind `min_tokens`, a constraint, and `most_tokens` of prompt and answer.

    `stop_token_ids` are its own and, unless it ignores them, the model's.
    """

    def __init__(self, request: Request, stop_token_ids: frozenset[int], most_tokens: int) -> None:
        self._request = request
        self._stop_token_ids = stop_token_ids
        self._most_tokens = most_tokens
        self._telling = stop_token_ids | {NOT_A_NUMBER}

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that sampling leaves out below `min_tokens`: those that would end the request. A constraint's masks
        see to that themselves, and never leave it without a token; but for those of a thinking budget alone."""
        request = self._request
        masked = request.constraint is not None and (request.grammar is not None or request.thinking_budget is None)
        return () if masked else tuple(sorted(self._stop_token_ids))

    def goes_on(self, token_id: int) -> bool:
        """Whether one more token surely ends nothing, and nobody needs to hear of it: nearly always, and quickly."""
        request = self._request
        return (
            token_id not in self._telling
            and request.constraint is None
            and len(request.prompt_token_ids) + len(request.output_token_ids) + 1 < self._most_tokens
        )

    def take(self, token_ids: Sequence[int]) -> Verdict:
        """Judge the tokens that follow those the request has, in order; its constraint hears those that count."""
        known, sampled = self._request.num_tokens, len(self._request.output_token_ids)
        constraint = self._request.constraint
        if constraint is not None and constraint.error is not None:  # while its mask was computed: any token came
            return _failed(0, constraint.error)
        for index, token_id in enumerate(token_ids):
            count = index + 1
            if token_id == NOT_A_NUMBER:
                return Verdict(index, FinishReason.ERROR, error=_not_a_number(known + index))
            if token_id in self._stop_token_ids and sampled + count > self._request.sampling.min_tokens:
                return Verdict(count, FinishReason.STOP, stop_token_id=token_id)
            if constraint is not None:
                constraint.consume(token_id)
                if constraint.error is not None:
                    return _failed(index, constraint.error)
                if constraint.complete:
                    return Verdict(count, FinishReason.STOP)
            if known + count >= self._most_tokens:
                return Verdict(count, FinishReason.LENGTH)
        return Verdict(len(token_ids))


def _failed(count: int, error: Exception) -> Verdict:
    field = error.field if isinstance(error, InvalidInput) else None
    return Verdict(count, FinishReason.ERROR, error=str(error), error_field=field)


def _not_a_number(position: int) -> str:
    return (
        f"the logits of this request are not numbers (NaN) at position {position}, so no token can be drawn; "
        "other requests go on. Send it again; if it fails again, the weights are damaged or overflow in their "
        "dtype: compare the checkpoint's files with their source"
    )
