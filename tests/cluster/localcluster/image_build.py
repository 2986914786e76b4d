"""Builds the product's images from their Dockerfiles with buildah, where no registry is reached.

The images' base, `python:3.11-slim-bookworm`, stands in for itself: a Debian of the same release with the same Python
version, made by debootstrap, committed under the name that FROM asks for. All else is as a user builds it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from localcluster.binaries import Progress, install_packages
from localcluster.settings import REPOSITORY, ClusterError, cache_dir

BASE = "docker.io/library/python:3.11-slim-bookworm"
IMAGES = ("operator", "worker")
TAG = "built"
PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap"}  # command: the Debian package that brings it
NEEDED_BYTES = 20 * 10**9
"""Free bytes with which `build` may begin. The most is held at the import into a node, 18 GB: the archives, 6 GB, and
of each image the node's content and its snapshot. The build itself holds the worker three times."""
_PACKAGES = "ca-certificates,python3,python3-venv,python3-dev,gcc,libc6-dev"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def image_name(image: str) -> str:
    return f"docker.io/library/modelserve-{image}"


def archive(image: str, cache: Path | None = None) -> Path:
    """The docker-archive that `build` writes."""
    return _folder(cache) / f"{image}.tar"


def obstacle() -> str:
    """Why the disk cannot take the images; empty when it can."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    return too_little(cache_dir(), shutil.disk_usage(cache_dir()).free)


def too_little(cache: Path, free: int) -> str:
    """The same where so many bytes are free. Archives that are kept are part of the need."""
    archives = [archive(image, cache) for image in IMAGES]
    free += sum(each.stat().st_size for each in archives if each.exists())
    if free >= NEEDED_BYTES:
        return ""
    needed = f"{NEEDED_BYTES / 1e9:.0f} GB at {cache} while they are built and tested"
    return f"the images need {needed}; {free / 1e9:.1f} GB are free"


def build(progress: Progress) -> None:
    """Write the archive of each of IMAGES. Raises ClusterError with the end of what a failed program wrote."""
    install_packages(PROGRAMS, progress)
    _temporary().mkdir(parents=True, exist_ok=True)
    if _buildah("images", "--quiet", BASE, check=False).returncode:
        _make_base(progress)
    for image in IMAGES:
        digest, stamp = _digest(image), archive(image).with_suffix(".digest")
        if archive(image).exists() and stamp.exists() and stamp.read_text() == digest:
            continue
        progress(f"building images/{image}/Dockerfile")
        archive(image).unlink(missing_ok=True)
        _buildah(
            "bud",
            "--isolation=chroot",
            "--network=host",
            "--pull-never",
            "--layers=false",
            *_trust(),
            f"--volume={_cache()}:/root/.cache/uv",
            f"--file=images/{image}/Dockerfile",
            f"--tag=docker-archive:{archive(image)}:{image_name(image)}:{TAG}",
            ".",
        )
        stamp.write_text(digest)
    _buildah("rm", "--all")


def remove() -> None:
    """Everything but the base and downloaded packages, also what a build left that was broken off."""
    if shutil.which("buildah") is not None:
        _buildah("rm", "--all", check=False)
    for left in _temporary().glob("*"):
        if left.is_file():
            left.unlink()
        elif left.name != "buildah-cache":  # of the Dockerfiles' cache mounts
            shutil.rmtree(left, ignore_errors=True)
    for image in IMAGES:
        archive(image).unlink(missing_ok=True)


def _digest(image: str) -> str:
    """Of every file that the image is built from."""
    folders = ("operator/modelserve", "operator/modelserve_operator" if image == "operator" else "worker")
    files = [REPOSITORY / "pyproject.toml", *(REPOSITORY / "images" / image).iterdir()]
    files += [
        path for folder in folders for path in (REPOSITORY / folder).rglob("*") if "__pycache__" not in path.parts
    ]
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        digest.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _make_base(progress: Progress) -> None:
    progress("making the images' base with debootstrap")
    tree = _folder() / "base"
    shutil.rmtree(tree, ignore_errors=True)
    _run(["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(tree)])
    container = _buildah("from", "scratch").stdout.strip()
    _buildah("add", "--quiet", container, str(tree), "/")
    _buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(tree)


def _trust() -> list[str]:
    """Authorities that this machine trusts beside the usual ones, for what the build downloads."""
    if "SSL_CERT_FILE" not in os.environ:
        return []
    return [
        f"--volume={os.environ['SSL_CERT_FILE']}:{_CERTIFICATES}:ro",
        f"--build-arg=SSL_CERT_FILE={_CERTIFICATES}",
        f"--build-arg=PIP_CERT={_CERTIFICATES}",
    ]


def _cache() -> Path:
    """The packages that this machine has downloaded before: those of its own environment among them."""
    folder = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _folder(cache: Path | None = None) -> Path:
    return (cache or cache_dir()) / "images"


def _temporary() -> Path:
    """Where buildah writes a layer before it copies it into the archive."""
    return _folder() / "tmp"


def _buildah(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    store = [f"--root={_folder()}/storage", f"--runroot={_folder()}/run"]
    return _run(["buildah", *store, *arguments], check=check)


def _run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(_temporary())}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if check and done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ClusterError(f"{' '.join(command[:4])} ... ended with exit status {done.returncode}:\n{end}")
    return done
