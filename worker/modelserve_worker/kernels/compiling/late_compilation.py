"""Says when a kernel is compiled while requests wait for it: every one should have been at start-up."""

from __future__ import annotations

import logging
import time
from typing import Any

import triton

logger = logging.getLogger(__name__)

_began: list[float] = []


def log_late_compilations() -> None:
    """Log each kernel that this process compiles from now on, with its specialisation and the milliseconds it took."""
    triton.knobs.runtime.jit_cache_hook = _before
    triton.knobs.runtime.jit_post_compile_hook = _after


def _before(**_: Any) -> bool:
    _began[:] = [time.perf_counter()]
    return False  # compile


def _after(*, repr: str, **_: Any) -> bool:  # noqa: A002 - the hook's own name for it
    milliseconds = (time.perf_counter() - _began[0]) * 1e3
    logger.warning(
        "compiled %s while serving, in %.0f ms: start-up did not run this specialisation", repr, milliseconds
    )
    return False
