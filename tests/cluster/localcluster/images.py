"""Container images without a registry, and the userland that the node lends to its containers.

The worker image holds a few empty folders and a user. What would be its content in production (Python, torch, our
packages) is bind-mounted read-only by the container runtime into every container, through containerd's base runtime
specification. Pod manifests know nothing of it, so the demo's pods are the product's pods.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from localcluster.settings import PAUSE_IMAGE, REPOSITORY, WORKER_IMAGE

_PASSWD = "root:x:0:0:root:/root:/bin/sh\nworker:x:65532:65532:worker:/tmp:/bin/sh\n"
_GROUP = "root:x:0:\nworker:x:65532:\n"
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib64")


def _python_folders() -> list[Path]:
    """The virtual environment this program runs in, and the Python installation below it."""
    return [Path(sys.prefix), Path(sys.base_prefix).resolve()]


def lent_folders() -> list[Path]:
    """Host folders that every container sees, read-only, under the same path.

    The packages are installed in editable mode, so the repository's source folders belong to the environment.
    """
    folders = [Path("/usr"), *(Path("/") / name for name in _SYSTEM_FOLDERS if not (Path("/") / name).is_symlink())]
    folders += [*_python_folders(), REPOSITORY / "operator", REPOSITORY / "worker"]
    kept: list[Path] = []
    for folder in folders:
        if folder.is_dir() and not any(folder.is_relative_to(other) for other in kept):
            kept.append(folder)
    return kept


def runtime_spec(default: dict[str, Any]) -> dict[str, Any]:
    """The OCI runtime specification that containerd starts from: its own default plus the lent folders."""
    options = ["rbind", "ro", "nosuid", "nodev"]
    mounts = [
        {"destination": str(folder), "source": str(folder), "type": "bind", "options": options}
        for folder in lent_folders()
    ]
    # Without CAP_SYS_RESOURCE a limit may not be raised above the runtime's own, so containers inherit that.
    process = {name: value for name, value in default["process"].items() if name != "rlimits"}
    return default | {"process": process, "mounts": [*default["mounts"], *mounts]}


def _folder(archive: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    archive.addfile(entry)


def _file(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def _worker_layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("etc", "root", "proc", "sys", "dev", "usr", "run", "var", "models"):
            _folder(archive, name, 0o755)
        _folder(archive, "tmp", 0o1777)
        _file(archive, "etc/passwd", _PASSWD.encode())
        _file(archive, "etc/group", _GROUP.encode())
        for name in _SYSTEM_FOLDERS:
            host = Path("/") / name
            if host.is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, str(host.readlink())
                archive.addfile(entry)
    return buffer.getvalue()


def _pause_layer(program: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _file(archive, "pause", program.read_bytes(), 0o755)
    return buffer.getvalue()


def _write_archive(path: Path, *, image: str, layer: bytes, config: dict[str, Any]) -> None:
    """A docker-archive of one layer: manifest.json, the image configuration, the layer."""
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created_by": "modelserve local cluster"}],
    }
    encoded = json.dumps(document).encode()
    name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [image], "Layers": ["layer.tar"]}]
    with tarfile.open(path, mode="w") as archive:
        _file(archive, "layer.tar", layer)
        _file(archive, name, encoded)
        _file(archive, "manifest.json", json.dumps(manifest).encode())


def write_images(folder: Path, *, pause: Path) -> list[Path]:
    """Write the worker's and the pause image as docker-archives and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    search = [str(Path(prefix) / "bin") for prefix in _python_folders()]
    path = ":".join([*search, "/usr/local/bin", "/usr/bin", "/bin"])
    worker, sandbox = folder / "worker.tar", folder / "pause.tar"
    _write_archive(
        worker, image=WORKER_IMAGE, layer=_worker_layer(), config={"Env": [f"PATH={path}"], "WorkingDir": "/tmp"}
    )
    _write_archive(sandbox, image=PAUSE_IMAGE, layer=_pause_layer(pause), config={"Entrypoint": ["/pause"]})
    return [sandbox, worker]
