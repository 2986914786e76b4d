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
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from typing import Any

from localcluster.node_profile import NodeProfile, linux_devices
from localcluster.settings import PAUSE_IMAGE, REPOSITORY, WORKER_IMAGE

LENT = Path("/opt/modelserve-lent")  # not where the product's own images have it
KERNELS = Path("/opt/modelserve/kernels")  # where they do, since that is where a worker looks
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nworker:x:65532:65532:worker:/tmp:/bin/sh\n"
_GROUP = "root:x:0:\nworker:x:65532:\n"
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib64")


def _python() -> Path:
    """The interpreter below this program's virtual environment, as a container sees it."""
    interpreter = Path(sys.executable).resolve()
    prefix = Path(sys.base_prefix).resolve()
    return interpreter if prefix.is_relative_to("/usr") else LENT / "python" / interpreter.relative_to(prefix)


def _lent_folders(programs: Path, profile: NodeProfile) -> dict[Path, Path]:
    """Folders that every container sees, read-only: path in the container to path on the host.

    The product's come under LENT and not under their own paths, since a checkout may lie below a folder that pods mount
    over, such as /tmp.
    """
    lent = {Path("/usr"): Path("/usr")}
    lent |= {path: path for name in _SYSTEM_FOLDERS if (path := Path("/") / name).is_dir() and not path.is_symlink()}
    if (prefix := Path(sys.base_prefix).resolve()) and not prefix.is_relative_to("/usr"):
        lent[LENT / "python"] = prefix
    if profile.site is not None:
        lent[LENT / "site"] = profile.site
    if profile.kernels is not None:
        lent[KERNELS] = profile.kernels
    lent[LENT / "site-packages"] = Path(sysconfig.get_path("purelib"))
    return lent | {LENT / name: REPOSITORY / name for name in ("operator", "worker")} | {LENT / "bin": programs}


def write_programs(folder: Path) -> None:
    """Write what `pip install` would put into bin/ of an image: python, and the console scripts of modelserve."""
    folder.mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / name).symlink_to(_python())
    scripts: dict[str, str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    for name, entry_point in scripts.items():
        module, _, function = entry_point.partition(":")
        path = folder / name
        # With the guard that pip writes too: the engine's process, which is spawned, imports this script again.
        guarded = f'if __name__ == "__main__":\n    sys.exit({function}())\n'
        path.write_text(f"#!{_python()}\nimport sys\nfrom {module} import {function}\n{guarded}")
        path.chmod(0o755)


def plain_runtime_spec(default: dict[str, Any], profile: NodeProfile) -> dict[str, Any]:
    """The OCI runtime specification of containers that bring all they need in their image."""
    # Without CAP_SYS_RESOURCE a limit may not be raised above the runtime's own, so containers inherit that.
    process = {name: value for name, value in default["process"].items() if name != "rlimits"}
    return default | {"process": process | {"env": [*process.get("env", ()), *profile.environment]}}


def runtime_spec(default: dict[str, Any], *, programs: Path, profile: NodeProfile) -> dict[str, Any]:
    """The OCI runtime specification that containerd starts from: its own default plus the lent folders and devices."""
    options = ["rbind", "ro", "nosuid", "nodev"]
    mounts = [
        {"destination": str(inside), "source": str(outside), "type": "bind", "options": options}
        for inside, outside in _lent_folders(programs, profile).items()
    ]
    linux = linux_devices(default["linux"], profile.devices)
    return plain_runtime_spec(default, profile) | {"linux": linux, "mounts": [*default["mounts"], *mounts]}


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
        for name in ("etc", "root", "proc", "sys", "dev", "usr", "run", "var", "opt", "models"):
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


def _environment(profile: NodeProfile) -> list[str]:
    site = () if profile.site is None else ("site",)
    libraries = [*profile.libraries]
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        libraries.append(LENT / "python" / "lib")
    searched: dict[str, list[Path]] = {
        "PATH": [LENT / "bin", *profile.programs, *map(Path, ("/usr/local/bin", "/usr/bin", "/bin"))],
        "PYTHONPATH": [LENT / name for name in ("operator", "worker", *site, "site-packages")],
        "LD_LIBRARY_PATH": libraries,
    }
    return [f"{name}={':'.join(map(str, folders))}" for name, folders in searched.items() if folders]


def write_images(folder: Path, *, pause: Path, profile: NodeProfile) -> list[Path]:
    """Write the worker's and the pause image as docker-archives and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    worker, sandbox = folder / "worker.tar", folder / "pause.tar"
    config = {"Env": _environment(profile), "WorkingDir": "/tmp"}
    _write_archive(worker, image=WORKER_IMAGE, layer=_worker_layer(), config=config)
    _write_archive(sandbox, image=PAUSE_IMAGE, layer=_pause_layer(pause), config={"Entrypoint": ["/pause"]})
    return [sandbox, worker]
