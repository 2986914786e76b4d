"""The order in which prefixes go is what sorting all of them says, whatever came, went and changed before."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from modelserve_worker.scheduling.prefix.cached_prefix import Block, CachedPrefix
from modelserve_worker.scheduling.prefix.eviction_order import COPY, NOTHING, ROWS, EvictionOrder


def prefix_of(random: Random) -> CachedPrefix[int]:
    none = np.zeros(0, dtype=np.int32)
    block, client = Block[int](b"", None), random.choice("abcdefg")
    prefix = CachedPrefix[int](block, 64, 64, 64, none, None, {}, client, None, 0, False)
    prefix.bytes, prefix.priority = random.choice([0, 5, 9, 40]), random.choice([1.0, 2.0, random.random()])
    return prefix


def sorted_anew(prefixes: list[CachedPrefix[int]], losses: dict[CachedPrefix[int], int]) -> list[CachedPrefix[int]]:
    """`prefixes` are the oldest first."""
    used: Counter[str] = Counter()
    for prefix in prefixes:
        used[prefix.client] += prefix.bytes
    share = sum(used.values()) / max(1, sum(count > 0 for count in used.values()))

    def rank(prefix: CachedPrefix[int]) -> tuple[int, bool, float]:
        loss = losses[prefix]
        return loss, bool(loss) and used[prefix.client] <= share, prefix.priority if loss else 0.0

    return sorted(prefixes, key=rank)


@pytest.mark.parametrize("seed", range(6))
def test_prefixes_go_in_the_order_of_all_of_them_sorted_anew(seed: int) -> None:
    random, prefixes, losses = Random(seed), list[CachedPrefix[int]](), dict[CachedPrefix[int], int]()
    order: EvictionOrder[int] = EvictionOrder(losses.__getitem__)
    for _ in range(400):
        choice = random.random()
        if choice < 0.45 or not prefixes:
            prefixes.append(prefix_of(random))
            losses[prefixes[-1]] = random.choice([NOTHING, COPY, ROWS])
            order.add(prefixes[-1])
        elif choice < 0.7:
            prefix = prefixes.pop(random.randrange(len(prefixes)))
            order.remove(prefix)
            order.update(prefix)
        else:
            prefix = random.choice(prefixes)
            losses[prefix] = random.choice([NOTHING, COPY, ROWS, losses[prefix]])
            prefix.priority += random.choice([0.0, 1.0])
            order.update(prefix)
        order.check_integrity(prefixes)
        assert list(order) == sorted_anew(prefixes, losses)


def test_who_goes_through_it_may_let_prefixes_go() -> None:
    random, prefixes = Random(1), list[CachedPrefix[int]]()
    order: EvictionOrder[int] = EvictionOrder(lambda _: ROWS)
    for _ in range(30):
        prefixes.append(prefix_of(random))
        order.add(prefixes[-1])
    expected = sorted_anew(prefixes, dict.fromkeys(prefixes, ROWS))
    went = []
    for prefix in order:
        went.append(prefix)
        order.remove(prefix)
    assert went == expected
    assert not list(order)
    assert not order._bytes
    assert not order._sorted, "nothing is left of clients that have nothing"
