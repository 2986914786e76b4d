"""`modelserve-worker` with a stub for its engine: stub_worker.py SETTINGS TERMINATION_FILE serve FLAGS...

SETTINGS are keyword arguments of stub_engine.build, as JSON; the termination message goes to TERMINATION_FILE.
When the worker ends, the last line of standard output names the heavy modules that this process has imported.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import stub_engine

from modelserve.engine_args import EngineArgs
from modelserve.termination import write_termination
from modelserve_worker import __main__ as worker
from modelserve_worker.engine.child import BuiltEngine


def build(settings: dict[str, Any], args: EngineArgs, progress: Callable[[int, int], None]) -> BuiltEngine:
    assert args.model
    return stub_engine.build(progress, **settings)


if __name__ == "__main__":
    settings, termination, *arguments = sys.argv[1:]
    worker.build_engine = functools.partial(build, json.loads(settings))
    worker.write_termination = lambda message: write_termination(message, termination)
    try:
        code = worker.main(arguments)
    finally:
        print([name for name in ("torch", "triton", "safetensors", "transformers") if name in sys.modules])
    sys.exit(code)
