"""What a plan expects of the prefix cache: beside what the scheduler's own policy finds of the same sessions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.api.speed import ExpectedReuse
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, plan
from modelserve.planning.speed.expected_reuse import SessionLoad, found_shares
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry

sys.path.insert(0, str(Path(__file__).parents[1] / "worker" / "scheduling"))
from prefix_traces import TRACES, chats, found

GIB = 1 << 30
URI = "hf://google/gemma-4-31B-it"
FACTS = published_model(URI)
assert FACTS is not None
GEOMETRY = cache_geometry(
    FACTS.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
)
CHATS = SessionLoad(
    requests=1, sessions=8, turns=4, shared_tokens=1500, input_tokens=1800, turn_tokens=200, output_tokens=30
)
SESSIONS = {"turns": 5, "sessions": 24, "inputTokens": 65_000, "outputTokens": 150, "concurrency": 4}


def _plan(workload: dict[str, Any], **fields: Any) -> PlanStatus:
    spec = ModelServeSpec.model_validate({"model": {"uri": URI}, "workload": workload, **fields})
    return plan(spec, FACTS.architecture, [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1)])


def _reuse(workload: dict[str, Any], **fields: Any) -> ExpectedReuse:
    expected = _plan(workload, **fields).candidates[0].reuse
    assert expected is not None
    return expected


@pytest.mark.parametrize("gib", [3, 6, 24])
def test_the_policy_finds_of_chats_what_the_plan_expects(gib: int) -> None:
    """In steady state: 8 chats at a time, each followed by another one."""
    tokens, hits = found(chats(sessions=28, at_once=8, turns=4, answers=0.1), GEOMETRY, gib * GIB, skip=24)
    assert found_shares(CHATS, GEOMETRY, pool_bytes=gib * GIB).gpu == pytest.approx(hits / tokens, abs=0.05)


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("siblings", SessionLoad(1, 100, 1, 3_000, 3_500, 1, 20)),
        ("long", SessionLoad(1, 4, 5, 0, 65_000, 512, 15)),
    ],
)
def test_and_of_other_traces_that_fit(name: str, load: SessionLoad) -> None:
    tokens, hits = found(TRACES[name](answers=0.1), GEOMETRY, 24 * GIB)
    assert found_shares(load, GEOMETRY, pool_bytes=24 * GIB).gpu == pytest.approx(hits / tokens, abs=0.02)


def test_more_sessions_are_found_less_and_host_memory_finds_the_rest() -> None:
    few, many = _reuse({**SESSIONS, "sessions": 8}), _reuse(SESSIONS)
    assert float(few.gpu_percent) > float(many.gpu_percent)
    host = _reuse(SESSIONS, kvCache={"hostMemory": "256Gi"})
    assert host.gpu_percent == many.gpu_percent
    assert float(host.host_percent) > float(many.computed_percent) - float(few.computed_percent) - 1
    assert sum(map(float, (host.gpu_percent, host.host_percent, host.computed_percent))) == pytest.approx(100, abs=0.2)


def test_the_next_turn_is_as_fast_as_was_measured() -> None:
    """105 ms in the engine (docs/benchmarks.md), 8.5 s without a hit; out of host memory 2.7 GB and a window more."""
    expected = _reuse(SESSIONS, kvCache={"hostMemory": "64Gi"})
    assert expected.next_turn_ms is not None
    assert 70 < float(expected.next_turn_ms) < 110
    assert 60 < float(expected.next_turn_from_host_ms or 0) - float(expected.next_turn_ms) < 85
    assert 7_500 < float(expected.next_turn_computed_ms or 0) < 9_000


def test_requests_in_progress_have_their_memory_first() -> None:
    crowded = _reuse({**SESSIONS, "concurrency": 18, "sessions": 40})
    assert float(crowded.sessions_on_gpu) < float(_reuse(SESSIONS).sessions_on_gpu) / 5
    assert "beside 18 requests in progress" in (_plan({**SESSIONS, "concurrency": 18, "sessions": 40}).message or "")


def test_turns_that_the_context_does_not_hold_are_said() -> None:
    planned = _plan({**SESSIONS, "turns": 2_000}, context={"maxModelLen": 80_000})
    assert "; 23 of 2,000 turns fit 80,000 tokens" in (planned.message or "")


def test_who_says_nothing_of_sessions_hears_nothing_and_nobody_does_without_a_cache() -> None:
    bare = _plan({"inputTokens": 65_000})
    assert bare.candidates[0].reuse is None
    assert "found" not in (bare.message or "")
    assert _plan(SESSIONS, engine={"prefixCaching": False}).candidates[0].reuse is None
