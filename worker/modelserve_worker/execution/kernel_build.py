"""`modelserve-worker kernels`: compile the kernels of a model ahead, into a folder that an image or a volume carries.

Needs no GPU. What is compiled is what `kernel_trace` finds; what a start-up then looks for in the folder has the same
names, since both are Triton's own hashes of source, types, options and compiler. The C modules that Triton builds at run
time (its driver, and a launcher per signature) are built too, so that a worker with this folder needs no C compiler.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.nvidia import driver as nvidia

from modelserve.architecture import ModelArchitecture
from modelserve.engine_args import EngineArgs
from modelserve_worker.execution.kernel_trace import KernelLaunch, TargetDriver, kernel_launches

CUDA_LIBRARY = "libcuda.so.1"


def build_kernels(
    architecture: ModelArchitecture, args: EngineArgs, *, output: Path, capabilities: Sequence[int], processes: int
) -> int:
    """Compile into `output` what a rank with `args` launches on GPUs of `capabilities` (90: sm_90); returns how many.

    Kernels that are there already are not compiled again. Raises InvalidInput where model and arguments do not fit,
    RuntimeError without a C compiler.
    """
    output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="modelserve-kernels-") as stubs:
        initializer = functools.partial(_begin, str(output), _cuda_library_folder(Path(stubs)))
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=initializer) as pool:
            traced = [(each, pool.submit(kernel_launches, architecture, args, capability=each)) for each in capabilities]
            running = [
                pool.submit(_compile, launch, capability)
                for capability, launches in traced
                for launch in launches.result()
            ]
            driver = pool.submit(_build_driver)
            for each in (*running, driver):
                each.result()
    sys.stderr.write(f"{len(running)} kernels in {output}, {time.monotonic() - began:.0f} s\n")
    return len(running)


def _begin(cache: str, cuda_folder: str | None) -> None:
    """In a process of the pool: where results go, and where the driver's library or its stand-in lies."""
    triton.knobs.cache.dir = cache
    if cuda_folder is not None:
        triton.knobs.nvidia.libcuda_path = cuda_folder
        ctypes.CDLL(str(Path(cuda_folder) / CUDA_LIBRARY), mode=ctypes.RTLD_GLOBAL)
        sys.setdlopenflags(os.RTLD_LAZY)  # the stand-in has none of the functions; nothing is called here


def _compile(launch: KernelLaunch, capability: int) -> None:
    triton.runtime.driver.set_active(TargetDriver(capability))
    function = getattr(importlib.import_module(launch.module), launch.kernel)
    kernel = function.preload(launch.specialization)
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _build_driver() -> None:
    nvidia.CudaUtils()


def _cuda_library_folder(folder: Path) -> str | None:
    """None where the GPU's driver is installed; else `folder` with an empty library of that name to link against."""
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        source = folder / "stub.c"
        source.write_text("")
        triton_compiler = os.environ.get("CC") or "gcc"
        try:
            subprocess.run(
                [triton_compiler, "-shared", "-fPIC", f"-Wl,-soname,{CUDA_LIBRARY}", "-o", folder / CUDA_LIBRARY, source],
                check=True,
            )
        except OSError as error:
            raise RuntimeError(f"no C compiler ({triton_compiler}): install gcc or set CC") from error
        return str(folder)
    return None
