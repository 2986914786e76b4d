"""Compiles the kernels of a model ahead: `modelserve-worker kernels` into a folder that an image or a volume carries,
and a start whose kernel cache is empty (`kernels_ahead`).

Needs no GPU. What is compiled is what `kernel_trace` finds that the
table of kernels launches; what a start-up then looks for in the folder has the same
names, since both are Triton's own hashes of source, types, options and compiler. The C modules that Triton builds at
run time (its driver, and a launcher per signature) are built too: a worker with this folder needs no C compiler.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.nvidia import driver as nvidia

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.inspection import read_architecture, read_weight_format
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.published import published_model
from modelserve.sizing.backends.resolve import takes_model
from modelserve_worker.kernels.compiling.bundles import preload
from modelserve_worker.kernels.compiling.cache_folder import folder_fault, shipped_folder
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, kept
from modelserve_worker.kernels.compiling.kernel_cache import (
    DRIVER_LIBRARY,
    CheckedCache,
    ShippedFirst,
    c_compiler,
    name_alike,
)
from modelserve_worker.ranks.parent_process import end_with_parent
from modelserve_worker.server.flags import FlagParser, add_engine_flags, engine_args
from modelserve_worker.startup.device import with_compute_dtype
from modelserve_worker.startup.kernel_trace import Launch, TargetDriver, kernel_launches

LEAST_CAPABILITY = 80


def build_kernels(
    architecture: ModelArchitecture,
    args: EngineArgs,
    *,
    weight_format: WeightFormat,
    output: Path,
    capabilities: Sequence[int],
    processes: int,
) -> int:
    """Compile into `output` what a rank with `args` launches on GPUs of `capabilities` (90: sm_90); returns how many.

    Kernels that are there already are not compiled again. Raises InvalidInput where model and arguments do not fit, or
    without a C compiler.
    """
    if c_compiler() is None:
        raise InvalidInput("launchers of kernels are built with a C compiler, and there is none: install gcc or set CC")
    output.mkdir(parents=True, exist_ok=True)
    began, count = time.monotonic(), 0
    for capability in capabilities:
        # A process for each target: Triton and the trace keep what they know of a GPU.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one:
            built = one.submit(
                compile_kernels, architecture, args, weight_format=weight_format, output=output, capability=capability,
                processes=processes,
            )  # fmt: skip
            count += built.result()
    sys.stderr.write(f"{count} kernels in {output}, {time.monotonic() - began:.0f} s\n")
    return count


def compile_kernels(
    architecture: ModelArchitecture,
    args: EngineArgs,
    *,
    weight_format: WeightFormat | None,
    output: Path,
    capability: int,
    processes: int,
    shipped_first: bool = False,
    files: set[str] | None = None,
) -> int:
    """Compile into `output`, `processes` at a time, what a rank launches on a GPU of `capability`; returns how many.

    For a process of its own that uses no GPU. Each kernel is compiled while the others are still looked for. With
    `shipped_first` a kernel that came with the program is not compiled. `files` gets the names of all files that a
    start will look for. Raises InvalidInput where model and arguments
    do not fit, and whatever a compilation failed with, when the others have ended.
    """
    gc.freeze()  # what is imported stays shared with the processes that are forked now
    with tempfile.TemporaryDirectory(prefix="modelserve-kernels-") as stubs:
        begin = functools.partial(
            _begin_process, str(output), _cuda_library_folder(Path(stubs)), capability, shipped_first
        )
        with ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=begin) as pool:
            running = [pool.submit(_build_driver)]  # all processes are forked here, before anything is traced
            kernel_launches(
                architecture, args, capability=capability, weight_format=weight_format,
                found=lambda launch: running.append(pool.submit(_compile, launch)),
            )  # fmt: skip
        for each in running:
            used = each.result()
            if files is not None:
                files |= used
    return len(running) - 1


def kernel_folder() -> Path | None:
    """Where a start on this machine would put what it compiles; None where it can compile nothing, or keep nothing."""
    folder = Path(triton.knobs.cache.dir)
    return folder if c_compiler() is not None and folder_fault(folder) is None else None


def _begin_process(cache: str, cuda_folder: str | None, capability: int, shipped_first: bool) -> None:
    """In a process of the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent's end is theirs
    threading.Thread(target=end_with_parent, name="parent-watcher", daemon=True).start()
    _begin(cache, cuda_folder, capability, shipped_first)


