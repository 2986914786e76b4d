"""Reads steps and answers them, for tests that look at a scheduler's decisions without a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelserve_worker.batch import AdmittedRequest, SampledTokens, ScheduledBatch
from modelserve_worker.request import Request, RequestOutput
from modelserve_worker.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Share:
    """One request's row of a step."""

    slot: int
    start: int
    end: int
    samples: bool
    output_count: int
    token_ids: tuple[int, ...]
    admitted: AdmittedRequest | None


class Step:
    """A step by request id, in order."""

    def __init__(self, batch: ScheduledBatch, holders: dict[int, str]) -> None:
        self.batch = batch
        admitted = {one.slot: one for one in batch.admitted}
        self.shares: dict[str, Share] = {}
        first = 0
        for i, slot in enumerate(batch.slots.tolist()):
            start, length = int(batch.starts[i]), int(batch.lengths[i])
            self.shares[holders[slot]] = Share(
                slot=slot,
                start=start,
                end=start + length,
                samples=bool(batch.drawn[i]),
                output_count=int(batch.output_counts[i]),
                token_ids=tuple(batch.token_ids[first : first + length].tolist()),
                admitted=admitted.get(slot),
            )
            first += length
        assert first == batch.num_tokens
        assert set(admitted) <= set(batch.slots.tolist()), "who is admitted is in the step"

    def __getitem__(self, name: str) -> Share:
        return self.shares[name]

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of each request."""
        return {name: share.end - share.start for name, share in self.shares.items()}


class Driver:
    """Drives a scheduler as the engine does, and recounts its bytes after every answer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._holders: dict[int, str] = {}  # request ids by slot

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def schedule(self) -> Step:
        step = self.poll()
        assert step is not None, "nothing to compute"
        return step

    def poll(self) -> Step | None:
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self._holders.update({one.slot: one.request_id for one in batch.admitted})
        return Step(batch, self._holders)

    def answer(self, step: Step, token: int = 7, **tokens: int) -> dict[str, RequestOutput]:
        """Every request samples `token`, or its own of `tokens` by name."""
        sampled = [tokens.get(name, token) for name, share in step.shares.items() if share.samples]
        outputs = self.scheduler.update(SampledTokens(step.batch.step, np.array(sampled, dtype=np.int32), {}))
        self.scheduler.check_integrity()
        return {output.request_id: output for output in outputs}

    def fail(self, step: Step, error: str = "out of order") -> dict[str, RequestOutput]:
        outputs = self.scheduler.fail(step.batch.step, error)
        self.scheduler.check_integrity()
        return {output.request_id: output for output in outputs}
