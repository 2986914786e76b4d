"""Compiles kernels beside the loading of weights, on the other cores, where a start finds its kernel cache empty.

`start_kernels_ahead` starts one process before anything else. It finds what a rank will launch (`kernel_trace`) and has
it compiled in forks of itself (`kernel_build`), into the cache where every rank then looks. It uses no GPU. Whoever
misses a kernel waits until it is there, or until that process has let go of its lock, however it ended, and then
compiles what is still missing: nothing depends on this but the time. It ends with the process that started it.

When all is compiled it leaves a file in the cache, which is named by whatever that depended on and lists what is there.
A start that finds it, and the files that it lists, starts no such process: to find out that nothing is missing takes
5 s of a core.

This module is light: it runs before torch is imported, and again as the main module of that process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import modelserve
import modelserve_worker
from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.inspection import read_architecture, read_speculation, read_weight_format
from modelserve.sizing.backends.resolve import takes_model
from modelserve_worker.kernels.compiling.cache_folder import cache_folder, settle_cache_folder, shipped_folder
from modelserve_worker.kernels.compiling.kept_files import sealed, trusted_bytes, unsealed, write_whole
from modelserve_worker.log_format import LOG_FORMAT
from modelserve_worker.startup.container_limits import cores
from modelserve_worker.startup.nvml import first_gpu

MOST_PROCESSES = 10
"""That compile at once. With 0.1 GiB of its own each and 0.5 of what they share they fit in what a pod asks for beside
its running engine (`modelserve.planning.pools.pod_resources.CUDA_BYTES`)."""

_BEGAN_S = time.monotonic()

logger = logging.getLogger(__name__)


def start_kernels_ahead(args: EngineArgs) -> Path | None:
    """Start to compile what a start with `args` launches; the lock that is held meanwhile.

    None where nothing is compiled: on a CPU, where NVML names no GPU, where this process has one core, or where all is
    in the cache since an earlier start.
    """
    gpu = None if args.device == "cpu" else first_gpu(os.environ)
    if gpu is None:
        return None
    settle_cache_folder()  # for all processes that this one starts
    processes = min(MOST_PROCESSES, int(cores()))
    if processes < 2:
        return None
    major, minor = gpu.compute_capability
    complete = complete_name(args, 10 * major + minor)
    if complete and is_complete(cache_folder() / complete):
        return None
    handle, name = tempfile.mkstemp(prefix="modelserve-kernels-", suffix=".lock")
    settings = (args.model_dump_json(), str(10 * major + minor), str(processes), complete)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # of the open file: the child holds it when this process has closed it
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *settings],
            stdin=subprocess.PIPE,  # nothing is written: its end is this process's end
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
            pass_fds=(handle,),
        )
    finally:
        os.close(handle)
    lock = Path(name)
    threading.Thread(target=_clear_up, args=(child, lock), name="kernels-ahead", daemon=True).start()
    return lock


def is_complete(marker: Path) -> bool:
    """Whether all files that it lists are in its folder, or came with the program, with the bytes that they had."""
    try:
        listed = json.loads(unsealed(trusted_bytes(marker) or b"") or b"{}")
        return bool(listed) and all(_bytes_of(name, marker.parent) == size for name, size in listed.items())
    except (ValueError, AttributeError):
        return False


def _bytes_of(name: str, folder: Path) -> int | None:
    """As a start would find it."""
    for path in (shipped_folder() / name, folder / name):
        with contextlib.suppress(OSError):
            return path.stat().st_size
    return None


def _mark_complete(marker: Path, files: set[str]) -> None:
    sizes = {name: _bytes_of(name, marker.parent) for name in sorted(files)}
    if files and None not in sizes.values():
        write_whole(marker, sealed(json.dumps(sizes).encode()))


def complete_name(args: EngineArgs, capability: int) -> str:
    """The name of the file that lists what a cache has for a start with `args`; "" where none can be given: of a
    checkpoint that cannot be read, or compilers that are not known."""
    directory = Path(args.model)
    try:
        architecture = read_architecture(directory)
        model = architecture, read_weight_format(directory), read_speculation(args, architecture)
        compilers = sys.version, *map(version, ("torch", "triton", "nvidia-cuda-nvrtc"))
    except (InvalidInput, PackageNotFoundError):
        return ""
    named = ("TRITON_", "MODELSERVE_KERNELS_DIR", "MODELSERVE_CUDA_BUILD")
    variables = sorted(each for each in os.environ.items() if each[0].startswith(named))
    settings = args.model_dump_json(exclude={"model", "drafter"})
    digest = hashlib.sha256(repr((model, settings, capability, compilers, variables)).encode())
    for package in (modelserve, modelserve_worker):
        for file in sorted(Path(package.__path__[0]).rglob("*")):
            if file.suffix in {".py", ".cu", ".cuh"}:
                digest.update(file.read_bytes())
    return f"modelserve-complete-{digest.hexdigest()}"


def _clear_up(child: subprocess.Popen[bytes], lock: Path) -> None:
    code = child.wait()
    assert child.stdin is not None
    child.stdin.close()  # not before
    lock.unlink(missing_ok=True)
    if code:
        logger.warning(
            "kernels are compiled when they are first launched: what compiles them ahead ended with %d", code
        )


def _end_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _compile(args: EngineArgs, capability: int, processes: int, complete: str) -> None:
    from modelserve_worker.startup.device import with_compute_dtype
    from modelserve_worker.startup.kernel_build import compile_kernels, kernel_folder

    directory = Path(args.model)
    architecture = with_compute_dtype(read_architecture(directory), args)
    folder = kernel_folder()
    if not takes_model(architecture) or folder is None:
        return
    imported_s, files = time.monotonic(), set[str]()
    count = compile_kernels(
        architecture, args, weight_format=read_weight_format(directory), output=folder, capability=capability,
        processes=processes, shipped_first=True, files=files,
    )  # fmt: skip
    logger.info(
        "%d kernels are compiled ahead, by %d processes: %.1f s for modules, %.1f s for kernels",
        count, processes, imported_s - _BEGAN_S, time.monotonic() - imported_s,
    )  # fmt: skip
    with contextlib.suppress(OSError):
        if complete:
            _mark_complete(folder / complete, files)


def main() -> int:
    """The process that compiles. Its arguments: EngineArgs as JSON, compute capability, processes, `complete_name`."""
    settings, capability, processes, complete = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the starter's end is this one's
    threading.Thread(target=_end_with_starter, name="starter-watcher", daemon=True).start()
    try:
        _compile(EngineArgs.model_validate_json(settings), int(capability), int(processes), complete)
    except Exception as error:
        logger.warning("kernels could not be compiled ahead: %s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
