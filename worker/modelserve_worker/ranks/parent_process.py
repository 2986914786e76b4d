"""A child process that ends with its parent, however that ends."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """For a thread: wait for the end of the process that started this one, then end it at once with exit code 1."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was not started by another one's multiprocessing"
    wait([parent.sentinel])
    os._exit(1)
