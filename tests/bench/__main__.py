"""Runs a tool that measures: python tests/bench NAME [options]. Without a name it lists what there is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.entries import run  # noqa: E402

sys.exit(run(sys.argv[1:]))
