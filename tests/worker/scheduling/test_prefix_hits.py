"""Where requests resume: the cases that users meet, at the sizes of a published model."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from prefix_sessions import MODEL, PUBLISHED, Sessions, text

from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.request import SamplingParams
from modelserve_worker.scheduling.prefix_reuse import PrefixReuse

PREFIX = text(1, 10_016)


@pytest.fixture
def served() -> Sessions:
    """A prompt of 10,016 tokens has been answered with 40."""
    sessions = Sessions()
    assert sessions.ask(PREFIX, text(2, 40)) == 0
    return sessions


def test_the_same_prompt_computes_its_last_token(served: Sessions) -> None:
    assert served.ask(PREFIX) == 10_015


@pytest.mark.parametrize("before", [1, 2, 11, 63, 64])
def test_a_prompt_that_parts_a_little_before_the_end_resumes_there(served: Sessions, before: int) -> None:
    assert served.ask(PREFIX[:-before] + text(3, 300)) == 10_016 - before


@pytest.mark.parametrize(("before", "resumes"), [(1_024, 8_192), (5_000, 4_096), (8_000, 2_016), (8_200, 0)])
def test_one_that_parts_earlier_resumes_where_a_chunk_ended(served: Sessions, before: int, resumes: int) -> None:
    assert served.ask(PREFIX[:-before] + text(3, 300)) == resumes


@pytest.mark.parametrize("before", [1_024, 5_000, 8_200])
def test_the_next_one_that_parts_there_finds_the_junction(served: Sessions, before: int) -> None:
    """In whole pages, which is what is known of a text by its hashes."""
    served.ask(PREFIX[:-before] + text(3, 900))
    assert served.ask(PREFIX[:-before] + text(4, 900)) == (10_016 - before) // 64 * 64


def test_siblings_of_a_long_prefix(served: Sessions) -> None:
    assert served.ask(PREFIX + text(3, 500)) == 10_016, "behind the prompt's own prefix"
    cold = Sessions()
    assert [cold.ask(PREFIX + text(seed, 700)) for seed in (2, 3, 4, 5)] == [0, 8_192, 9_984, 9_984]


def test_siblings_of_a_system_block_that_is_named_find_it_at_once() -> None:
    """As a chat's front end names it; a short one is not worth a step."""
    sessions = Sessions()
    asked = [sessions.ask(PREFIX[:3_000] + text(seed, 700), checkpoints=(3_000,)) for seed in (2, 3)]
    assert asked == [0, 3_000]
    asked = [sessions.ask(text(9, 200) + text(seed, 2_000), checkpoints=(200,)) for seed in (2, 3)]
    assert asked == [0, 0]


def test_five_turns_of_a_chat_compute_what_is_new() -> None:
    """And the last token of each answer, which was sampled and never fed."""
    sessions = Sessions()
    history: list[int] = text(1, 3_000)
    for turn in range(2, 7):
        before = len(history) if turn > 2 else 0
        prompt = history + text(turn, 300)
        assert sessions.ask(prompt, text(10 + turn, 200)) == (before - 1 if before else 0)
        history = prompt + text(10 + turn, 200)


def test_thoughts_that_leave_the_history_cost_the_turn_and_no_more() -> None:
    """The prompt ends with an empty thought of 4 tokens, and the answer begins with a real one."""
    sessions = Sessions()
    history: list[int] = text(1, 3_000)
    for turn in range(2, 7):
        kept = history + text(turn, 300)
        prompt = kept + text(99, 4)
        expected = len(history) - 150 if turn > 2 else 0  # the answer's 150 tokens came behind the thought
        assert sessions.ask(prompt, text(20 + turn, 90) + text(10 + turn, 150), checkpoints=(len(kept),)) == expected
        history = kept + text(10 + turn, 150)


