"""Chooses the folder of the kernel cache: Triton's, or a new one for this process and those that it starts, where that
cannot be written or is not to be trusted. Torch-free and without Triton."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from modelserve_worker.kernels.compiling.kept_files import distrust, make_folder

FOLDER_VARIABLE = "TRITON_CACHE_DIR"
SHIPPED_VARIABLE = "MODELSERVE_KERNELS_DIR"
SHIPPED = Path("/opt/modelserve/kernels")

logger = logging.getLogger(__name__)


def shipped_folder() -> Path:
    """Compiled kernels that came with the program, and are believed as it is; it need not exist."""
    return Path(os.environ.get(SHIPPED_VARIABLE) or SHIPPED)


def cache_folder() -> Path:
    """Triton's cache folder, without Triton."""
    folder = os.environ.get(FOLDER_VARIABLE)
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))  # noqa: PTH111 - Path raises where there is none
    return Path(home, ".triton", "cache") if folder is None else Path(folder)


def folder_fault(folder: Path) -> str | None:
    """Make a folder where it is missing. Why it is no kernel cache: nothing can be written there, or what lies there
    could be anybody's."""
    try:
        make_folder(folder)
        reason = distrust(folder.stat())
        if reason is not None:
            return (
                f"is not used, since what lies there would be run: {reason}. Have it owned by this user, by root or by "
                "a group of this process (a pod's fsGroup), with others unable to write (chmod o-w), or remove it"
            )
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return None


def settle_cache_folder() -> None:
    """Where the folder is at fault, warn and name a new one in the environment."""
    folder = cache_folder()
    if (fault := folder_fault(folder)) is not None:
        os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="modelserve-kernels-")
        logger.warning(
            "the kernel cache %s %s: kernels compiled now go to %s and are lost with the pod",
            folder, fault, os.environ[FOLDER_VARIABLE],
        )  # fmt: skip
