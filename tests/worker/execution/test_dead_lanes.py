"""Copies beside the steps that fail for good, on one of two ranks: hits are lost and no answer, or the engine ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import HostCopy
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.ranks.ring import RankRing
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers.host_tier import host_tiers
from modelserve_worker.startup.replica import launch, worker_loop

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).parents[3]
LASTING = "CUDA error: an illegal memory access was encountered"


def sessions(*faults: str, device: str = "cpu", ranks: int = 2) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "tests/worker/execution/dead_lanes.py", device, str(ranks), *faults],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "operator:worker:tests/soak"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.timeout(300)
def test_copies_that_fail_on_one_of_two_ranks_cost_hits_on_both_and_no_answer() -> None:
    """Rank 0 stores no more: what is there comes back. Then rank 1 loads no more, when rank 0 does: what was about to
    come back is computed. A step that fails for another reason fails alone behind that."""
    said = sessions("0:stores:4:the device refuses the copy", "1:loads:2:the device refuses the copy")
    assert said["died"] is None
    assert said["same"] == [True] * 8
    assert sorted(map(bool, said["hits"])) == [False] * 7 + [True]
    assert (said["loads_off"], said["stores_off"]) == (True, True)
    assert [error.split(":")[0] for error in said["bad"]] == ["the step failed"]
    assert (said["failed"], said["after"]) == (1, 8)


def test_a_rank_whose_device_is_gone_beside_the_steps_ends_while_it_waits_for_one() -> None:
    ring = RankRing(1)

    class Gone:
        launches_ahead = True

        def check(self) -> None:
            raise EngineDead("the GPU failed for good")

    try:
        with pytest.raises(EngineDead, match="failed for good"):
            worker_loop(Gone(), ring, 0)  # type: ignore[arg-type]
    finally:
        ring.close()


def test_a_lasting_fault_beside_the_steps_ends_the_engine_at_its_next_look() -> None:
    """Whether it is busy or idle."""
    args = EngineArgs(
        model=str(ROOT / "tests/models/gemma4-tiny-ple"), device="cpu", cpu_memory_bytes=2 << 30,
        host_cache_bytes=8 << 20, max_model_len=200,
    )  # fmt: skip
    replica = launch(args)
    host = replica.runner.host
    replica.runner.check()
    host._copy = _refuse
    host._loads.submit(1, [HostCopy(LayerKind.GLOBAL, 0, 0)])
    with pytest.raises(EngineDead, match="ILLEGAL_ADDRESS"):
        replica.runner.check()
    limits = SchedulerLimits(64, 4, 200, ())
    scheduler = Scheduler(
        limits, replica.geometry, replica.pool_bytes, prefix_caching=True, tiers=host_tiers(args.host_cache_bytes)
    )
    with pytest.raises(EngineDead, match="ILLEGAL_ADDRESS"):
        Engine(scheduler, replica.runner).step()


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError(LASTING)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("direction", [pytest.param(name, marks=ON_GPU) for name in ("stores", "loads")])
def test_copies_of_a_gpu_that_fail_cost_hits_and_no_answer(direction: str) -> None:
    said = sessions(f"0:{direction}:2:the device refuses the copy", device="cuda", ranks=1)
    assert said["died"] is None
    assert said["same"] == [True] * 8
    assert said[f"{direction}_off"]
    assert (said["failed"], said["after"]) == (1, 8)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("direction", [pytest.param(name, marks=ON_GPU) for name in ("stores", "loads")])
def test_a_kernel_that_fails_beside_the_copies_of_a_gpu_ends_the_engine(direction: str) -> None:
    said = sessions(f"0:{direction}:2:assert", device="cuda", ranks=1)
    assert "CUDA_ERROR_ASSERT (710)" in said["died"]
    assert said["failed"] == 0
