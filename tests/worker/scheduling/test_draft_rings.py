"""A drafter's rows under random traffic: each is found where it should be, whatever its request resumed from and who
else reads it, and requests resume where they would without a drafter."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from prefix_sessions import MODEL, Sessions, text
from test_host_traffic import HostTraffic
from test_poisoned_prefixes import A_PREFIX, B_PREFIX, DAMAGED, Damaged
from test_traffic import Traffic, a_drafter

from modelserve.model.architecture import LayerKind
from modelserve.sizing.draft_pages import DraftCache, DraftPages
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import NOT_IN_A_RING, PageCheck
from modelserve_worker.scheduling.pages.arena import PageArena
from modelserve_worker.scheduling.pages.draft_ring import DraftRing, rows_in
from modelserve_worker.scheduling.pages.page_checks import CheckedRows, PageChecks
from modelserve_worker.scheduling.pages.page_table import PageTable

ROWS = DraftCache(1, 2, 2048, kv_heads=1, head_dim=1, v_only=True, element_bytes=1)
DRAFTED = MODEL.geometry(
    window=1024, global_tokens=64, sliding_tokens=32, global_row=40, sliding_row=1, draft=ROWS, drafts=16,
    first_ring_entry=220,
)  # fmt: skip


def run(make: Any, *, examples: int, first: int = 0, **options: Any) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + examples):
        try:
            make(seed, seen, draft_rows=True, **options).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafting", [False, True])
def test_a_draft_finds_its_rows_and_no_byte_is_lost(drafting: bool) -> None:
    seen = run(Traffic, examples=12, prefix_caching=True, drafting=drafting)
    assert seen["hits"] > 100
    assert seen["copies"] > 50
    assert seen["evictions"] > 50
    assert seen["moves"] > 10
    assert seen["preemptions"] > 2
    assert (seen["accepted drafts"] > 300) is drafting


def test_a_draft_finds_its_rows_without_a_prefix_cache() -> None:
    seen = run(Traffic, examples=5, prefix_caching=False, drafting=True)
    assert seen["accepted drafts"] > 100
    assert seen["copies"] == 0


@pytest.mark.timeout(300)
def test_rows_of_drafts_come_back_from_host_memory() -> None:
    seen = run(HostTraffic, examples=6, breaks=True, drafting=True)
    assert seen["host hits"] > 5
    assert seen["moves"] > 10


@pytest.mark.parametrize(
    "seed", [pytest.param(1033, id="pages that leave a window as short as two steps' drafts are not final yet")]
)
def test_traffic_that_once_broke(seed: int) -> None:
    run(Traffic, examples=1, first=seed, prefix_caching=True, drafting=True)


@pytest.mark.timeout(300)
def test_the_simulation_notices_writes_over_rows_that_others_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftRing, "write", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(Traffic, examples=40, prefix_caching=True)


@pytest.mark.timeout(300)
def test_the_simulation_notices_pages_without_the_rows_of_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PageArena.own

    def own(arena: PageArena, page: Any, slot: int, index: int, *, rows_needed: bool) -> Any:
        in_ring = page.kind is LayerKind.GLOBAL and index >= 60
        return honest(arena, page, slot, index, rows_needed=rows_needed and not in_ring)

    monkeypatch.setattr(PageArena, "own", own)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(Traffic, examples=40, prefix_caching=True)


@pytest.mark.timeout(300)
def test_the_simulation_notices_prefixes_without_their_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request finds of a ring before its own rows is said by the prefix."""
    honest = DraftRing.share

    def share(ring: DraftRing, kept: Any) -> Any:
        for entry in honest(ring, kept):
            ring._arena.drop(kept.ring_pages[entry], ring._slot, ring._index(entry))
        return {}

    monkeypatch.setattr(DraftRing, "share", share)
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(Traffic, examples=40, prefix_caching=True)


def _sessions(geometry: CacheGeometry, **options: Any) -> Sessions:
    return Sessions(geometry, stamped=False, **options)


