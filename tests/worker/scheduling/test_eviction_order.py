"""The order in which tails go is what sorting all of them says, whatever came, went and changed before."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from modelserve_worker.scheduling.prefix.eviction_order import COPY, NOTHING, ROWS, EvictionOrder
from modelserve_worker.scheduling.prefix.tails import Block, Tail


def tail_of(random: Random) -> Tail[int]:
    none = np.zeros(0, dtype=np.int32)
    tail: Tail[int] = Tail(Block(b"", None), 64, 64, 64, none, None, {}, random.choice("abcdefg"), None, 0, False)
    tail.bytes, tail.priority = random.choice([0, 5, 9, 40]), random.choice([1.0, 2.0, random.random()])
    return tail


def sorted_anew(tails: list[Tail[int]], losses: dict[Tail[int], int]) -> list[Tail[int]]:
    """`tails` are the oldest first."""
    used: Counter[str] = Counter()
    for tail in tails:
        used[tail.client] += tail.bytes
    share = sum(used.values()) / max(1, sum(count > 0 for count in used.values()))

    def rank(tail: Tail[int]) -> tuple[int, bool, float]:
        loss = losses[tail]
        return loss, bool(loss) and used[tail.client] <= share, tail.priority if loss else 0.0

    return sorted(tails, key=rank)


@pytest.mark.parametrize("seed", range(6))
def test_tails_go_in_the_order_of_all_of_them_sorted_anew(seed: int) -> None:
    random, tails, losses = Random(seed), list[Tail[int]](), dict[Tail[int], int]()
    order: EvictionOrder[int] = EvictionOrder(losses.__getitem__)
    for _ in range(400):
        choice = random.random()
        if choice < 0.45 or not tails:
            tails.append(tail_of(random))
            losses[tails[-1]] = random.choice([NOTHING, COPY, ROWS])
            order.add(tails[-1])
        elif choice < 0.7:
            tail = tails.pop(random.randrange(len(tails)))
            order.remove(tail)
            order.update(tail)
        else:
            tail = random.choice(tails)
            losses[tail] = random.choice([NOTHING, COPY, ROWS, losses[tail]])
            tail.priority += random.choice([0.0, 1.0])
            order.update(tail)
        order.check_integrity(tails)
        assert list(order) == sorted_anew(tails, losses)


def test_who_goes_through_it_may_let_tails_go() -> None:
    random, tails = Random(1), list[Tail[int]]()
    order: EvictionOrder[int] = EvictionOrder(lambda _: ROWS)
    for _ in range(30):
        tails.append(tail_of(random))
        order.add(tails[-1])
    expected = sorted_anew(tails, dict.fromkeys(tails, ROWS))
    went = []
    for tail in order:
        went.append(tail)
        order.remove(tail)
    assert went == expected
    assert not list(order)
    assert not order._bytes
    assert not order._sorted, "nothing is left of clients that have nothing"
