"""The programs of the cluster: Kubernetes and etcd built once from pinned Go modules, the rest from Debian packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from localcluster.settings import GO_MODULE, KUBERNETES_VERSION, ClusterError, cache_dir

PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)
PACKAGES = {  # command: the Debian package that brings it
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
Progress = Callable[[str], None]


def build_folder() -> Path:
    return cache_dir() / f"kube-{KUBERNETES_VERSION}"


def program(name: str) -> Path | None:
    """The program from KUBEBUILDER_ASSETS or the cache folder; None when neither has it."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    for folder in ([Path(assets)] if assets else []) + [build_folder()]:
        if os.access(folder / name, os.X_OK):
            return (folder / name).absolute()
    return None


def require_programs(progress: Progress) -> dict[str, Path]:
    """Paths of PROGRAMS and `pause`, built first where missing. Raises ClusterError when they cannot be built."""
    if any(program(name) is None for name in (*PROGRAMS, "pause")):
        _build(progress)
    return {name: path for name in (*PROGRAMS, "pause") if (path := program(name))}


def _build(progress: Progress) -> None:
    go = shutil.which("go") or "/usr/local/go/bin/go"
    if not Path(go).exists():
        raise ClusterError(
            "Go is not installed, and neither KUBEBUILDER_ASSETS nor the cache folder "
            f"{build_folder()} holds {', '.join(PROGRAMS)}: install Go 1.25 or newer and put it on PATH"
        )
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    version = f"v{KUBERNETES_VERSION}"
    major, minor, _ = KUBERNETES_VERSION.split(".")
    stamps = {
        "k8s.io/component-base/version.gitVersion": version,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": version,
    }
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])
    progress(f"building Kubernetes {KUBERNETES_VERSION} from source, once: about five minutes on two cores")
    for package, output in (("./pause", "pause"), (".", "kube")):
        built = folder / f"{output}.new"
        command = [go, "build", "-trimpath", "-ldflags", flags, "-o", str(built), package]
        done = subprocess.run(command, cwd=GO_MODULE, check=False)
        if done.returncode:
            raise ClusterError(f"building {output} failed with exit status {done.returncode}; the reason is above")
        built.rename(folder / output)
    for name in PROGRAMS:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("kube")


def cni_folder() -> Path | None:
    """Folder of the CNI plugins, wherever the distribution puts them; None when they are not installed."""
    return next((folder for folder in CNI_FOLDERS if (folder / "bridge").exists()), None)


def _missing_packages() -> list[str]:
    missing = {package for command, package in PACKAGES.items() if shutil.which(command) is None}
    if cni_folder() is None:
        missing.add("containernetworking-plugins")
    return sorted(missing)


def require_packages(progress: Progress) -> None:
    """Install the Debian packages whose commands are missing. Raises ClusterError when they cannot be installed."""
    missing = _missing_packages()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"missing programs, and no apt-get to install them: {', '.join(missing)}")
    progress(f"installing Debian packages: {' '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    if still := _missing_packages():
        raise ClusterError(f"packages were installed, but their programs are not on PATH: {', '.join(still)}")