def _tree(seed: int, sessions: Sessions, *, longest: int) -> list[int]:
    """What each request of random sessions over a random tree of texts found computed."""
    random, texts, found = Random(seed), [[]], []
    for _ in range(60):
        base = random.choice(texts[-8:])
        prompt = base[: random.randint(0, len(base))] + [random.randint(1, 2) for _ in range(random.randint(1, 9))]
        prompt = prompt[: longest - 12]
        answer = [random.randint(1, 2) for _ in range(random.randint(1, 10))]
        checkpoints = random.sample(range(1, len(prompt) + 1), k=min(len(prompt), random.choice([0, 0, 1])))
        found.append(sessions.ask(prompt, answer, checkpoints=tuple(sorted(checkpoints))))
        texts.append(prompt + answer)
    sessions.scheduler.check_integrity()
    return found


@pytest.mark.parametrize("seed", range(12))
def test_requests_resume_where_they_would_without_a_drafter(seed: int) -> None:
    random = Random(seed)
    pages = {
        "window": random.randint(2, 9), "global_tokens": random.choice([2, 4]), "sliding_tokens": random.randint(1, 3),
        "global_row": random.randint(1, 4), "sliding_row": random.randint(1, 4),
    }  # fmt: skip
    chunk, longest = random.choice([3, 7, 60]), 60
    found = []
    for drafter in ({}, a_drafter(Random(seed), 0)):
        geometry = MODEL.geometry(**pages, **drafter)
        sessions = _sessions(geometry, chunk=chunk, longest=longest, pool_bytes=200 * geometry.held_bytes(longest))
        found.append(_tree(seed, sessions, longest=longest))
    assert found[0] == found[1]
    assert sum(found[0]) > 100


def test_turns_of_published_sizes_resume_at_the_same_tokens() -> None:
    """Five turns of eight sessions, each parting from what is known inside a page, with windows of 1,024 and 2,048."""
    without = MODEL.geometry(window=1024, global_tokens=64, sliding_tokens=32, global_row=40, sliding_row=1)
    hits = []
    for geometry in (without, DRAFTED):
        sessions, found = _sessions(geometry, pool_bytes=200 * geometry.held_bytes(14_000)), []
        for turn in range(5):
            for session in range(8):
                prompt = text(0, 700) + text(1 + session, 900 * turn + 77 * session + 3)
                found.append(sessions.ask(prompt, text(30 + turn, 20 + session)))
                found.append(sessions.ask(prompt[: len(prompt) - 70 - session], text(60, 3)))
        sessions.scheduler.check_integrity()
        hits.append(found)
    assert hits[0] == hits[1]
    assert sum(hits[0]) > 80_000


def test_hits_from_host_memory_are_those_without_a_drafter() -> None:
    """The pool holds two sessions, host memory all of them."""
    hits = []
    without = MODEL.geometry(window=1024, global_tokens=64, sliding_tokens=32, global_row=40, sliding_row=1)
    for geometry in (without, DRAFTED):
        held = geometry.held_bytes(5_000)
        sessions = _sessions(geometry, pool_bytes=3 * held, host_bytes=60 * held, longest=5_000)
        found = [sessions.ask(text(seed, 2_016 + 400 * turn), (5, 6, 7)) for turn in range(4) for seed in range(1, 7)]
        sessions.scheduler.check_integrity()
        assert sum(request.host_cached_tokens for request in sessions.requests.values()) > 20_000
        hits.append(found)
    assert hits[0] == hits[1]
    assert hits[0][6:12] == [2_016] * 6


def test_admission_counts_the_ring() -> None:
    """As many requests run at once as sizing says, without preemption, and a refusal names what they hold."""
    geometry = DRAFTED
    pool = 3 * geometry.held_bytes(3_000) + geometry.global_page.page_bytes // 2
    sessions = _sessions(geometry, pool_bytes=pool, longest=3_001, slots=4)
    for seed in range(4):
        sessions.add(text(seed, 2_900), text(50 + seed, 101))
    most = 0
    while sessions.scheduler.has_requests:
        sessions.step()
        most = max(most, sessions.scheduler.stats().num_running)
    stats = sessions.scheduler.stats()
    assert (most, stats.preemptions_total) == (geometry.requests(pool, 3_000), 0) == (3, 0)


