"""Triton's interpreter without the work that it does again at every operation, and with products that are the same to
the bit in tiles of any size and on any x86 CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


def prepare(patch: pytest.MonkeyPatch) -> interpreter._LangPatchScope:
    """Makes kernels take less than half of their time. Undone by the scope's `restore` and by `patch`."""
    _prepare_operators(patch)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_order)

    # Its own functions come into triton.language once, and not whenever a device function is called.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())

    # Whether a sum of integers overflows is computed for an assertion that is only made with debug.
    assert not interpreter.interpreter_builder.options.debug
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)

    patch.setattr(interpreter, "_convert_float", _converted_at_once(interpreter._convert_float))

    known_at_once = {type(None), bool, int, float, str, core.tensor, core.dtype, core.pointer_type, core.block_type}
    unwrap = core._unwrap_if_constexpr
    patch.setattr(core, "_unwrap_if_constexpr", lambda value: value if type(value) in known_at_once else unwrap(value))
    cast = semantic.TritonSemantic.cast

    def cast_unless_equal(self: Any, value: Any, wanted: Any, *rest: Any) -> Any:
        return value if value.type.scalar.name == wanted.scalar.name else cast(self, value, wanted, *rest)

    patch.setattr(semantic.TritonSemantic, "cast", cast_unless_equal)

    # Each value has one of a few types.
    patch.setattr(interpreter, "_get_np_dtype", _once_a_name(interpreter._get_np_dtype))
    for kind in (core.dtype, core.block_type):
        patch.setattr(kind, "to_ir", _once_a_name(kind.to_ir))
    blocks = dict[tuple[str, str], Any]()
    with_element_type = core.block_type.with_element_ty

    def block_of(self: Any, element: Any) -> Any:
        key = self.name, element.name
        if key not in blocks:
            blocks[key] = with_element_type(self, element)
        return blocks[key]

    patch.setattr(core.block_type, "with_element_ty", block_of)
    make_block = core.block_type.__init__
    made = dict[tuple[Any, ...], dict[str, Any]]()

    def init_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *shape
        if key not in made:
            make_block(self, element, shape)
            made[key] = vars(self)
        vars(self).update(made[key])

    patch.setattr(core.block_type, "__init__", init_block)
    make_tensor = core.tensor.__init__
    shapes = dict[str, tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    patch.setattr(core.tensor, "__init__", init)
    return scope


def _prepare_operators(patch: pytest.MonkeyPatch) -> None:
    """What comes of two types, a block and a number, or two shapes is found out once."""
    call_with, no_argument = interpreter.interpreter_semantic, object()

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the question whether `_semantic` is there

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = call_with
            return function(*arguments, **named)

        scope.set_attr(owner, name, call)

    patch.setattr(interpreter, "_patch_attr", patch_attr)

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = no_argument) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is no_argument else attr

    patch.setattr(interpreter.TensorHandle, "__init__", make_handle)
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    shaped = dict[tuple[str, str], tuple[Any, Any]]()

    def broadcast_once(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        names = one.type.name, other.type.name
        if names[0] == names[1]:
            return one, other
        if names not in shaped:
            both = broadcast(self, one, other)
            if one.type.is_block() and other.type.is_block() and len(one.shape) == len(other.shape):
                shaped[names] = tuple(each.type for each in both)
            return both
        return tuple(
            each
            if each.type.name == wanted.name
            else self.tensor(self.builder.create_broadcast(each.handle, wanted.shape.values), wanted)
            for each, wanted in zip((one, other), shaped[names], strict=True)
        )

    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_once)
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    # Of these types, the least and the largest number that becomes one of them.
    int32, inf = np.iinfo(np.int32), np.inf
    numbers = {
        "fp32": (-inf, inf),
        "uint32": (0, int32.max),
        **dict.fromkeys(("int32", "int64"), (int32.min, int32.max)),
    }
    same = numbers.keys() | {"int1", "int8", "uint8", "int16", "uint16", "uint64"}  # as the result, where both are this
    offsets = {"int32", "int64"}
    handles = dict[tuple[Any, str], Any]()

    def spread(self: Any, number: Any, other: Any, pointers: bool) -> Any:
        """Of the other's shape, for which numpy needs no copies; None where Triton's own rules decide."""
        scalar = other.type.scalar
        if pointers and scalar.is_ptr():
            scalar = core.int32
        least, largest = numbers.get(scalar.name, (inf, -inf))
        if not (type(number) is int or (type(number) is float and scalar.name == "fp32")):
            return None
        if not least <= number <= largest:
            return None
        key = number, scalar.name
        if key not in handles:
            handles[key] = interpreter.TensorHandle(np.full(1, number, interpreter._get_np_dtype(scalar)), scalar)
        return self.tensor(handles[key], other.type.with_element_ty(scalar) if other.type.is_block() else scalar)

    def check_fast(self: Any, one: Any, other: Any, *rest: Any, **more: Any) -> tuple[Any, Any]:
        if type(one) is core.tensor:
            if type(other) is core.tensor:
                left, right = one.type.scalar, other.type.scalar
                if offsets == {left.name, right.name}:
                    one, other = self.cast(one, core.int64), self.cast(other, core.int64)
                    left = right = core.int64
                if (left.name in same and left.name == right.name) or (
                    left.is_ptr() and rest and right.name in offsets
                ):
                    blocks = one.type.is_block(), other.type.is_block()
                    if all(blocks):
                        return self.broadcast_impl_value(one, other)
                    if blocks[0]:
                        return one, self.tensor(other.handle, one.type.with_element_ty(right))
                    if blocks[1]:
                        return self.tensor(one.handle, other.type.with_element_ty(left)), other
                    return one, other
            elif (made := spread(self, other, one, bool(rest))) is not None:
                return one, made
        elif type(other) is core.tensor and (made := spread(self, one, other, False)) is not None:
            return made, other
        return check(self, one, other, *rest, **more)

    patch.setattr(semantic.TritonSemantic, "binary_op_type_checking_impl", check_fast)


