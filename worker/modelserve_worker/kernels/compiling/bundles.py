"""Arguments of Triton kernels that belong together: NamedTuples, which kernels name as their parameters' annotations.

Triton takes the members as it takes arguments, and those of `constant` as it takes tl.constexpr. What it writes down of
a launch, to compile it elsewhere, has the members without their names; `preload` gives them back by the annotation.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar, get_type_hints

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

T = TypeVar("T")


@lru_cache(maxsize=None, typed=True)
def constant(value: Any) -> tl.constexpr:
    """A member that is known when the kernel is compiled. One object a value: launches compare it by identity."""
    return tl.constexpr(value)


def bundle(kind: type[T]) -> type[T]:
    """Decorates the NamedTuple. Kernels that are interpreted read plain numbers from it: constants of Triton's know
    fewer operators than the compiler."""
    assert not {"values", "type"} & {*kind.__dict__["_fields"]}, (
        f"{kind.__name__}: Triton's tuples have that themselves"
    )
    if triton.knobs.runtime.interpret:
        for index, name in enumerate(kind.__dict__["_fields"]):
            setattr(kind, name, property(partial(_plain, index=index)))
    return kind


def _plain(members: tuple[Any, ...], index: int) -> Any:
    member = members[index]
    return member.value if isinstance(member, tl.constexpr) else member


def member_names(function: JITFunction[Any]) -> dict[str, tuple[str, ...]]:
    """Of the bundles among a kernel's parameters."""
    return {name: kind._fields for name, kind in _bundles(function).items()}


def preload(function: JITFunction[Any], specialization: str) -> Any:
    """Compile, or find in the cache, what a launch was noted as, as `JITFunction.preload` does for plain arguments."""
    known: dict[str, Any] = json.loads(specialization)
    bundles = _bundles(function)
    signature = {
        name: bundles[name](*kind) if isinstance(kind, list) else kind for name, kind in known["signature"].items()
    }
    constants = {
        tuple(path): constant(value["constexpr"]) if isinstance(value, dict) else value
        for path, value in zip(known["constant_keys"], known["constant_vals"], strict=True)
    }
    attributes = {tuple(path): value for path, value in zip(known["attrs_keys"], known["attrs_vals"], strict=True)}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in known["options"].items()}
    device = triton.runtime.driver.active.get_current_device()
    backend = function.device_caches[device][3]
    parsed = backend.parse_options(options)
    return function._do_compile(known["key"], signature, device, constants, parsed, attributes, warmup=True)


def _bundles(function: JITFunction[Any]) -> dict[str, type[NamedTuple]]:
    hints = get_type_hints(function.fn)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and hasattr(kind, "_fields")}