def test_a_turn_of_calls_keeps_its_thoughts_and_the_next_one_resumes_before_them() -> None:
    sessions = Sessions()
    begin = text(1, 3_000)
    thoughts, called = text(2, 400), text(3, 500)
    first = begin + text(4, 3)  # what opens the model's turn
    assert sessions.ask(first, thoughts, checkpoints=(len(begin),)) == 0
    assert sessions.ask(first + thoughts + called, text(5, 60), checkpoints=(len(begin),)) == 3_402
    assert sessions.ask(begin + called + text(5, 60) + text(6, 80)) == 3_000


def test_five_turns_with_calls_compute_their_own_part_alone() -> None:
    """Each turn thinks, calls, reads a result and answers; its thoughts leave the history with the next question."""
    sessions = Sessions()
    history, known = text(1, 3_000), 0
    for turn in range(10, 15):
        asked = history + text(turn, 300)
        thought, call, result, answer = (text(turn * 10 + part, size) for part, size in enumerate((30, 20, 400, 20)))
        assert sessions.ask(asked, thought + call, checkpoints=(len(asked),)) == known
        told = asked + thought + call + result
        assert sessions.ask(told, answer, checkpoints=(len(asked),)) == len(asked + thought + call) - 1
        history, known = asked + call + result + answer, len(asked)


def test_another_salt_and_another_tenant_find_nothing(served: Sessions) -> None:
    assert served.ask(PREFIX, cache_salt="mine") == 0
    assert served.ask(PREFIX, tenant="key-1") == 0
    assert served.ask(PREFIX, tenant="key-1", cache_salt="mine") == 0
    assert served.ask(PREFIX, cache_salt="mine") == 10_015


def test_a_prompt_whose_tokens_are_scored_computes_all_of_them(served: Sessions) -> None:
    request = served.add(PREFIX)
    request.sampling = SamplingParams(seed=0, max_tokens=1, prompt_logprobs=0)
    batch = served.scheduler.schedule()
    assert batch is not None
    assert batch.starts.tolist() == [0]
    assert (served.reuse.queries, served.reuse.hits) == (10_016, 0), "and is no query"


def test_what_is_evicted_is_computed_again() -> None:
    """The pool holds one such request, and little more."""
    sessions = Sessions(pool_bytes=PUBLISHED.held_bytes(10_100) + 10 * 64)
    assert sessions.ask(PREFIX) == 0
    assert sessions.ask(PREFIX) == 10_015, "the only bytes there are serve it and it takes them"
    sessions.ask(text(2, 10_000))
    assert sessions.ask(PREFIX) == 0
    assert sessions.reuse.cache.evictions > 0


def test_one_client_does_not_push_everybody_out_of_the_pool() -> None:
    sessions = Sessions(pool_bytes=4 * PUBLISHED.held_bytes(3_000))
    quiet = text(1, 2_016)
    assert sessions.ask(quiet, client="a") == 0
    for seed in range(5, 25):
        sessions.ask(text(seed, 2_900), client="b")
    assert sessions.reuse.cache.evictions > 20
    assert sessions.ask(quiet, client="a") == 2_015
    assert sessions.ask(text(5, 2_900), client="b") == 0, "its own oldest one went"


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("before", "resumes"), [(0, 4_096), (5_920, 4_096), (5_921, 4_095), (5_950, 4_066), (7_000, 2_048)]
)
def test_while_the_first_is_prefilled_another_one_finds_its_chunks(before: int, resumes: int, drafts: int) -> None:
    """To the token, where it parts within 64 of a chunk's end."""
    sessions = Sessions(drafts=drafts)
    first = sessions.add(PREFIX)
    sessions.step()
    sessions.step()
    second = sessions.add(PREFIX[: len(PREFIX) - before] + text(3, 300))
    while sessions.scheduler.has_requests:
        sessions.step()
    assert (first.cached_tokens, second.cached_tokens) == (0, resumes)


