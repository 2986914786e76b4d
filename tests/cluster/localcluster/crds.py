"""Installs the product's CustomResourceDefinitions."""

from __future__ import annotations

from localcluster.kubectl import condition, wait_for
from localcluster.settings import REPOSITORY
from localcluster.target import Target


def install_crds(target: Target) -> None:
    """Apply crds/ and wait until the API server serves them."""
    folder = REPOSITORY / "crds"
    names = target.kubectl.run("apply", "--server-side", "-f", str(folder), "-o", "name").split()

    def established() -> bool:
        return all(condition(target.kubectl.get(name), "Established").get("status") == "True" for name in names)

    wait_for("the CRD Established", established, timeout_s=30)
