"""Triton's interpreter without what it computes anew for every call of a function and every value of a kernel.

Of Triton 3.6. What it interprets is unchanged: the same functions are set in the same places, once a launch instead of
once a call of a device function, and types, shapes and NumPy's names for them are found instead of built again. Tests
of kernels take less than half of their CPU.
"""

from __future__ import annotations

import builtins
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_tuple = builtins.tuple


class _Shape(NamedTuple):
    """What all block types of one shape, and all values of such a type, have in common."""

    of_type: Any
    elements: int
    text: str
    of_value: Any
    elements_of_value: Any


class _Language:
    """What is set on Triton's language while a kernel is interpreted."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any, Any]] = []  # object, name, value, what was there
        self._set = False

    def patch(self, _: Any) -> _Language:
        """In the place of `_patch_lang`, which device functions call, too, within the launch that has done it."""
        if not self._set:
            if not self._changes:
                self._changes = _changes()
            self._set = True
            for changed, name, value, _ in self._changes:
                setattr(changed, name, value)
        return self

    def restore(self) -> None:
        """The launch has ended."""
        self._set = False
        for changed, name, _, before in self._changes:
            if before is interpreter._MISSING:
                delattr(changed, name)
            else:
                setattr(changed, name, before)


def _changes() -> list[tuple[Any, str, Any, Any]]:
    """What Triton sets for a kernel that knows the language and its core, and one thing beside."""
    scope = _PATCH_LANGUAGE(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    # int() of arrays of one element, which a kernel's `range` needs, is refused by NumPy 2.4.
    scope.set_attr(core.tensor, "__index__", lambda self: self.handle.data.item())
    places = {(id(changed), name): (changed, name) for changed, name, _ in scope._changes}.values()
    values = [vars(changed)[name] for changed, name in places]
    scope.restore()
    missing = interpreter._MISSING
    return [
        (changed, name, value, vars(changed).get(name, missing))
        for (changed, name), value in zip(places, values, strict=True)
    ]


def _patch_attr(changed: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """`member` with the interpreter's semantic; without the function around it that asks whether it has one."""
    semantic = TritonSemantic(builder)
    function = getattr(member, "__wrapped__", member)

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(changed, name, interpreted)


_PATCH_LANGUAGE = interpreter._patch_lang
_SHAPES: dict[tuple[int, ...], _Shape] = {}
_NUMPY_TYPES: dict[str, Any] = {}
_numpy_type, _block_type_of = interpreter._get_np_dtype, core.block_type.__init__


def _np_dtype(of: Any) -> Any:
    scalar = of.element_ty if isinstance(of, core.block_type) else of
    found = _NUMPY_TYPES.get(scalar.name)
    if found is None:
        found = _NUMPY_TYPES[scalar.name] = _numpy_type(scalar)
    return found


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    shape = core._unwrap_if_constexpr(shape) if isinstance(shape, core.constexpr) else shape
    key = _tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
    found = _SHAPES.get(key)
    if found is None:
        _block_type_of(self, element_ty, shape)
        of_value = core.tuple([core.constexpr(each) for each in self.shape])
        found = _SHAPES[key] = _Shape(self.shape, self.numel, str(self.shape), of_value, core.constexpr(self.numel))
    self.element_ty, self.shape, self.numel = element_ty, found.of_type, found.elements
    self.name = f"<{found.text}, {element_ty}>"
    self._common = found


_NO_SHAPE = core.tuple([])
_ONE = core.constexpr(1)


def _value(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - as Triton names it
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        self.shape, self.numel = type._common.of_value, type._common.elements_of_value
    else:
        self.shape, self.numel = _NO_SHAPE, _ONE


_item_of = core.tuple.__getitem__


def _item(self: Any, at: Any) -> Any:
    return self.values[at] if at.__class__ is int else _item_of(self, at)


def _equal(self: Any, other: Any) -> Any:
    if other is self:
        return core.constexpr(True)
    values = core._unwrap_if_constexpr(other)
    values = values.values if isinstance(values, core.tuple) else list(values)
    return core.constexpr(self.values == values)


def _same_type(self: Any, other: Any) -> bool:
    return other is self or _equal_types(self, other)


_equal_types = core.dtype.__eq__


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return _broadcast_others(self, lhs, rhs)


_broadcast_others = TritonSemantic.broadcast_impl_value


def _check_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Triton computes what it asserts even where it asserts nothing."""
    if self.builder.options.debug:
        _overflow(self, lhs, rhs, operation)


_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
_INTEGERS = frozenset((*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES))


def install() -> None:
    """For as long as the process lives, which interprets its kernels."""
    interpreter._patch_lang = _Language().patch
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _np_dtype
    core.block_type.__init__ = _block_type
    core.tensor.__init__ = _value
    core.tuple.__getitem__ = _item
    core.tuple.__eq__ = _equal
    core.dtype.__eq__ = _same_type
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    core.dtype.is_int = lambda self: self.name in _INTEGERS
