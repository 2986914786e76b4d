"""What clients may make a worker hold is a named part of its memory: of the pod's on GPUs, of the plan's on the CPU."""

from __future__ import annotations

from modelserve.planning.pools.pod_resources import FRONT_END_BYTES
from modelserve.sizing.host.front_end import KNOWN_TEXTS_BYTES, OPEN_BODIES_BYTES, PREPARATION_BYTES, open_bodies_bytes
from modelserve.sizing.memory import overhead_terms

GIB = 1 << 30


def test_a_pod_on_gpus_requests_all_of_it() -> None:
    assert open_bodies_bytes(None) == OPEN_BODIES_BYTES
    assert FRONT_END_BYTES - 5 * GIB // 8 == OPEN_BODIES_BYTES + PREPARATION_BYTES + KNOWN_TEXTS_BYTES


def test_on_the_cpu_it_is_inside_of_the_headroom() -> None:
    terms = overhead_terms(tensor_parallel_size=1, total_bytes=3 * GIB, on_cpu=True)
    assert open_bodies_bytes(3 * GIB) == terms["headroom"] // 2
    assert open_bodies_bytes(1 << 50) == OPEN_BODIES_BYTES
