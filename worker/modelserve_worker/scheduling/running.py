"""A request while it holds a slot and pages, and a step that was scheduled but not yet answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelserve_worker.batch import IN_FLIGHT, ScheduledRequest
from modelserve_worker.request import Request
from modelserve_worker.scheduling.page_table import PageTable


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One stay of a request on the device: from admission to its end or preemption."""

    request: Request
    slot: int
    table: PageTable
    most_cached_tokens: int
    tokens_in_flight: int = 0  # sampled, but not yet seen by the scheduler: 0 or 1 when a step is scheduled
    last_step: int = -1
    ended: bool = False  # what it still has in flight is discarded

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens, those in flight included."""
        return self.request.num_tokens + self.tokens_in_flight

    @property
    def remaining(self) -> int:
        """Positions that can be scheduled now; 0 once its last token is in flight."""
        return min(self.num_tokens, self.most_cached_tokens) - self.request.num_computed_tokens

    def scheduled(self, step: int, tokens: int) -> ScheduledRequest:
        """Commit the next `tokens` positions to `step`. Every page must be reserved: later moves would rename them."""
        request = self.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + tokens
        samples = end == self.num_tokens
        first = self.last_step < 0
        sliding_read, sliding_write = self.table.advance(end)
        scheduled = ScheduledRequest(
            request_id=request.request_id,
            slot=self.slot,
            sampling=request.sampling,
            start=start,
            token_ids=self._token_ids(start, end),
            global_pages=self.table.global_numbers(end),
            sliding_read=sliding_read,
            sliding_write=sliding_write,
            samples=samples,
            num_output_tokens=len(request.output_token_ids) + self.tokens_in_flight,
            first_in_slot=first,
            prompt_token_ids=request.prompt_token_ids if first else (),
            output_token_ids=tuple(request.output_token_ids) if first else (),
        )
        request.num_computed_tokens = end
        self.last_step = step
        self.tokens_in_flight += samples
        return scheduled

    def _token_ids(self, start: int, end: int) -> tuple[int, ...]:
        request = self.request
        if start == request.num_tokens:
            return (IN_FLIGHT,)
        prompt = len(request.prompt_token_ids)
        output = request.output_token_ids[max(0, start - prompt) : max(0, end - prompt)]
        return request.prompt_token_ids[start:end] + tuple(output)


@dataclass(slots=True)
class StepInFlight:
    """What the scheduler remembers of a step until its result comes."""

    step: int
    moves_pages: bool
    requests: list[RunningRequest] = field(default_factory=list)
    sampling: list[RunningRequest] = field(default_factory=list)  # those of `requests` that get a token
