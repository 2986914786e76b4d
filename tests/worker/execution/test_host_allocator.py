"""Memory that a step frees on a CPU serves the next one: no page of it is cleared anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parents[3] / "worker"
BLOCKS, BLOCK_BYTES, TIMES = 4, 3 << 20, 50
FAULTS = f"""
import resource, sys
sys.path.insert(0, {str(WORKER)!r})
from modelserve_worker.startup.cpu_malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TIMES}):
    blocks = [bytes([number]) * {BLOCK_BYTES} for number in range(1, {BLOCKS} + 1)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = BLOCKS * BLOCK_BYTES // 4096


def _faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_pages_that_were_freed_are_used_again() -> None:
    assert _faults("keep") < 2 * PAGES, "those of the first time"
    assert _faults("default") > TIMES * PAGES / 2, "or the setting is not needed any more"
