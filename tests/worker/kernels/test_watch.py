"""A build that watches: a wait which does not end names its file, line, block and thread, and the program ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hopper import on_hopper

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "never_arrives.cu"
PROGRAM = """
import ctypes, shutil, sys
from pathlib import Path
import torch
torch.zeros(1, device="cuda")  # a context
from modelserve_worker.kernels.compiling import cuda_kernel
folder = Path(sys.argv[1])
shutil.copytree(cuda_kernel.FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
shutil.copy(sys.argv[2], folder)
cuda_kernel.FOLDER = folder
source = cuda_kernel.CudaSource("never_arrives.cu", "never_arrives", "sm_90a", shared_bytes=32)
cuda_kernel.launch(source, grid=(2, 1), threads=64, arguments=((33, ctypes.c_int),))
torch.cuda.synchronize()
print("it ended")
"""


@on_hopper
def test_a_wait_that_does_not_end_says_which_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(SOURCE)]
    environment = {**os.environ, "MODELSERVE_CUDA_BUILD": "watch"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    line = 1 + SOURCE.read_text().splitlines().index(
        "  if (threadIdx.x == thread) barriers.wait_full(Ring<2>(1));  // THE WAIT"
    )
    assert done.returncode != 0
    assert "it ended" not in done.stdout
    assert f"never_arrives.cu:{line}: wait: block: [" in done.stderr
    assert "thread: [33,0,0] Assertion `this wait ends` failed" in done.stderr
