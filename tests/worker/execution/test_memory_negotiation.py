"""The real worker on the CPU with a memory limit that leaves less than was planned."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import httpx
import pytest
from rank_of import rank_of

from localcluster.processes import free_ports
from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.memory import memory_plan
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_tools.tiny.__main__ import write_checkpoint
from modelserve_worker.weights.checkpoint_config import read_architecture

MAX_LEN, MIN_LEN, CHUNK, SEQUENCES = 4096, 1000, 256, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("negotiated")
    write_checkpoint(directory)
    return directory


def _geometry(architecture: ModelArchitecture) -> CacheGeometry:
    layout = KVCacheLayout.least(architecture)
    return cache_geometry(architecture, dtype=KVCacheDtype(architecture.dtype), layout=layout, tensor_parallel_size=1)


def _limit_for(architecture: ModelArchitecture, pool_bytes: int) -> int:
    """The smallest memory limit whose plan has a pool of at least `pool_bytes`."""

    geometry = _geometry(architecture)

    def pool(total: int) -> int:
        settings = rank_of(
            architecture, max_num_batched_tokens=CHUNK, max_num_seqs=SEQUENCES, on_cpu=True, kv_dtype=geometry.dtype,
            kv_layout=geometry.layout,
        )  # fmt: skip
        return memory_plan(architecture, settings, total_bytes=total, utilization=Decimal(1)).kv_pool_bytes

    low, high = 0, 8 << 30
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pool(middle) >= pool_bytes else (middle, high)
    return high


def _command(checkpoint: Path, *, memory: int, port: int) -> list[str]:
    settings = {
        "model": str(checkpoint), "device": "cpu", "host": "127.0.0.1", "port": port, "max-model-len": MAX_LEN,
        "min-model-len": MIN_LEN, "cpu-memory-bytes": memory, "max-num-batched-tokens": CHUNK,
        "max-num-seqs": SEQUENCES,
    }  # fmt: skip
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "modelserve_worker", "serve", *flags]


def test_a_worker_serves_the_longest_context_that_its_pool_holds(checkpoint: Path) -> None:
    architecture = read_architecture(checkpoint)
    memory = _limit_for(architecture, _geometry(architecture).held_bytes(2000))
    (port,) = free_ports(1)
    process = subprocess.Popen(_command(checkpoint, memory=memory, port=port))
    try:
        plan = _plan(process, port)
        assert 2000 <= plan["maxModelLen"] < 2064, "to the end of the last page"
        assert plan["allocated"]["kvPoolBytes"] < _geometry(architecture).held_bytes(MAX_LEN)
        body = {"model": checkpoint.name, "prompt": [5] * plan["maxModelLen"], "max_tokens": 1}
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert refused.status_code == 400
        assert str(plan["maxModelLen"]) in refused.text
        body["prompt"] = [5] * (plan["maxModelLen"] - 1)
        served = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        assert served.status_code == 200, served.text
    finally:
        process.kill()
        process.wait()


def _plan(process: subprocess.Popen[bytes], port: int) -> dict:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, "the worker ended"
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/v1/plan")
            if answer.status_code == 200:
                return answer.json()
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the worker did not get ready")


def test_below_the_minimum_it_ends_for_good_with_the_missing_bytes(checkpoint: Path) -> None:
    architecture = read_architecture(checkpoint)
    needed = _geometry(architecture).held_bytes(MIN_LEN)
    memory = _limit_for(architecture, needed // 2)
    command = _command(checkpoint, memory=memory, port=0)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == TERMINAL_EXIT_CODE, done.stderr
    assert "InsufficientMemory: " in done.stderr
    assert "Traceback" not in done.stderr
    left, missing = (
        int(re.search(pattern, done.stderr)[1]) for pattern in (r"(\d+) bytes are left", r"(\d+) bytes are m")
    )
    assert left + missing == needed
