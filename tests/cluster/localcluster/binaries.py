"""The programs of the cluster: Kubernetes and etcd built once from pinned Go modules, the rest from Debian packages."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
    "ip": "iproute2",
    "nsenter": "util-linux",
}
SERVICE_PACKAGES = {"iptables": "iptables", "conntrack": "conntrack", "ethtool": "ethtool", "socat": "socat"}
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
Progress = Callable[[str], None]


def build_folder() -> Path:
    return cache_dir() / f"kube-{KUBERNETES_VERSION}"


def _has(folder: Path, *names: str) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in names)


def programs_folder() -> Path | None:
    """KUBEBUILDER_ASSETS or the cache folder, the first that holds all of PROGRAMS: versions must not be mixed."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    folders = ([Path(assets).absolute()] if assets else []) + [build_folder()]
    return next((folder for folder in folders if _has(folder, *PROGRAMS)), None)


def require_programs(progress: Progress) -> dict[str, Path]:
    """Paths of PROGRAMS and `pause`, built first where missing. Raises ClusterError when they cannot be built."""
    if not _has(build_folder(), "pause"):
        _build("./pause", "pause")
    folder = programs_folder()
    if folder is None:
        progress(f"building Kubernetes {KUBERNETES_VERSION} from source, once: about five minutes on two cores")
        _build(".", "kube")
        for name in PROGRAMS:
            (build_folder() / name).unlink(missing_ok=True)
            (build_folder() / name).symlink_to("kube")
        folder = build_folder()
    return {name: folder / name for name in PROGRAMS} | {"pause": build_folder() / "pause"}


class Tool(NamedTuple):
    """A program of a Go module beside this package, pinned by its go.sum."""

    module: str
    package: str
    flag: str = "-tags="  # to `go build`


TOOLS = {
    "helm": Tool("helm", "helm.sh/helm/v3/cmd/helm"),
    "gitops": Tool("gitops", "."),
    "karpenter": Tool("karpenter", "sigs.k8s.io/karpenter/kwok"),  # with its cloud provider that makes nodes of nothing
    # Clients of every cloud are left out.
    "promtool": Tool("promtool", "github.com/prometheus/prometheus/cmd/promtool", "-tags=remove_all_sd"),
    # Kubernetes' own module and flag: most of it has then been compiled for the API server.
    "custom-metrics": Tool("kube", "./custom-metrics", "-trimpath"),
}


def require_tool(name: str, progress: Progress) -> Path:
    """Path of one of TOOLS, built first where it is missing. Raises ClusterError when it cannot be built."""
    tool = TOOLS[name]
    module = GO_MODULE.parent / tool.module
    own = sorted((module / tool.package).glob("*.go"))
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in (module / "go.sum", *own))).hexdigest()[:10]
    program = cache_dir() / f"{name}-{digest}" / name
    if os.access(program, os.X_OK):
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    with (program.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of tests side by side one builds, and the others wait
        if os.access(program, os.X_OK):
            return program
        progress(f"building {name} from source, once")
        built = program.with_suffix(".new")
        command = [_go(name), "build", "-buildvcs=false", "-ldflags=-s -w", tool.flag, "-o", str(built), tool.package]
        done = subprocess.run(command, cwd=module, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"building {name} failed:\n{done.stderr[-2000:]}")
        built.rename(program)
    return program


def tools_folder(name: str, progress: Progress) -> Path:
    """Folder with all programs that the go.mod beside kube/ names as tools, built first where one is missing.

    Raises ClusterError when they cannot be built.
    """
    module = GO_MODULE.parent / name
    digest = hashlib.sha256((module / "go.sum").read_bytes()).hexdigest()[:10]
    folder = cache_dir() / f"{name}-{digest}"
    done = folder / "built"
    if not done.exists():
        progress(f"building {name} from source, once")
        folder.mkdir(parents=True, exist_ok=True)
        command = [_go(name), "build", "-buildvcs=false", "-ldflags=-s -w", "-o", f"{folder}/", "tool"]
        built = subprocess.run(command, cwd=module, capture_output=True, text=True, check=False)
        if built.returncode:
            raise ClusterError(f"building {name} failed:\n{built.stderr[-2000:]}")
        done.touch()
    return folder


def module_folder(tool: str, module: str) -> Path:
    """Where Go keeps the source of a module that one of TOOLS requires, fetched first where it is missing.

    Raises ClusterError.
    """
    command = [_go(tool), "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=GO_MODULE.parent / tool, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{module} cannot be fetched:\n{(done.stderr or done.stdout)[-1000:]}")
    return Path(json.loads(done.stdout)["Dir"])


def _go(wanted: str) -> str:
    go = shutil.which("go") or "/usr/local/go/bin/go"
    if not Path(go).exists():
        raise ClusterError(
            f"Go is not installed, and {wanted} has to be built: install Go 1.26 or newer and put it on PATH"
        )
    return go


def _build(package: str, output: str) -> None:
    go = _go(f"{', '.join((*PROGRAMS, 'pause'))} (neither KUBEBUILDER_ASSETS nor {build_folder()} holds them)")
    build_folder().mkdir(parents=True, exist_ok=True)
    version = f"v{KUBERNETES_VERSION}"
    major, minor, _ = KUBERNETES_VERSION.split(".")
    stamps = {  # without them the server reports v0.0.0 and clients misbehave
        "k8s.io/component-base/version.gitVersion": version,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": version,
    }
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])
    built = build_folder() / f"{output}.new"
    command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", str(built), package]
    done = subprocess.run(command, cwd=GO_MODULE, check=False)
    if done.returncode:
        raise ClusterError(f"building {output} failed with exit status {done.returncode}; the reason is above")
    built.rename(build_folder() / output)


def cni_folder() -> Path | None:
    """Folder of the CNI plugins: CNI_PATH, else wherever the distribution puts them; None when there are none."""
    named = os.environ.get("CNI_PATH")
    folders = (Path(named), *CNI_FOLDERS) if named else CNI_FOLDERS
    return next((folder for folder in folders if (folder / "bridge").exists()), None)


def _missing_packages(packages: dict[str, str]) -> list[str]:
    missing = {package for command, package in packages.items() if shutil.which(command) is None}
    if cni_folder() is None:
        missing.add("containernetworking-plugins")
    return sorted(missing)


def install_packages(packages: dict[str, str], progress: Progress) -> None:
    """Install the Debian packages whose commands are missing. Raises ClusterError when they cannot be installed."""
    if missing := sorted({package for command, package in packages.items() if shutil.which(command) is None}):
        _apt_install(missing, progress)


def require_packages(progress: Progress, *, services: bool) -> None:
    """Install the Debian packages whose commands are missing. Raises ClusterError when they cannot be installed.

    Without `services` what kube-proxy and masquerading need is not asked for.
    """
    packages = PACKAGES | (SERVICE_PACKAGES if services else {})
    missing = _missing_packages(packages)
    if not missing:
        return
    _apt_install(missing, progress)
    if still := _missing_packages(packages):
        raise ClusterError(f"packages were installed, but their programs are not on PATH: {', '.join(still)}")


def _apt_install(packages: list[str], progress: Progress) -> None:
    if shutil.which("apt-get") is None:
        raise ClusterError(f"missing programs, and no apt-get to install them: {', '.join(packages)}")
    progress(f"installing Debian packages: {' '.join(packages)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