@pytest.mark.parametrize("entries", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_rows_of_an_entry(entries: int, size: int) -> None:
    pages = DraftPages(0, 1, 1, 1, ("v",), 1, 1, 0, 0, size, size, entries, 1, 0)
    for first in range(20):
        for end in range(first, first + entries * size + 1):
            for entry in range(entries):
                rows = [at for at in range(first, end) if at // size % entries == entry]
                begin, stop = rows_in(pages, entry, first, end)
                assert (begin, stop) == (rows[0], rows[-1] + 1) if rows else begin == stop


def test_checks_of_a_ring_look_at_rows_of_two_rounds() -> None:
    """Pages of 8 positions, 3 of them: rows [13, 34) have 13, 14, 15 and 32, 33 in page 1."""
    arena = PageArena(DRAFTED, 10 * DRAFTED.global_page.page_bytes)
    page, *_ = arena.allocate_kept(LayerKind.GLOBAL, 2)
    ring, checks = CheckedRows(13, 34, 8), PageChecks()
    assert ring.check(page) == PageCheck(LayerKind.GLOBAL, page.number, 5, 5)
    assert CheckedRows(9, 13, 8).check(page) == PageCheck(LayerKind.GLOBAL, page.number, 4, 1)
    assert CheckedRows(8, 16, 8).check(page) == PageCheck(LayerKind.GLOBAL, page.number, 8, 0)
    assert CheckedRows(0, 20).check(page) == PageCheck(LayerKind.GLOBAL, page.number, 20, NOT_IN_A_RING)
    checks.ask({page: ring})
    assert checks.suspects == {page}
    assert checks.take(1) == (ring.check(page),)
    assert checks.answered(1, ()) == set()
    checks.ask({page: CheckedRows(14, 33, 8)})
    assert not checks.suspects, "its rows were found sound"
    checks.ask({page: CheckedRows(12, 33, 8)})
    assert checks.suspects == {page}, "not all of them were"


def test_a_table_resends_and_releases_its_ring() -> None:
    arena = PageArena(DRAFTED, 2 * DRAFTED.held_bytes(3_000))
    table = PageTable(arena, DRAFTED, 0)
    table.reserve(3_000)
    draft = DRAFTED.draft
    assert draft is not None
    assert table.held_bytes == arena.held_bytes == DRAFTED.held_bytes(3_000)
    first = arena.take_updates(LayerKind.GLOBAL)
    assert first.indices.tolist()[-draft.ring_entries :] == [220 + entry for entry in range(draft.ring_entries)]
    table.resend()
    again = arena.take_updates(LayerKind.GLOBAL)
    assert sorted(again.indices.tolist()) == sorted(first.indices.tolist())
    table.release()
    assert arena.held_bytes == 0
    arena.check_integrity()


@pytest.mark.parametrize("poisoned", [False, True])
def test_what_a_request_without_numbers_has_read_of_a_ring_is_looked_at(poisoned: bool) -> None:
    served = Damaged(DRAFTED)
    assert (served.ask(A_PREFIX), served.ask(B_PREFIX)) == (0, 0)
    (prefix, _) = served.reuse.cache.prefixes
    if poisoned:
        served.poisoned = [max(page.number for page in prefix.ring.values())]
    assert "not numbers" in (served.error(A_PREFIX + text(4, 300) + DAMAGED) or "")
    served.answered()
    rings = [check for check in served.checks if check.ring_row != NOT_IN_A_RING]
    assert sum(check.rows for check in rings) == 1_000, "all rows of a window that begins with the text"
    assert served.ask(A_PREFIX + text(6, 100)) == (0 if poisoned else 1_000)
    assert served.ask(B_PREFIX + text(6, 100)) == 1_000
