"""The tools of this folder by name, and what one needs before it can be imported.

A tool is a module here or in a folder below with a `main`; its docstring's first line says what it answers.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = (
    "operator", "worker", "tests", "tests/models", "tests/cluster", "tests/core", "tests/worker/kernels",
    "tests/worker/execution", "tests/worker/model", "tests/worker/grammar", "tests/worker/scheduling",
)  # fmt: skip


NEEDS = {"kernels": "1 GPU", "engine": "1 GPU", "http": "CPU", "host": "CPU", "operator": "cluster", HERE.name: "CPU"}
OTHERS = {
    "beside_prompt": "CPU", "drafts_change_nothing": "CPU", "host_memory": "CPU",
    "kill_a_rank": "2 GPUs", "kubernetes_on_gpu": "1 GPU", "nccl_memory": "2 GPUs", "pool_matrix": "2 GPUs",
    "rank_sums": "2 GPUs", "serve_and_bench": "1 GPU", "sessions_over_http": "1 GPU",
    "soak": "1 GPU",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tool: `module` as it is imported, what it answers in one line, and what it needs to measure."""

    name: str
    module: str
    answers: str
    needs: str


def entries() -> dict[str, Entry]:
    """Every tool by its name; nothing is imported for it."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        read = ast.parse(path.read_text())
        functions = (each for each in read.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
        if path.parent.name != "__pycache__" and any(each.name == "main" for each in functions):
            module = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
            answers = (ast.get_docstring(read) or "").partition("\n")[0]
            needs = OTHERS.get(path.stem, NEEDS[path.parent.name])
            found[path.stem] = Entry(path.stem, module, answers, needs)
    return found


def command(name: str, *flags: str) -> list[str]:
    """The words of a command that runs this tool in a process of its own."""
    return [sys.executable, str(HERE), name, *flags]


def find_sources() -> None:
    """Modules of the product and of its tests can be imported, here and in processes that are started from here.

    Wheels in the folder $WHEELS serve machines without an HTTP stack, used as they are.
    """
    wheels = sorted(Path(os.environ.get("WHEELS", "wheels")).glob("*.whl"))
    found = [*(str(ROOT / folder) for folder in FOLDERS), *(str(wheel.resolve()) for wheel in wheels)]
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in found]
    sys.path[:] = [*found, *(each for each in sys.path if each not in found)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, *given])


def run(words: Sequence[str]) -> int:
    """Run the tool named by the first word with the others as its arguments; its exit status."""
    known = entries()
    if not words or words[0] not in known:
        print(*(f"{each.name:27} {each.needs:8} {each.answers}" for each in known.values()), sep="\n")
        return 2 if words and words[0] not in ("-h", "--help") else 0
    find_sources()
    sys.argv = list(words)
    ended = importlib.import_module(known[words[0]].module).main()
    return int((asyncio.run(ended) if inspect.iscoroutine(ended) else ended) or 0)
