"""What a request without numbers, or a failed step, costs those who share a cache with it: what it wrote."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from prefix_sessions import MODEL, Sessions, text

from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import NOT_A_NUMBER, PageCheck, SampledTokens, ScheduledBatch
from modelserve_worker.request import FinishReason, Request, RequestOutput

GEOMETRY = MODEL.geometry(window=128, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1)
A_PREFIX, B_PREFIX = text(1, 1_000), text(2, 1_000)
DAMAGED = text(9, 5)  # a request with these tokens has no numbers, for reasons of its own


class Damaged(Sessions):
    """Requests that end with DAMAGED have no numbers; nor have those that read a page whose number is in `poisoned`."""

    def __init__(self, geometry: CacheGeometry = GEOMETRY, **fields: object) -> None:
        super().__init__(geometry, stamped=False, longest=3_000, **fields)  # type: ignore[arg-type]
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.checks: list[PageCheck] = []
        self.poisoned: Collection[int] = ()  # numbers of global pages

    def answer(self, batch: ScheduledBatch) -> list[RequestOutput]:
        self.holders |= {each.slot: each.request_id for each in batch.admitted}
        drawing = batch.drawn > 0
        ends, slots = (batch.starts + batch.lengths)[drawing].tolist(), batch.slots[drawing].tolist()
        tokens = [self.drawn(self.holders[slot], end) for slot, end in zip(slots, ends, strict=True)]
        self.checks += batch.checks
        unsound = tuple(index for index, check in enumerate(batch.checks) if check.page in self.poisoned)
        sampled = SampledTokens(batch.step, np.array(tokens, dtype=np.int32), {}, unsound=unsound)
        outputs = self.scheduler.update(sampled)
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.scheduler.check_integrity()
        return outputs

    def drawn(self, name: str, end: int) -> int:
        damaged = self.texts[name][end - len(DAMAGED) : end] == DAMAGED
        return NOT_A_NUMBER if damaged or self.reads_poison(name) else self._token_at(name, end)

    def reads_poison(self, name: str) -> bool:
        running = self.scheduler._running.by_id.get(name)
        pages = () if running is None else running.table._global
        return any(page.number in self.poisoned for page in pages)

    def error(self, prompt: list[int], **fields: str) -> str | None:
        """What a request ends with, if it is an error."""
        request = self.run(prompt, **fields)
        last = self.outputs[request.request_id][-1]
        return last.error if last.finish_reason is FinishReason.ERROR else None

    def run(self, prompt: list[int], **fields: str) -> Request:
        request = self.add(prompt, **fields)
        while self.scheduler.has_requests:
            self.step()
        return request

    def answered(self) -> None:
        """The device has looked at what it was asked for."""
        while self.scheduler.prefixes.has_checks:
            self.step()


@pytest.fixture
def served() -> Damaged:
    sessions = Damaged()
    for prefix, tenant in ((A_PREFIX, "a"), (B_PREFIX, "b"), (B_PREFIX, "a")):
        assert sessions.ask(prefix, tenant=tenant) == 0
    return sessions


def test_a_request_without_numbers_costs_nobody_else_a_prefix(served: Damaged) -> None:
    assert "not numbers" in (served.error(A_PREFIX + text(4, 300) + DAMAGED, tenant="a") or "")
    served.answered()
    assert served.ask(B_PREFIX, tenant="b") == 999, "another tenant's"
    assert served.ask(B_PREFIX, tenant="a") == 999, "its own tenant's other one"
    assert served.ask(A_PREFIX + text(5, 300), tenant="a") == 1_000, "and the one that it has only read"


def test_what_it_wrote_is_found_by_nobody(served: Damaged) -> None:
    prompt = A_PREFIX + text(4, 300)
    assert served.error(prompt + DAMAGED, tenant="a")
    served.answered()
    assert served.ask(prompt + text(5, 10), tenant="a") == 1_000


def test_one_that_resumed_behind_it_before_that_was_known_loses_its_rows_as_well() -> None:
    sessions = Damaged(chunk=512)
    prompt = text(3, 1_500)
    slow = sessions.add(prompt + DAMAGED)
    sessions.step()
    sessions.step()
    follower = sessions.add(prompt[:1_100] + text(4, 20))
    while not sessions.outputs.get(slow.request_id):
        sessions.step()
    assert follower.cached_tokens == 1_024, "where a chunk of the first one ended"
    while sessions.scheduler.has_requests:
        sessions.step()
    assert sessions.ask(prompt[:1_100] + text(4, 20)) == 0


def test_pages_that_it_has_read_are_of_no_use_until_they_were_looked_at(served: Damaged) -> None:
    assert served.error(A_PREFIX + text(4, 300) + DAMAGED, tenant="a")
    assert served.ask(A_PREFIX + text(5, 300), tenant="a") == 0
    assert {check.rows for check in served.checks} >= {64, 1_000 % 64, 1_000 % 32}
    assert served.ask(A_PREFIX + text(6, 300), tenant="a") == 1_000


def test_who_provokes_it_again_and_again_keeps_nobody_from_sound_pages(served: Damaged) -> None:
    assert served.error(A_PREFIX + text(4, 300) + DAMAGED, tenant="a")
    served.answered()
    for seed in range(10, 15):
        assert served.error(A_PREFIX + text(seed, 300) + DAMAGED, tenant="a")
        assert served.ask(A_PREFIX + text(seed + 10, 300), tenant="a") == 1_000
        assert served.scheduler.prefixes.has_checks is False, "they are looked at each time all the same"
    assert len(served.checks) > 5 * 16


@pytest.mark.parametrize("looked_at_before", [False, True])
def test_a_shared_page_that_is_poisoned_costs_one_error_and_is_computed_again(
    looked_at_before: bool, served: Damaged
) -> None:
    if looked_at_before:
        assert served.error(A_PREFIX + text(3, 300) + DAMAGED, tenant="a")
        served.answered()
    prefix = next(each for each in served.reuse.cache.prefixes if each.end == 1_000)
    page = next(block.page for block in prefix.block.upwards() if block.depth == 5)
    assert page is not None
    served.poisoned = {page.number}
    assert served.error(A_PREFIX + text(4, 300), tenant="a")
    served.answered()
    served.poisoned = ()  # whoever gets its memory writes it before it reads it
    assert served.run(A_PREFIX + text(5, 300), tenant="a").cached_tokens == 0
    assert served.ask(A_PREFIX + text(6, 300), tenant="a") == 960, "in whole pages, as a known way is found"
    assert served.ask(B_PREFIX, tenant="b") == 999


def test_a_failed_step_costs_what_its_requests_wrote(served: Damaged) -> None:
    served.add(A_PREFIX + text(4, 300), tenant="a")
    batch = served.scheduler.schedule()
    assert batch is not None
    assert len(served.scheduler.fail(batch.step, "out of order")) == 1
    served.scheduler.check_integrity()
    assert served.ask(B_PREFIX, tenant="b") == 999
    assert served.ask(A_PREFIX + text(4, 300), tenant="a") == 1_000


def test_a_failed_step_with_another_behind_it_leaves_nothing_that_is_believed(served: Damaged) -> None:
    """That one has written wherever the tables of the failed one pointed."""
    served.add(A_PREFIX + text(4, 1_500), tenant="a")
    first = served.scheduler.schedule()
    served.add(text(5, 100), tenant="b")
    second = served.scheduler.schedule()
    assert first is not None
    assert second is not None
    served.scheduler.fail(first.step, "out of order")
    served.answer(second)
    while served.scheduler.has_requests:
        served.step()
    assert served.ask(B_PREFIX, tenant="b") == 0


def test_a_check_whose_step_failed_is_asked_again(served: Damaged) -> None:
    assert served.error(A_PREFIX + text(4, 300) + DAMAGED, tenant="a")
    batch = served.scheduler.schedule()
    assert batch is not None
    assert batch.checks
    assert batch.num_requests == 0
    served.scheduler.fail(batch.step, "out of order")
    again = served.scheduler.schedule()
    assert again is not None
    assert again.checks == batch.checks
    served.answer(again)
    assert served.ask(A_PREFIX + text(5, 300), tenant="a") == 1_000
