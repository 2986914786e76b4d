"""Steps cross to other ranks unchanged, through a ring that may be smaller than a message, read at different paces."""

from __future__ import annotations

import multiprocessing
import threading
import time
from array import array

import numpy as np
import pytest

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype
from modelserve.termination import TerminationReason
from modelserve_worker.batch import AdmittedRequest, Asked, HostCopy, PageCheck, PageMove, ScheduledBatch, TableUpdates
from modelserve_worker.embedded_spans import NO_SPANS, SpanRows
from modelserve_worker.ranks.messages import decode_batch, encode_batch
from modelserve_worker.ranks.ring import RankRing, RingAborted, check_ranks
from modelserve_worker.request import CacheTrial, SamplingParams
from modelserve_worker.terminal_error import TerminalError


def batch(seed: int, *, admitted: int = 0, moves: int = 0) -> ScheduledBatch:
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 40))

    def words(count: int) -> np.ndarray:
        return random.integers(-1, 1 << 31, count).astype(np.int32)

    return ScheduledBatch(
        step=seed,
        slots=words(rows),
        starts=words(rows),
        lengths=words(rows),
        sampled=words(rows),
        given=words(moves),
        targets=words(moves),
        output_counts=words(rows),
        token_ids=words(3 * rows),
        admitted=tuple(
            AdmittedRequest(
                slot,
                f"r{slot}",
                SamplingParams(seed=slot, max_tokens=3),
                array("i", range(slot, 900)),
                array("i", (5, 6)),
                banned_token_ids=(1, slot),
                shares_rows_as="tenant" if slot % 2 else None,
                predicted_token_ids=array("i", (7,) * slot),
            )
            for slot in range(admitted)
        ),
        page_moves=tuple(PageMove(list(LayerKind)[i % 2], i, i + 1) for i in range(moves)),
        global_updates=TableUpdates(words(moves), words(moves), words(moves)),
        sliding_updates=TableUpdates(words(rows), words(rows), words(rows)),
        constrained=words(moves),
        spare_slots=words(rows if moves else 0),
        stores=tuple(HostCopy(list(LayerKind)[i % 2], i, 7 * i) for i in range(moves)),
        loads=tuple(HostCopy(list(LayerKind)[i % 2], i, 9 * i) for i in range(2 * moves)),
        loads_awaited=moves,
        trial=CacheTrial(1 + moves, list(KVCacheDtype)[moves % 5] if moves > 1 else None) if moves else None,
        checks=tuple(PageCheck(list(LayerKind)[i % 2], i, 1 + 5 * i, i % 3 - 1) for i in range(moves)),
        generated=rows - 1,
        asked=Asked(rows + 1, drafter=rows % 2),
        spans=SpanRows(*(words(moves) for _ in range(5))) if moves else NO_SPANS,
    )


def same(a: ScheduledBatch, b: ScheduledBatch) -> bool:
    arrays = (
        "slots", "starts", "lengths", "sampled", "given", "targets", "output_counts", "token_ids", "constrained",
        "spare_slots",
    )  # fmt: skip
    tables = [(getattr(a, name), getattr(b, name)) for name in ("global_updates", "sliding_updates")]
    pairs = [(getattr(a, name), getattr(b, name)) for name in arrays]
    pairs += [(getattr(x, name), getattr(y, name)) for x, y in tables for name in ("slots", "indices", "pages")]
    pairs += zip(a.spans, b.spans, strict=True)
    equal = all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)
    others = (
        "step", "admitted", "page_moves", "stores", "loads", "loads_awaited", "checks", "generated", "asked",
    )  # fmt: skip
    return equal and all(getattr(a, name) == getattr(b, name) for name in others)


@pytest.mark.parametrize(("admitted", "moves"), [(0, 0), (3, 0), (0, 5), (2, 4)])
def test_a_step_is_the_same_on_the_other_side(admitted: int, moves: int) -> None:
    sent = batch(7, admitted=admitted, moves=moves)
    assert same(decode_batch(bytearray(encode_batch(sent))), sent)


def test_readers_of_different_paces_get_every_message_in_order() -> None:
    """Messages are longer than the ring, so the writer waits for the slower reader, and nobody gets another's bytes."""
    ring = RankRing(2, capacity=1 << 10)
    sent = [batch(seed, admitted=seed % 3) for seed in range(30)]
    got: dict[int, list[ScheduledBatch]] = {0: [], 1: []}

    def read(reader: int) -> None:
        end = RankRing(2, name=ring.name, capacity=1 << 10)
        while message := end.receive(reader):
            got[reader].append(decode_batch(message))
            time.sleep(reader * 1e-3)
        end.close()

    threads = [threading.Thread(target=read, args=(reader,)) for reader in got]
    for thread in threads:
        thread.start()
    for each in sent:
        ring.send(encode_batch(each), check=lambda: None)
    ring.send(b"", check=lambda: None)
    for thread in threads:
        thread.join(60)
    assert [len(messages) for messages in got.values()] == [30, 30]
    assert all(same(a, b) for messages in got.values() for a, b in zip(messages, sent, strict=True))
    ring.close()


def test_a_reader_that_waits_hears_that_the_group_has_ended_and_another_keeps_its_message() -> None:
    ring = RankRing(2)
    ring.send(b"last", check=lambda: None)
    assert ring.receive(0) == b"last"
    heard = []

    def wait() -> None:
        try:
            ring.receive(0)
        except RingAborted as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    ring.abort()
    thread.join(60)
    assert heard == ["the group of ranks has ended"]
    assert ring.receive(1) == b"last"
    ring.close()


def test_a_writer_that_waits_asks_whether_the_readers_are_there() -> None:
    ring = RankRing(1, capacity=64)

    def gone() -> None:
        raise ConnectionError("rank 1 is gone")

    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        ring.send(bytes(200), check=gone)
    ring.close()


def test_notes_are_by_step_and_reader() -> None:
    ring = RankRing(2)
    ring.note(1, 5, 77)
    assert ring.noted(1, 5) == 77
    assert ring.noted(0, 5) is None
    assert ring.noted(1, 4) is None
    ring.note(1, 5 + 64, 78)
    assert ring.noted(1, 5) is None
    ring.close()


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_note_that_is_written_while_it_is_looked_for_is_of_this_step_or_none(looks: int) -> None:
    """After so many looks. Another step's word would end ranks that agree."""
    ring = RankRing.__new__(RankRing)  # its notes alone
    ring._notes = notes = np.full((1, 64, 2), -1)

    class Place:
        looked = 0

        def __getitem__(self, index: int) -> int:
            if self.looked == looks:
                ring._notes = notes
                ring.note(0, 5 + 64, 77)
            self.looked += 1
            return int(notes[0, 5, index])

    ring.note(0, 5, 11)
    ring._notes = {(0, 5): Place()}
    assert ring.noted(0, 5 + 64) in (None, 77)


def test_nothing_is_left_in_shared_memory() -> None:
    ring = RankRing(1)
    name = ring.name
    ring.close()
    with pytest.raises(FileNotFoundError):
        RankRing(1, name=name)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", ""])
def test_a_machine_that_may_reorder_stores_gets_no_ring(machine: str) -> None:
    """A reader could take bytes that are not there yet, once in a million steps."""
    with pytest.raises(TerminalError, match=f"tensor parallel size 3 on a machine of type '{machine}'") as refused:
        check_ranks(3, machine=machine)
    assert refused.value.reason is TerminationReason.UnsupportedArchitecture, (
        "fetching the checkpoint again is no remedy"
    )
