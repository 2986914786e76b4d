"""Of named traces the cache finds what an oracle with unlimited memory finds, in a pool that holds their sessions; and
where it holds fewer, the share of them that it holds. tests/bench/host/prefix_policy.py has them at full size."""

from __future__ import annotations

from typing import Any

import pytest
from prefix_traces import TRACES, chats, found, known, siblings

from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry

FACTS = published_model("hf://google/gemma-4-31B-it")
assert FACTS is not None
GEOMETRY = cache_geometry(
    FACTS.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
)
GIB = 1 << 30
SMALL: dict[str, tuple[dict[str, Any], int]] = {  # sizes, and GiB of the pool
    "chats": ({"sessions": 16, "at_once": 8, "turns": 4}, 8),
    "agents": ({"sessions": 2}, 8),
    "siblings": ({"prompts": 16}, 6),
    "long": ({"sessions": 2, "turns": 3, "first": 20_000}, 6),
    "documents": ({"texts": 2, "length": 8_000, "asked": 24}, 10),
    "branches": ({"sessions": 3}, 8),
    "edits": ({"sessions": 4}, 8),
}


@pytest.mark.parametrize("name", SMALL)
def test_nine_tenths_of_what_an_oracle_finds(name: str) -> None:
    sizes, gib = SMALL[name]
    sizes = {**sizes, "answers": 0.1}
    tokens, best = known(TRACES[name](**sizes))
    assert found(TRACES[name](**sizes), GEOMETRY, gib * GIB)[1] >= 0.9 * best > 0.4 * tokens


def test_short_answers_do_not_cost_the_system_block_that_all_share() -> None:
    """The prefixes of a prompt and of its short answer have the same pages, so that neither frees any alone."""
    sizes = {"prompts": 16, "answers": 0.1}
    _, best = known(siblings(**sizes))
    assert found(siblings(**sizes), GEOMETRY, 6 * GIB)[1] == best


def test_sessions_that_do_not_fit_cost_their_share_and_no_more() -> None:
    """A cache that gives up all at once finds nothing as soon as sessions are more than the pool holds."""
    sizes = {"sessions": 16, "at_once": 8, "turns": 4, "answers": 0.1}
    _, best = known(chats(**sizes))
    shares = [found(chats(**sizes), GEOMETRY, gib * GIB)[1] / best for gib in (3, 5, 8)]
    assert 0.8 < shares[0] < shares[1] < shares[2] <= 1
