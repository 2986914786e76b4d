"""The programs of a Kubernetes node as a few small archives, for a machine that can download nothing.

    python tests/bench node_archive pack FOLDER       # where `make demo` has run; needs pip and xz
    python tests/bench node_archive unpack FOLDER TO  # on the other machine; needs nothing but Python
    python tests/bench node_archive run FOLDER [...]  # there: unpacks, then kubernetes_on_gpu with these flags

Packed are kube (every Kubernetes program in one binary), containerd with runc and CNI plugins and the shared libraries
they need, and the Python packages that the operator and the worker need beside torch, for Python 3.12 on x86-64.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.entries import ROOT, command

KUBE = Path("kube-1.34.4")
KUBE_PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)
PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "ip")
PLUGINS = ("bridge", "host-local", "loopback")
PACKAGES = (
    "aiohttp", "aiohttp-retry", "annotated-types", "certifi", "cffi", "click", "cryptography", "durationpy", "iso8601",
    "jsonpatch", "jsonpointer", "kopf", "kubernetes", "llguidance", "msgspec", "oauthlib", "pycparser", "pydantic",
    "pydantic-core", "python-dateutil", "python-json-logger", "requests", "requests-oauthlib", "starlette",
    "typing-extensions", "typing-inspection", "urllib3", "uvicorn", "websocket-client",
)  # fmt: skip
_GLIBC = re.compile(r"lib(c|m|dl|rt|pthread|resolv)\.so|ld-linux|linux-vdso")


def pack(folder: Path) -> None:
    """Write kube.tar.xz, node.tar.xz and site.tar.xz to `folder`: about 60 MiB together."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _collect_kube(root / "kube" / KUBE)
        _collect_node(root / "node")
        _collect_site(root / "site" / "site")
        for name in ("kube", "node", "site"):
            _compress(root / name, folder / f"{name}.tar.xz")


def _collect_kube(folder: Path) -> None:
    folder.mkdir(parents=True)
    built = Path.home() / ".cache" / "modelserve" / KUBE
    for name in ("kube", "pause"):
        shutil.copy(built / name, folder)


def _collect_node(folder: Path) -> None:
    """bin/, cni/ and lib/, each program without its symbols."""
    plugins = next(path for path in map(Path, ("/usr/lib/cni", "/opt/cni/bin")) if (path / "bridge").exists())
    sources = {folder / "bin" / name: Path(shutil.which(name) or name) for name in PROGRAMS}
    sources |= {folder / "cni" / name: plugins / name for name in PLUGINS}
    for name in ("bin", "cni", "lib"):
        (folder / name).mkdir(parents=True)
    for target, source in sources.items():
        shutil.copy(source, target)
        for library in _libraries(source):
            shutil.copy(library, folder / "lib")


def _libraries(program: Path) -> list[Path]:
    """Shared libraries that a program is linked to, the C library's own left out."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    found = [Path(match[1]) for match in re.finditer(r"=> (/\S+)", listed)]
    return [path for path in found if not _GLIBC.match(path.name)]


def _collect_site(folder: Path) -> None:
    """PACKAGES at the versions of requirements.txt."""
    pinned = (ROOT / "requirements.txt").read_text()
    versions = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", pinned, re.MULTILINE))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 17)] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", f"--target={folder}"]
    command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
    command += [f"--platform={name}" for name in (*platforms, "any")]
    subprocess.run([*command, *(f"{name}=={versions[name]}" for name in PACKAGES)], check=True)


def _compress(folder: Path, archive: Path) -> None:
    with archive.open("wb") as output:
        tar = subprocess.Popen(
            ["tar", "--create", "--sort=name", "--owner=0", "--group=0", f"--directory={folder}", "."],
            stdout=subprocess.PIPE,
        )
        # A window of 192 MiB sees the whole of the largest program; the x86 filter makes machine code repeat itself.
        subprocess.run(["xz", "--x86", "--lzma2=preset=9,dict=192MiB"], stdin=tar.stdout, stdout=output, check=True)
        if tar.wait():
            raise SystemExit(f"tar of {folder} failed")


def unpack(folder: Path, target: Path) -> None:
    """Unpack every archive below `target`, one thread each, and install the shared libraries that are missing."""
    target.mkdir(parents=True, exist_ok=True)
    archives = sorted(folder.glob("*.tar.xz"))
    if not archives:
        raise SystemExit(f"{folder} holds no *.tar.xz: was the folder carried along?")
    with ThreadPoolExecutor(len(archives)) as pool:
        list(pool.map(lambda archive: _extract(archive, target), archives))
    for name in KUBE_PROGRAMS:
        program = target / KUBE / name
        program.unlink(missing_ok=True)
        program.symlink_to("kube")
    missing = [library for library in sorted((target / "lib").iterdir()) if not _loadable(library.name)]
    for library in missing:
        shutil.copy(library, "/usr/local/lib")
    if missing:
        subprocess.run(["ldconfig"], check=True)


def _extract(archive: Path, target: Path) -> None:
    with tarfile.open(archive, "r:xz") as opened:
        opened.extractall(target, filter="tar")


def _loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("pack").add_argument("folder", type=Path)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("target", type=Path)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--target", type=Path, default=Path("/opt/modelserve-node"))
    options, flags = parser.parse_known_args()
    if flags and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if options.command == "pack":
        pack(options.folder)
    else:
        began = time.monotonic()
        unpack(options.folder, options.target)
        print(f"unpacked in {time.monotonic() - began:.0f} s", flush=True)
    if options.command == "run":
        _run(options.target, flags)


def _run(node: Path, flags: list[str]) -> None:
    """This process becomes kubernetes_on_gpu with these flags, on the unpacked programs and packages."""
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"} | {
        "MODELSERVE_CACHE": str(node), "CNI_PATH": f"{node}/cni", "PATH": f"{node}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{node}/site", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    words = command("kubernetes_on_gpu", "--site", f"{node}/site", *flags)
    os.execve(words[0], words, environment)
