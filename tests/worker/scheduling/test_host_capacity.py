"""Sessions by turns over the pages of the 31B: host memory that has room for one prefix of each loses no session."""

from __future__ import annotations

import pytest
from prefix_sessions import Sessions, text
from test_prefix_traces import GEOMETRY

from modelserve_worker.host_pages import HostProgress

PROMPT, NEW, COUNT = 9_000, 300, 6
ROOM = (
    GEOMETRY.held_bytes(PROMPT + 4 * NEW) + 2 * GEOMETRY.sliding_page.page_bytes
)  # for one prefix, and its 64 positions


class ManySessions(Sessions):
    """Each turn of each goes on behind its prompt: what opens an answer, and the answer, are not in the history."""

    def __init__(self, *, opened: int, answer: int, pool_rooms: float, host_rooms: float) -> None:
        super().__init__(
            GEOMETRY, chunk=8192, longest=20_000, pool_bytes=int(pool_rooms * ROOM), stamped=False,
            host_bytes=int(host_rooms * ROOM),
        )  # fmt: skip
        (self.tier,) = self.reuse.tiers
        self.opened, self.answered = opened, answer
        self.histories = [text(number, PROMPT) for number in range(COUNT)]

    def turn(self, number: int) -> int:
        history, seed = self.histories[number], len(self.requests)
        prompt, checkpoints = history + text(999, self.opened), (len(history),) if self.opened else ()
        request = self.add(prompt, text(1_000 + seed, self.answered), checkpoints=checkpoints)
        last = 0  # every copy has ended by the next step
        while self.scheduler.has_requests:
            self.reuse.copied(HostProgress(self.tier.pool.layout.num_pieces, last, last))
            batch = self.step()
            last = last if batch is None else batch.step
        self.histories[number] = history + text(2_000 + seed, NEW)
        return request.cached_tokens


@pytest.mark.parametrize(
    ("opened", "answer"),
    [
        pytest.param(0, 16, id="token ids, whose answers' prefixes serve the prompts' ends"),
        pytest.param(4, 16, id="chats, whose answers' prefixes save a few rows"),
        pytest.param(4, 100, id="chats, whose answers' prefixes serve nobody"),
    ],
)
def test_what_sessions_left_behind_goes_before_any_last_prefix(opened: int, answer: int) -> None:
    sessions = ManySessions(opened=opened, answer=answer, pool_rooms=3, host_rooms=COUNT + 1)
    assert [sessions.turn(number) for number in range(COUNT)] == [0] * COUNT
    for turn in range(3):
        assert [sessions.turn(number) for number in range(COUNT)] == [PROMPT + turn * NEW] * COUNT
    sessions.scheduler.check_integrity()
    assert sessions.scheduler.stats().prompt_tokens_host_total >= 2 * COUNT * PROMPT