def test_a_preempted_request_comes_back_from_its_own_pages() -> None:
    """Two that grow where one has room: the younger one is computed again from where it was, not from the beginning."""
    prompts = text(1, 3_000), text(2, 3_000)
    pool = 2 * PUBLISHED.held_bytes(3_100)
    sessions = Sessions(pool_bytes=pool, chunk=4096)
    older, younger = sessions.add(prompts[0], text(3, 300)), sessions.add(prompts[1], text(4, 300))
    starts: dict[str, list[int]] = {older.request_id: [], younger.request_id: []}
    slots: dict[int, str] = {}
    while sessions.scheduler.has_requests:
        batch = sessions.step()
        if batch is not None:
            slots |= {each.slot: each.request_id for each in batch.admitted}
            for each in batch.admitted:
                at = batch.slots.tolist().index(each.slot)
                starts[each.request_id].append(int(batch.starts[at]))
    assert sessions.scheduler.stats().preemptions_total > 0
    assert starts[older.request_id] == [0]
    first, *again = starts[younger.request_id]
    assert first == 0
    assert again
    assert (younger.cached_tokens, sessions.reuse.hits) == (0, 0), "what it finds of its own is no hit of a prompt"


def test_an_id_that_is_used_again_finds_what_its_own_tokens_have() -> None:
    """It was looked up while it waited for memory, and nothing has changed in the cache since."""
    sessions = Sessions(pool_bytes=PUBLISHED.held_bytes(10_100))
    sessions.ask(PREFIX[:3_000])
    short = sessions.add(text(2, 30), text(3, 20))  # too short for a prefix
    sessions.step()
    waiting = sessions.add(PREFIX[:3_000] + text(4, 7_090))
    sessions.step()
    assert sessions.scheduler.stats().num_waiting == 1
    sessions.scheduler.abort(waiting.request_id)
    del sessions.requests[waiting.request_id]
    again = sessions.add(text(5, 10_090))
    assert again.request_id == waiting.request_id
    while sessions.scheduler.has_requests:
        sessions.step()
    assert (short.cached_tokens, again.cached_tokens) == (0, 0)


def test_without_a_free_slot_a_prefix_serves_the_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored through a slot that somebody holds."""
    honest = PrefixReuse.write

    def crowded(reuse: PrefixReuse, running: object, *rest: object, **named: int) -> object:
        monkeypatch.setattr(type(running), "free_slots", property(lambda _: []))
        return honest(reuse, running, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixReuse, "write", crowded)
    sessions = Sessions(chunk=4096)
    sessions.ask(PREFIX)
    assert sessions.device.spare_rows == 0
    assert sessions.ask(PREFIX[:-60] + text(3, 10)) == 8_192
    assert sessions.ask(PREFIX) == 10_015


def test_rows_for_a_prefix_that_are_not_stored_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixReuse.write
    monkeypatch.setattr(PrefixReuse, "write", lambda *args, **named: honest(*args, **named)[:0])
    sessions = Sessions(chunk=4096)
    sessions.ask(PREFIX)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        sessions.ask(PREFIX[:-60] + text(3, 10))


@pytest.mark.drawn
@pytest.mark.parametrize("drafts", [1, 3, 16])
def test_hits_with_drafts_are_hits_without(drafts: int) -> None:
    """Of histories that are cut anywhere and go on, with two steps in flight; what is read is checked row by row."""
    small = MODEL.geometry(window=96, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1)

    def hits(k: int) -> list[int]:
        rng, found = Random(drafts), []
        sessions = Sessions(small, chunk=300, longest=2_000, drafts=k)
        histories = [text(1, 400)]
        for turn in range(2, 40):
            history = rng.choice(histories[-4:])
            shared = rng.choice([len(history), rng.randint(1, len(history))])
            prompt = history[:shared] + text(turn, rng.randint(1, 90))
            prompt = prompt[-1_500:] if rng.random() < 0.2 else prompt[:1_500]
            answer = text(100 + turn, rng.randint(1, 150))
            request, steps = sessions.add(prompt, answer), deque[ScheduledBatch]()
            while sessions.scheduler.has_requests:
                while len(steps) < 2 and (batch := sessions.scheduler.schedule()) is not None:
                    steps.append(batch)
                sessions.answer(steps.popleft())
            found.append(request.cached_tokens)
            histories.append(prompt + answer)
        assert k == 0 or sessions.device.accepted > 200
        return found

    without = hits(0)
    assert sum(map(bool, without)) > 20
    assert hits(drafts) == without
