"""Over random sequences of requests the prefix cache says what its oracle does, token for token."""

from __future__ import annotations

import pytest
from prefix_oracle import sequence
from run_length import share

REQUESTS = 40


@pytest.mark.parametrize("roomy", [True, False])
def test_hits_are_those_of_the_oracle_and_victims_go_in_its_order(roomy: bool) -> None:
    asked = found = evicted = 0
    for seed in range(share(125)):
        with pytest.MonkeyPatch.context() as patch:
            oracle = sequence(seed, patch, requests=REQUESTS, roomy=roomy)
        asked, found = asked + oracle.asked, found + oracle.found
        evicted += oracle.cache.evictions
    assert asked >= share(125) * REQUESTS
    assert found > asked / 4
    assert (evicted > share(1_000)) is not roomy
