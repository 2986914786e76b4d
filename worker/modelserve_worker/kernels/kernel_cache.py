"""Where compiled kernels are looked for and put: one rule for every kind of kernel.

Looked for in the folder that an image ships (`modelserve-worker kernels` fills it; SHIPPED_VARIABLE names another),
then in Triton's cache folder (TRITON_CACHE_DIR), where whatever is compiled at run time goes. The second one may lie on
a volume that outlives the pod, and several pods may share it: entries are named by a hash of all that they depend on,
and appear whole. `triton.runtime.cache.get_cache_manager(key)` follows the rule, for kernels of other compilers too.

Processes beside this one may fill the cache while it starts (`execution/kernels_ahead`). Whoever misses a kernel
meanwhile waits until it is there or they have ended, and compiles only what is then still missing.
"""

# mypy: disable-error-code="misc,no-untyped-call"

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import triton
from triton.runtime import build
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import DependenciesFinder, JITFunction

from modelserve.termination import TerminationReason
from modelserve_worker.terminal_error import TerminalError

SHIPPED_VARIABLE = "MODELSERVE_KERNELS_DIR"
SHIPPED = Path("/opt/modelserve/kernels")

DRIVER_LIBRARY = "libcuda.so.1"

COMPILERS_DEADLINE_S = 180.0  # for minutes of one core; then every process compiles for itself
_POLL_S = 0.02

T = TypeVar("T")

_compilers: list[Compilers] = []  # at most one
_update_hash = DependenciesFinder._update_hash

logger = logging.getLogger(__name__)


def shipped_folder() -> Path:
    """Compiled kernels that came with the program; it need not exist."""
    return Path(os.environ.get(SHIPPED_VARIABLE) or SHIPPED)


class ShippedFirst(FileCacheManager):
    """Triton's cache over the two folders. An entry is wholly in one of them, wherever it was made."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        shipped = shipped_folder() / key
        self._shipped = not (override or dump) and shipped.is_dir()
        if self._shipped:
            self.key, self.lock_path, self.cache_dir = key, None, str(shipped)
        else:
            super().__init__(key, override, dump)

    def get_file(self, filename: str) -> str | None:
        """The path of a file that is there. May wait for it, while others compile."""
        found: str | None = awaited(lambda: FileCacheManager.get_file(self, filename))
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Files of one kernel, by name. Triton notes the paths where they were made; here they lie beside the note.
        May wait for them, while others compile."""
        note = Path(self._make_path(f"__grp__{filename}"))
        if not awaited(note.is_file):
            return None
        files = [note.parent / name for name in json.loads(note.read_text())["child_paths"]]
        return {file.name: str(file) for file in files if file.exists()}

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        if self._shipped:  # a part of the entry is missing: make it again in the other folder
            self._shipped = False
            super().__init__(self.key)
        path: str = super().put(data, filename, binary=binary)
        return path


def name_alike() -> None:
    """Have Triton name things alike wherever it runs. By itself it names C modules by whether `file` is installed, and
    kernels by which others this process has named before: the constants of a function that a kernel calls are in the
    kernel's name only where that function's own name is known already."""
    machine = ",".join((platform.machine(), platform.system()))
    vars(build)["platform_key"] = lambda: machine
    DependenciesFinder._update_hash = _name_after_callee


def _name_after_callee(finder: DependenciesFinder, callee: JITFunction[Any]) -> None:
    callee.cache_key  # noqa: B018 - finds its constants
    _update_hash(finder, callee)


def use_kernel_cache() -> None:
    """Follow the rule in this process from now on. A cache folder that cannot be written is replaced, with a warning.

    Raises TerminalError where Triton's own part of a GPU's driver can be neither found nor built.
    """
    triton.knobs.cache.manager_class = ShippedFirst
    name_alike()
    if not triton.knobs.nvidia.libcuda_path:
        triton.knobs.nvidia.libcuda_path = driver_folder(Path("/proc/self/maps").read_text())
    folder = Path(triton.knobs.cache.dir)
    if (error := write_error(folder)) is not None:
        triton.knobs.cache.dir = tempfile.mkdtemp(prefix="modelserve-kernels-")
        logger.warning(
            "the kernel cache %s cannot be written (%s): kernels compiled now go to %s and are lost with the pod",
            folder, error.strerror, triton.knobs.cache.dir,
        )  # fmt: skip
    with compilations():
        triton.runtime.driver.active.get_current_target()


def write_error(folder: Path) -> OSError | None:
    """Make a folder where it is missing. What keeps files from being made in it, if anything does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error
    return None


def driver_folder(mapped: str) -> str | None:
    """The folder of the GPU driver's library, from the memory maps of a process that uses the GPU; None where it is not
    among them. By itself Triton asks `ldconfig -p`, which fails in an image without a cache of libraries."""
    for line in mapped.splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcuda.so") and (path.parent / DRIVER_LIBRARY).exists():
            return str(path.parent)
    return None


class Compilers:
    """Other processes that compile, for as long as one of them holds `lock` (flock)."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._waited_s = 0.0

    def go_on(self) -> bool:
        """Wait a moment. False when what they have made is there, or when they take too long."""
        late = self._waited_s > COMPILERS_DEADLINE_S
        if late or not _is_held(self._lock):
            how = "they take too long, and this process compiles for itself" if late else "they are done"
            logger.log(
                logging.WARNING if late else logging.INFO,
                "waited %.1f s for kernels that are compiled ahead: %s", self._waited_s, how,
            )  # fmt: skip
            return False
        time.sleep(_POLL_S)
        self._waited_s += _POLL_S
        return True


def wait_for_compilers(lock: Path | None) -> None:
    """From now on a kernel that is missing is waited for, while another process holds `lock`; None: no more."""
    _compilers[:] = [] if lock is None else [Compilers(lock)]


def awaited(look: Callable[[], T]) -> T:
    """What `look` finds. As long as that is nothing and others compile, it looks again, and once when they are done."""
    found = look()
    while not found and _compilers:
        if not _compilers[0].go_on():
            _compilers.clear()
        found = look()
    return found


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # its holder has ended, and somebody has cleared up
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def compilations() -> Iterator[None]:
    """A kernel that is in no cache and cannot be compiled inside is TerminalError KernelsUnavailable."""
    try:
        yield
    except RuntimeError as error:
        if c_compiler() is not None or "C compiler" not in str(error):
            raise
        raise TerminalError(
            TerminationReason.KernelsUnavailable,
            f"a kernel is neither in {shipped_folder()} nor in {triton.knobs.cache.dir}, and there is no C compiler to "
            "build its launcher: use an image with kernels for this GPU and model (`modelserve-worker kernels`), "
            "install gcc, or name a compiler in CC",
        ) from error


def c_compiler() -> str | None:
    """The program that Triton would build launchers with."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
