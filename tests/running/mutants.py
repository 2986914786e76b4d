"""Change modules in one place at a time, and see whether the tests that import them notice.

    python tests/running/mutants.py --seed 1 --count 20 worker/modelserve_worker/scheduling/arena.py ...

Each mutant is one small fault: a comparison, a sum, a number, a branch or a call is another, or gone. It is put into a
copy of the tree, and the test files that import the module, or those of --tests, run there until one fails: then the
mutant is killed.
Which mutants are drawn follows from the seed and the modules' text. Exit status 1 where one lives.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("operator", "worker")
COPIED = (*SOURCES, "charts", "crds", "docs", "images", "tests", "pyproject.toml", "README.md", "CONTRIBUTING.md")
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
SECONDS = 900
"""After which a run counts as killed: a loop has lost its end."""


class Mutant(NamedTuple):
    """One place of a source, and what stands there instead."""

    line: int
    before: str
    after: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its text."""
    tree = ast.parse(source)
    told = {id(part) for node in ast.walk(tree) for part in _no_behaviour(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) not in told:
            found += [_put(source, node, other) for other in _others(node)]
    return sorted(found, key=lambda mutant: (mutant.line, mutant.before, mutant.after))


def _no_behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations and docstrings below a node, which no test can see, and f-strings, whose parts have no columns."""
    parts = [getattr(node, name, None) for name in ("annotation", "returns")]
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        parts.append(node)
    for part in parts:
        if part is not None:
            yield from ast.walk(part)


def _others(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
        yield _with(node, ops=[OTHER[type(node.ops[0])]()])
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
        yield _with(node, op=OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _put(source: str, node: ast.AST, other: ast.AST) -> Mutant:
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset  # type: ignore[attr-defined]
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset  # type: ignore[attr-defined]
    text = source.encode()
    after = ast.unparse(other)
    inserted = after if isinstance(other, ast.Pass) else f"({after})"
    changed = (text[:start] + inserted.encode() + text[end:]).decode()
    return Mutant(node.lineno, ast.unparse(node), after, changed)  # type: ignore[attr-defined]


def tests_of(module: str, tests: Path) -> list[str]:
    """Test files below `tests` that import the module, or what a package above it hands on of it, and need no cluster,
    by their paths."""
    dotted = module.partition("/")[2].removesuffix(".py").replace("/", ".")
    wanted = _handed_on(tests.parent / module, dotted)
    texts = {path: path.read_text() for path in tests.rglob("test_*.py") if "e2e" not in path.parts}
    found = [
        path
        for path, text in texts.items()
        if "pytestmark = pytest.mark.e2e" not in text and _takes(text, dotted, wanted)
    ]
    return sorted(str(path.relative_to(tests.parent)) for path in found)


def _handed_on(module: Path, dotted: str) -> dict[str, set[str]]:
    """Names that the packages above a module import from it, by package."""
    found = {}
    for folder, levels in zip(module.parents, range(1, dotted.count(".") + 1), strict=False):
        init = folder / "__init__.py"
        tree = ast.parse(init.read_text() if init.exists() else "")
        package = dotted.rsplit(".", levels)[0]
        found[package] = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == dotted
            for alias in node.names
        }
    found[dotted.rpartition(".")[0]].add(dotted.rpartition(".")[2])
    return found


def _takes(text: str, dotted: str, wanted: dict[str, set[str]]) -> bool:
    if not any(package in text for package in wanted):
        return False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name == dotted for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == dotted:
            return True
        if isinstance(node, ast.ImportFrom) and wanted.get(node.module or "", set()) & {n.name for n in node.names}:
            return True
    return False


def _passes(tree: Path, tests: Sequence[str]) -> bool:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / folder) for folder in SOURCES)}
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", "not e2e", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="a path below the repository's root")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="where no test file imports the module itself")
    asked = parser.parse_args()
    tests = {module: asked.tests or tests_of(module, ROOT / "tests") for module in asked.modules}
    drawn = [(module, mutant) for module in asked.modules for mutant in mutants((ROOT / module).read_text())]
    drawn = random.Random(asked.seed).sample(drawn, min(asked.count, len(drawn)))
    killed = 0
    with tempfile.TemporaryDirectory(prefix="modelserve-mutants-") as name:
        tree = Path(name)
        for part in COPIED:
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, tree / part)
        for module in {module for module, _ in drawn}:
            if not tests[module] or not _passes(tree, tests[module]):
                parser.error(
                    f"the tests of {module} do not pass as it is: {' '.join(tests[module]) or 'there are none'}"
                )
        for module, mutant in drawn:
            whole = (ROOT / module).read_text()
            (tree / module).write_text(mutant.source)
            lives = _passes(tree, tests[module])
            (tree / module).write_text(whole)
            killed += not lives
            word = "LIVES " if lives else "killed"
            print(f"{word} {module}:{mutant.line}: {mutant.before!r} -> {mutant.after!r}", flush=True)
    print(f"{killed} of {len(drawn)} killed")
    return 0 if killed == len(drawn) else 1


if __name__ == "__main__":
    sys.exit(main())
