"""What code costs, counted and not timed: the instructions that the interpreter executes in the worker's modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import modelserve_worker

_WORKER = str(Path(modelserve_worker.__file__).parent)


def counted(run: Callable[[], object]) -> int:
    """Instructions that `run` takes. Loops of other modules, and of what is written in C, count as one."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            if not frame.f_code.co_filename.startswith(_WORKER):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count
