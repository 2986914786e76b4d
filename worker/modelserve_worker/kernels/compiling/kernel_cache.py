"""Where compiled kernels are looked for and put: one rule for every kind of kernel.

Looked for in the folder that an image ships (`modelserve-worker kernels` fills it; SHIPPED_VARIABLE names another),
then in Triton's cache folder (TRITON_CACHE_DIR), where whatever is compiled at run time goes. The second one may lie on
a volume that outlives the pod, and several pods may share it: entries are named by a hash of all that they depend on,
and appear whole. `triton.runtime.cache.get_cache_manager(key)` follows the rule, for kernels of other compilers too.

Processes beside this one may fill the cache while it starts (`startup/kernels_ahead`). Whoever misses a kernel
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
from typing import Any, ClassVar, TypeVar

import triton
from triton.runtime import build
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import DependenciesFinder, JITFunction

from modelserve.termination import TerminationReason
from modelserve_worker.kernels.compiling.cache_folder import settle_cache_folder, shipped_folder
from modelserve_worker.kernels.compiling.kept_files import (
    digest,
    distrust,
    sealed,
    tell,
    trusted_bytes,
    unsealed,
    write_whole,
)
from modelserve_worker.terminal_error import TerminalError

DRIVER_LIBRARY = "libcuda.so.1"

COMPILERS_DEADLINE_S = 180.0  # for minutes of one core; then every process compiles for itself
_POLL_S = 0.02
_LIBRARY = ".so"

T = TypeVar("T")

_compilers: list[Compilers] = []  # at most one
_update_hash = DependenciesFinder._update_hash

logger = logging.getLogger(__name__)


class CheckedCache(FileCacheManager):
    """Triton's cache, whose files are written whole and read where they are what was written (`kept_files`): of one
    that is not, Triton hears that it is missing, compiles it and puts it there again. A note of a group has the digests
    of its files; libraries have theirs at the end. What cannot be put there goes to a folder of this process.
    """

    used: ClassVar[set[str]] = set()
    """What this process has found or put there, as ENTRY/FILE."""

    _own: ClassVar[list[Path]] = []  # at most one

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._plain = override or dump
        if self._plain:
            super().__init__(key, override, dump)
            return
        self.key, self.lock_path = key, None
        self.cache_dir = str(Path(triton.knobs.cache.dir) / key)
        self._digests: dict[str, str] = {}

    def get_file(self, filename: str) -> str | None:
        """The path of a file that is there. May wait for it, while others compile."""
        if self._plain:
            plain: str | None = super().get_file(filename)
            return plain
        return awaited(lambda: self._file(filename))

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Files of one kernel, by name. Triton notes the paths where they were made; here they lie beside the note.
        May wait for them, while others compile."""
        return awaited(lambda: self._group(f"__grp__{filename}"))

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        if self._plain:
            plain: str = super().put(data, filename, binary=binary)
            return plain
        content = data if isinstance(data, bytes) else str(data).encode()
        self._digests[filename] = digest(content)
        content = sealed(content) if filename.endswith(_LIBRARY) else content
        path = Path(self.cache_dir, filename)
        try:
            write_whole(path, content)
        except OSError as error:
            tell(
                f"{path} cannot be written ({error.strerror}): what is compiled goes to {self._own_folder()} meanwhile"
            )
            self.cache_dir = str(self._own_folder() / self.key)
            path = Path(self.cache_dir, filename)
            write_whole(path, content)
        self.used.add(f"{self.key}/{filename}")
        return str(path)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        digests = {name: self._digests.get(name) or digest(Path(path).read_bytes()) for name, path in group.items()}
        return self.put(json.dumps({"child_paths": group, "sha256": digests}), f"__grp__{filename}", binary=False)

    def _folders(self) -> Iterator[tuple[Path, bool]]:
        """Where the entry may lie, and whether it came with the program: then it is believed as it is."""
        folder = Path(triton.knobs.cache.dir, self.key)
        if folder.is_dir():
            reason = distrust(folder.stat())
            if reason is None:
                yield folder, False
            else:
                tell(f"{folder} is not used: {reason}")
        for own in self._own:
            yield own / self.key, False

    def _file(self, filename: str) -> str | None:
        for folder, shipped in self._folders():
            path = folder / filename
            content = trusted_bytes(path, shipped=shipped)
            if content is not None:
                if shipped or not filename.endswith(_LIBRARY) or unsealed(content) is not None:
                    self.used.add(f"{self.key}/{filename}")
                    return str(path)
                tell(f"{path} is damaged, and is compiled anew")
        return None

    def _group(self, note: str) -> dict[str, str] | None:
        for folder, shipped in self._folders():
            path = folder / note
            if not path.is_file():
                continue
            files = _sound_files(path, shipped=shipped)
            if files is not None:
                self.used.update(f"{self.key}/{name}" for name in (note, *files))
                return {name: str(folder / name) for name in files}
            tell(f"{path} or a file of it is damaged, and is compiled anew")
        return None

    @classmethod
    def _own_folder(cls) -> Path:
        if not cls._own:
            cls._own.append(Path(tempfile.mkdtemp(prefix="modelserve-kernels-")))
        return cls._own[0]


class ShippedFirst(CheckedCache):
    """The same behind what came with the program. An entry is read from one of the folders, wherever it was made."""

    def _folders(self) -> Iterator[tuple[Path, bool]]:
        shipped = shipped_folder() / self.key
        if shipped.is_dir():
            yield shipped, True
        yield from super()._folders()


def _sound_files(note: Path, *, shipped: bool) -> list[str] | None:
    """Names of the files of a note that lie beside it, all of them as they were written. A release that noted no
    digests is believed where it came with the program."""
    try:
        told = json.loads(trusted_bytes(note, shipped=shipped) or b"")
        names = [Path(name).name for name in told["child_paths"]]
        digests = told.get("sha256")
        if digests is None:
            return [name for name in names if (note.parent / name).exists()] if shipped else None
        contents = {name: trusted_bytes(note.parent / name, shipped=shipped) for name in names}
        sound = all(content is not None and digest(content) == digests[name] for name, content in contents.items())
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return names if sound else None


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
    """Follow the rule in this process from now on. A cache folder that cannot be written, or that others could write,
    is replaced, with a warning.

    Raises TerminalError where Triton's own part of a GPU's driver can be neither found nor built.
    """
    triton.knobs.cache.manager_class = ShippedFirst
    name_alike()
    if not triton.knobs.nvidia.libcuda_path:
        triton.knobs.nvidia.libcuda_path = driver_folder(Path("/proc/self/maps").read_text())
    settle_cache_folder()
    with compilations():
        triton.runtime.driver.active.get_current_target()


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