def _dot_in_order(self: Any, a: Any, b: Any, acc: Any, *_precision: Any) -> Any:
    """acc + a b, every element one sum over k from the first product to the last. The interpreter's own goes through
    numpy's BLAS, whose order depends on the shape and on the CPU; einsum multiplies and adds along rows of b."""
    factors, dtype = [], acc.data.dtype
    for factor in (a, b):
        data = factor.data
        if factor.dtype.is_fp8():
            data = interpreter._convert_float(data, factor.dtype, language.float16, None).view(np.float16)
        factors.append(np.ascontiguousarray(data, dtype))
    return interpreter.TensorHandle(np.einsum("...mk,...kn->...mn", *factors) + acc.data, acc.dtype.scalar)


def _once_a_name(function: Callable[..., Any]) -> Callable[..., Any]:
    known = dict[str, Any]()

    def call(type: Any, *builder: Any) -> Any:
        if type.name not in known:
            known[type.name] = function(type, *builder)
        return known[type.name]

    return call


def _converted_at_once(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Numbers of 8 and 16 bits are looked up among all that there are; of a float32 the upper half is its bfloat16."""
    tables = dict[tuple[str, str, Any], np.ndarray]()

    def call(numbers: np.ndarray, given: Any, wanted: Any, rounding: Any) -> np.ndarray:
        size = given.primitive_bitwidth
        codes = numbers.view(f"uint{size}")
        if size <= 16:
            key = given.name, wanted.name, rounding
            if key not in tables:
                tables[key] = convert(np.arange(2**size, dtype=codes.dtype), given, wanted, rounding)
            return tables[key][codes]
        if rounding is None and (given.name, wanted.name) == ("fp32", "bf16"):
            subnormal = (codes & 0x7F800000 == 0) & (codes & 0x007FFFFF != 0)  # which the interpreter turns into others
            if not subnormal.any():
                return (codes >> 16).astype(np.uint16)
        return convert(numbers, given, wanted, rounding)

    return call