def _begin(cache: str, cuda_folder: str | None, capability: int, shipped_first: bool = False) -> None:
    """In this process: where results go, where the driver's library or its stand-in lies, and the target."""
    triton.knobs.cache.manager_class = ShippedFirst if shipped_first else CheckedCache
    triton.runtime.driver.set_active(TargetDriver(capability))
    triton.knobs.cache.dir = cache
    name_alike()
    if cuda_folder is not None:
        triton.knobs.nvidia.libcuda_path = cuda_folder
        ctypes.CDLL(str(Path(cuda_folder) / DRIVER_LIBRARY), mode=ctypes.RTLD_GLOBAL)
        sys.setdlopenflags(os.RTLD_LAZY)  # the stand-in has none of the functions; nothing is called here


def _compile(launch: Launch) -> set[str]:
    """Names of its files in the cache."""
    CheckedCache.used.clear()
    if isinstance(launch, CudaSource):
        kept(launch)
    else:
        function = getattr(importlib.import_module(launch.module), launch.kernel)
        kernel = preload(function, launch.specialization)
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    return set(CheckedCache.used)


def _build_driver() -> set[str]:
    CheckedCache.used.clear()
    nvidia.CudaUtils()
    return set(CheckedCache.used)


def _cuda_library_folder(folder: Path) -> str | None:
    """None where the GPU's driver is installed; else `folder` with an empty library of that name to link against."""
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        source = folder / "stub.c"
        source.write_text("")
        library = ["-shared", "-fPIC", f"-Wl,-soname,{DRIVER_LIBRARY}", "-o", str(folder / DRIVER_LIBRARY), str(source)]
        subprocess.run([c_compiler() or "gcc", *library], check=True)
        return str(folder)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when all kernels are there, 2 for wrong arguments."""
    parser = FlagParser(
        prog="modelserve-worker kernels",
        description="Compile the kernels that a worker with these settings launches. Needs a C compiler and no GPU.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=shipped_folder(),
        help="folder to fill (default: %(default)s, where a worker looks)",
    )
    parser.add_argument("--target", nargs="+", required=True, metavar="sm_90", help="GPU architectures, sm_80 or later")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="compilations at a time (%(default)s)")
    add_engine_flags(parser)
    try:
        flags = vars(parser.parse_args(argv))
        own = {name: flags.pop(name) for name in ("output", "target", "processes", "config")}
        args = engine_args(flags, own["config"])
        stated, weight_format = _model(args.model)
        architecture = with_compute_dtype(stated, args)
        if not takes_model(architecture):
            raise InvalidInput(f"{args.model} runs on plain PyTorch: there are no kernels to compile", field="model")
        capabilities = [_capability(target) for target in own["target"]]
        build_kernels(
            architecture,
            args,
            weight_format=weight_format,
            output=own["output"],
            capabilities=capabilities,
            processes=own["processes"],
        )
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _model(model: str) -> tuple[ModelArchitecture, WeightFormat]:
    """Of a published model (hf://google/gemma-4-31B-it), or of a directory with a config.json."""
    facts = published_model(model)
    if facts is not None:
        return facts.architecture, facts.format
    return read_architecture(Path(model)), read_weight_format(Path(model))


def _capability(target: str) -> int:
    number = target.removeprefix("sm_")
    if not number.isdigit() or int(number) < LEAST_CAPABILITY:
        raise InvalidInput(f"--target {target}: name GPU architectures like sm_90, at least sm_{LEAST_CAPABILITY}")
    return int(number)
