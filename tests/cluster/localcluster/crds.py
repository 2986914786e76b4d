"""Installs the product's CustomResourceDefinitions."""

from __future__ import annotations

from localcluster.kubectl import Kubectl, condition, wait_for
from localcluster.settings import REPOSITORY


def install_crds(kubectl: Kubectl) -> None:
    """Apply crds/, whoever applied them before, and wait until the API server serves them."""
    folder = REPOSITORY / "crds"
    names = kubectl.run("apply", "--server-side", "--force-conflicts", "-f", str(folder), "-o", "name").split()

    def established() -> bool:
        return all(condition(kubectl.get(name), "Established").get("status") == "True" for name in names)

    wait_for("the CRD Established", established)
