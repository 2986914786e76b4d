"""A release after this one, made of this one's packages: a later version, one more spec field with a default, and one
more key in plans. For upgrades and rollbacks with real processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from localcluster.kubectl import Kubectl
from localcluster.settings import REPOSITORY
from modelserve import __version__

NEXT = "9.0.0"
FIELD, FIELD_DEFAULT = "compression", "none"
PLAN_KEY, PLAN_VALUE = "tier", "first"

_MODEL = '    model: ModelSource = Field(description="The checkpoint to serve.")\n'
_ACCELERATOR = '    accelerator: Product | None = Field(default=None, description="Accelerator product, or CPU.")\n'
_PLANNED = "        accelerator=fit.accelerator.product,\n        resource_name=resource_name,\n"
_FIELD = '= Field(default={!r}, max_length=20, description="Of the next release.")\n'
_EDITS = {
    "modelserve/__init__.py": (f'"{__version__}"', f'"{NEXT}"'),
    "modelserve/api/spec.py": (_MODEL, f"{_MODEL}    {FIELD}: str {_FIELD.format(FIELD_DEFAULT)}"),
    "modelserve/api/status.py": (_ACCELERATOR, f"{_ACCELERATOR}    {PLAN_KEY}: str | None {_FIELD.format(None)}"),
    "modelserve/planning/report.py": (_PLANNED, f"{_PLANNED}        {PLAN_KEY}={PLAN_VALUE!r},\n"),
}


def make_next_release(folder: Path) -> Path:
    """The packages in `folder`. Fails when this release's code has moved from where it is edited."""
    for package in ("modelserve", "modelserve_operator"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "operator" / package, folder / package, ignore=ignore)
    for name, (before, after) in _EDITS.items():
        text = (folder / name).read_text()
        assert text.count(before) == 1, f"{name} has this {text.count(before)} times: {before}"
        (folder / name).write_text(text.replace(before, after))
    return folder


def install_crds_of(packages: Path, kubectl: Kubectl) -> None:
    """Apply the CRD as another release's code generates it, as its upgrade does first."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-m", "modelserve.cli", "crd"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    kubectl.run("apply", "--server-side", "--force-conflicts", "-f", "-", document=made)
