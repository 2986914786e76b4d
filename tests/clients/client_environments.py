"""Where the clients are installed: beside the repository's other caches, once per set of pinned versions."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from client_table import HERE, requirements

CACHE = HERE.parents[1] / ".cache" / "clients"
_DONE = "installed"


def python_of(environment: str) -> Path:
    """The interpreter of a virtual environment with the pinned Python clients."""
    pinned = requirements(environment)
    with _installing(f"{environment}-{_digest(pinned)}") as directory:
        if directory is not None:
            uv = Path(sys.executable).with_name("uv")
            _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, directory)
            python = directory / "bin" / "python"
            _run(uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "-r", pinned)
    return CACHE / f"{environment}-{_digest(pinned)}" / "bin" / "python"


def node_directory() -> Path:
    """A directory with the pinned Node clients and the scripts that use them."""
    source = HERE / "node"
    name = f"node-{_digest(source / 'package-lock.json')}"
    with _installing(name) as directory:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            for lock in ("package.json", "package-lock.json"):
                shutil.copy(source / lock, directory)
            _run("npm", "ci", "--no-audit", "--no-fund", "--silent", cwd=directory)
    for script in source.glob("*.mjs"):
        shutil.copy(script, CACHE / name)
    return CACHE / name


@contextmanager
def _installing(name: str) -> Iterator[Path | None]:
    """The directory to install into, None where that is done; one process at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    directory = CACHE / name
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (directory / _DONE).exists():
            yield None
        else:
            yield directory
            (directory / _DONE).touch()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[:3]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
