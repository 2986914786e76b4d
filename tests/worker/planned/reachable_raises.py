"""Which `raise` statements a function can come to, read in the source: a walk over names, not a run.

A name that a function mentions is followed to what it stands for, be it imported or defined beside it. An attribute of
something whose type the source does not say is followed to every method and property of that name of the classes that
were met on the way. So more is found than can happen, and nothing less but for calls through text (`getattr`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, order=True)
class Raise:
    """Of an exception, by the name of its class, in a function: PACKAGE.MODULE:QUALIFIED.NAME."""

    function: str
    exception: str


@dataclass
class _Module:
    definitions: dict[str, ast.AST] = field(default_factory=dict)  # functions and classes by qualified name
    imports: dict[str, str] = field(default_factory=dict)  # what a name stands for: MODULE or MODULE:NAME


class Source:
    """Modules of some packages, parsed."""

    def __init__(self, packages: Mapping[str, Path]) -> None:
        """`packages`: folder of each by its name."""
        self._packages = packages
        self._modules: dict[str, _Module | None] = {}

    def raises(self, roots: Iterable[str]) -> list[Raise]:
        """Of all that `roots` (MODULE:QUALIFIED.NAME) come to, one for each statement. Raises KeyError for a root that
        is not there."""
        found: list[Raise] = []
        seen: set[str] = set()
        classes: dict[str, ast.ClassDef] = {}
        wanted: set[str] = set()  # attributes that were asked of something
        left = list(roots)
        while left:
            key = left.pop()
            if key in seen:
                continue
            seen.add(key)
            module, _, name = key.partition(":")
            node = self._module(module).definitions[name]
            if isinstance(node, ast.ClassDef):
                classes[key] = node
                left += self._of_class(key, node, wanted)
                continue
            names, attributes, raised = _body(node)
            found += [Raise(key, _exception(each)) for each in raised]
            scope = _imports(node) | self._module(module).imports
            for mentioned in names:
                left += self._resolved(module, name, mentioned, scope)
            fresh = attributes - wanted
            wanted |= fresh
            for owner, cls in classes.items():
                left += self._methods(owner, cls, fresh)
        return sorted(found)

    def _of_class(self, key: str, node: ast.ClassDef, wanted: set[str]) -> Iterator[str]:
        """Bases, what runs when one is made, what was asked of something already."""
        module = key.partition(":")[0]
        for base in node.bases:
            names, _, _ = _body(base)
            for name in names:
                yield from self._resolved(module, "", name, self._module(module).imports)
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and (
                each.name in ("__init__", "__post_init__", "__new__", "__enter__", "__exit__", "__call__", "__iter__")
                or any("validator" in ast.unparse(decorator) for decorator in each.decorator_list)
            ):
                yield f"{key}.{each.name}"
        yield from self._methods(key, node, wanted)

    def _methods(self, key: str, node: ast.ClassDef, names: set[str]) -> Iterator[str]:
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name in names:
                yield f"{key}.{each.name}"

    def _resolved(self, module: str, inside: str, name: str, scope: Mapping[str, str]) -> Iterator[str]:
        """What a dotted name stands for in a function of a module."""
        first, *rest = name.split(".")
        definitions = self._module(module).definitions
        for outer in (inside, inside.rpartition(".")[0], ""):
            local = f"{outer}.{first}" if outer else first
            if local in definitions:
                yield f"{module}:{local}"
                return
        target = scope.get(first)
        if target is None:
            return
        if self._read(target.replace(":", ".")) is not None:  # a module that was imported from its package
            target = target.replace(":", ".")
        for part in rest:
            if ":" in target:
                break
            target = f"{target}.{part}" if self._read(f"{target}.{part}") else f"{target}:{part}"
        yield from self._definition(target)

    def _definition(self, target: str, depth: int = 0) -> Iterator[str]:
        """The key of MODULE:NAME, which may be imported there from elsewhere."""
        module, _, name = target.partition(":")
        known = self._read(module)
        if known is None or not name or depth > 4:
            return
        if name in known.definitions:
            yield target
        elif name in known.imports:
            yield from self._definition(known.imports[name], depth + 1)

    def _module(self, name: str) -> _Module:
        found = self._read(name)
        if found is None:
            raise KeyError(name)
        return found

    def _read(self, name: str) -> _Module | None:
        """A module, read once it is asked for; None for what is no module of these packages."""
        if name not in self._modules:
            package, *rest = name.split(".")
            path = self._packages[package].joinpath(*rest) if package in self._packages else Path("nowhere")
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._modules[name] = _parsed(ast.parse(path.read_text())) if path.is_file() else None
        return self._modules[name]


def _parsed(tree: ast.Module) -> _Module:
    made = _Module(imports=_imports(tree))

    def define(body: Iterable[ast.AST], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                made.definitions[prefix + node.name] = node
                define(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                define(ast.iter_child_nodes(node), prefix)

    define(tree.body, "")
    return made


def _exception(node: ast.expr | None) -> str:
    if node is None:
        return "again"
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _imports(node: ast.AST) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            for alias in each.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(each, ast.ImportFrom) and each.module:
            for alias in each.names:
                found[alias.asname or alias.name] = f"{each.module}:{alias.name}"
    return found


def _body(node: ast.AST) -> tuple[set[str], set[str], list[ast.expr | None]]:
    """(names and dotted names, attributes of anything, what is raised) in a function, without functions in it."""
    names: set[str] = set()
    attributes: set[str] = set()
    raised: list[ast.expr | None] = []
    stack: list[ast.AST] = [node]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        stack = [*node.body, *node.decorator_list, *node.args.defaults]
    while stack:
        each = stack.pop()
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(each.name)  # made here, so it may be called
            continue
        if isinstance(each, ast.Raise):
            raised.append(each.exc)
        if isinstance(each, ast.Name):
            names.add(each.id)
        if isinstance(each, ast.Attribute):
            attributes.add(each.attr)
            if dotted := _dotted(each):
                names.add(dotted)
        stack += ast.iter_child_nodes(each)
    return names, attributes, raised


def _dotted(node: ast.expr) -> str:
    """A.B.C of names alone; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""
