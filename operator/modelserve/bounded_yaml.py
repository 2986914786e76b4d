"""YAML whose aliases cannot grow it out of bounds: a few lines may stand for a billion values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from modelserve.errors import InvalidInput

MOST_BY_ALIASES = 100_000  # values that aliases may stand for beside those that are written


def load_documents(text: str) -> Iterator[Any]:
    """The documents of a stream. Raises InvalidInput where aliases of one stand for more than MOST_BY_ALIASES values,
    or for something they are part of, and yaml.YAMLError, ValueError or RecursionError for what is no YAML."""
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_node():
            root = loader.get_node()
            assert root is not None
            _check(root)
            yield loader.construct_document(root)
    finally:
        loader.dispose()


def load_document(text: str) -> Any:
    """The only document; None of an empty text. Raises as `load_documents`."""
    found = list(load_documents(text))
    if len(found) > 1:
        raise InvalidInput(f"{len(found)} YAML documents are where one is expected: remove the lines ---")
    return found[0] if found else None


def _check(root: yaml.Node) -> None:
    """Sizes with every alias written out, of each node once."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            if id(node) in open_nodes:
                raise InvalidInput("a YAML alias stands for something that it is part of: write it out")
            open_nodes.add(id(node))
            sizes[id(node)] = 1 + sum(map(size, _parts(node)))
            open_nodes.discard(id(node))
        return sizes[id(node)]

    whole = size(root)
    if whole - len(sizes) > MOST_BY_ALIASES:
        raise InvalidInput(
            f"YAML aliases stand for {whole - len(sizes):,} values, at most {MOST_BY_ALIASES:,} are read: write out "
            "what is meant"
        )


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
